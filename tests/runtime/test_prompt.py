"""What is refused before a text is generated: prompts, tokenizers, devices, broken configurations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
)

from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.runtime.decode.prompt import prepare
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_prompt_of_as_many_tokens_as_there_is_room_for():
    tokens = prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=1).ids.numel()
    assert prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=256 - tokens).max_new_tokens == 256 - tokens
    with pytest.raises(
        UsageError, match=f"`max_new_tokens={257 - tokens}`: behind {tokens} of prompt"
    ) as short:
        prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=257 - tokens)
    assert f"give `max_new_tokens={256 - tokens}` or fewer" in short.value.hint
    with pytest.raises(UsageError, match=r"`prompt`: has \d+ tokens, and the model was made for 256"):
        prepare(CHECKPOINT, "x = 1\n" * 200, max_new_tokens=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "`prompt`: is empty"), ("x\udcff", "`prompt`: is not Unicode at position 1")],
    ids=["empty", "surrogate"],
)
def test_prompt_that_is_no_text(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        prepare(CHECKPOINT, text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in checkpoint to spoil."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def test_folder_without_a_tokenizer(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(NeuzipError, match="there is no tokenizer") as refusal:
        prepare(folder, "x")
    assert "save_pretrained" in (refusal.value.hint or "")


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["bench"]], ids=["generate", "bench"])
def test_source_that_is_no_folder(command: list[str], folder: Path, neuzip):
    verb, *options = command
    missing, file = folder / "missing", folder / "model.safetensors"
    said = neuzip(verb, missing, *options, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == neuzip("inspect", missing).stderr
    said = neuzip(verb, file, *options, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith(f"error: {file}: has no config.json: a file of weights alone is no model")
    assert "hint: give a folder" in said.stderr


def test_device_that_is_not_there_for_a_model(small: Path, monkeypatch):
    for name in ("nonsense", "cuda:x", ""):
        with pytest.raises(UsageError, match="torch knows no such device"):
            load_model(small, device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device='cuda'`: torch finds no CUDA device"):
        load_model(small, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="device='cuda:1'`: torch finds 1 CUDA device"):
        load_model(small, device="cuda:1")


def test_tokenizer_of_another_model(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    with pytest.raises(NeuzipError, match=r"the tokenizer makes token \d+, the model knows 5"):
        prepare(folder, "import")


@pytest.mark.parametrize(
    ("text", "problem"), [('{"model_type": ', "the JSON is broken"), ("[]", "not an object")]
)
def test_a_broken_config_is_not_the_tokenizers_fault(text: str, problem: str, folder: Path, neuzip):
    (folder / "config.json").write_text(text)
    said = neuzip("generate", folder, "--prompt", "x")
    assert said.exit_code == 1
    assert said.stderr.startswith(f"error: {folder / 'config.json'}: ") and problem in said.stderr


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_length": "x"}, "field 'max_length': \"x\" is no number"),
        ({"temperature": True}, "field 'temperature': true is no number"),
        ({"eos_token_id": "y"}, "field 'eos_token_id': \"y\" is no token"),
        ({"eos_token_id": []}, "field 'eos_token_id': [] is no token"),
        ({"eos_token_id": [1, "y"]}, "is no token"),
        ({"repetition_penalty": -1}, "transformers cannot do what it asks for, repetition_penalty = -1: "),
        ({"bad_words_ids": "x"}, "transformers cannot do what it asks for, bad_words_ids = 'x': "),
        ({"cache_implementation": "zzz"}, "transformers does not take it: "),
    ],
)
def test_a_generation_config_of_nonsense_is_named(values: dict[str, Any], field: str, folder: Path, neuzip):
    (folder / "generation_config.json").write_text(json.dumps(values))
    said = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 2)
    assert said.exit_code == 1, said.stderr
    assert said.stderr.startswith(f"error: {folder / 'generation_config.json'}")
    assert field in said.stderr


@pytest.mark.parametrize("stop", [["</s>", "class"], "class"])
def test_strings_of_the_generation_config_end_a_text(stop: object, folder: Path, neuzip):
    whole = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 8, "--quiet").stdout
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": stop}))
    said = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 8, "--quiet")
    assert said.exit_code == 0, said.stderr
    assert whole.partition("class")[1:] != ("", "")
    assert said.stdout.strip() == "".join(whole.partition("class")[:2]).strip()


def test_a_tokenizer_that_panics_is_named(folder: Path, neuzip):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$|(?:a|aa)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    for command in (
        ["generate", folder, "--prompt", "a" * 40 + "!"],
        ["eval", folder, "--text", folder / "a"],
    ):
        (folder / "a").write_text("a" * 40 + "!")
        said = neuzip(*command)
        assert said.exit_code == 1, said.stderr
        assert f"error: {path}: the tokenizer fails: " in said.stderr


def test_chat_puts_the_prompt_into_the_template(folder: Path):
    with pytest.raises(NeuzipError, match="its tokenizer has no chat template"):
        prepare(folder, "x", chat=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    tokenizer.save_pretrained(folder)
    ids = prepare(folder, "x", chat=True).ids
    assert tokenizer.decode(ids[0]) == "<user>x<answer>"
    ids = prepare(folder, "x", system="be brief").ids
    assert tokenizer.decode(ids[0]) == "<system>be brief<user>x<answer>"
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(NeuzipError, match=r"its chat template fails: .*no system role") as failure:
        prepare(folder, "x", system="be brief")
    assert failure.value.hint == "leave out `system`: not every template takes one"


def test_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="`device='cuda'`: torch finds no CUDA device"):
        choose_device("cuda")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "{0}", "--prompt", "x"), ("bench", "{0}"), ("eval", "{0}", "--text", "demo"),
        ("layers", "{0}", "--text", "demo"), ("sweep", "{0}", "--text", "demo"),
        ("experts", "{0}", "--text", "demo"),
        ("ternarize", "{0}", "{0}.t"), ("recover", "{0}", "--text", "demo", "-o", "{0}.r", "--steps", "1"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_gpu_that_is_not_there_is_wrong_use_of_every_command(command, folder: Path, neuzip, monkeypatch):
    """Said before the model is read: here nothing else could fail either."""
    monkeypatch.setattr("neuzip.compress.device.driver_devices", lambda: 0)
    said = neuzip(*(part.format(folder) for part in command), "--device", "cuda")
    assert said.exit_code == 2
    assert said.stderr.startswith("error: --device cuda: NVIDIA's driver finds no device\nhint: ")
