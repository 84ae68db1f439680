"""What a newcomer types first, wrongly or with too little text: the answer is quick, and says why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuzip.train import configuration, optimizers, states

Speak = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo checkpoint in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(root / "eval/demo/checkpoint", tmp_path / "m")).relative_to(tmp_path)


def in_a_new_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *map(str, arguments)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_module_is_the_command() -> None:
    said = in_a_new_process("-m", "neuzip", "--version")
    assert (said.returncode, said.stderr) == (0, "") and said.stdout.startswith("neuzip ")
    said = in_a_new_process("-m", "neuzip", "frobnicate")
    assert said.returncode == 2 and said.stderr.startswith("error: no such command 'frobnicate'\n")


WRONG = {
    "eval: no model": (["eval", "none", "--text", "demo"], "none: no such file or folder"),
    "eval: no original": (
        ["eval", "m", "--original", "none", "--text", "demo"], "none: no such file or folder",
    ),
    "eval: no text": (["eval", "m", "--text", "none.txt"], "none.txt: cannot be read"),
    "eval: no convention": (["eval", "m", "--text", "demo", "--conventions", "x"], "no convention 'x'"),
    "sweep: no model": (["sweep", "none", "--text", "t.txt"], "none: no such file or folder"),
    "sweep: no scheme": (["sweep", "m", "--text", "t.txt", "--schemes", "x"], "there is no scheme 'x'"),
    "sweep: bits": (["sweep", "m", "--text", "t.txt", "--schemes", "k99"], "99 mantissa bits are not"),
    "generate: no model": (["generate", "none", "--prompt", "x"], "none: no such file or folder"),
    "generate: a text": (["generate", "t.txt", "--prompt", "x"], "t.txt: is not a .safetensors file"),
    "bench: no model": (["bench", "none"], "none: no such file or folder"),
    "layers: no text": (["layers", "m", "--text", "none.txt"], "none.txt: cannot be read"),
    "layers: DST": (["layers", "m", "--text", "t.txt", "--drop", 1, "-o", "m"], "m: is the same place as m"),
    "ternarize: no text": (
        ["ternarize", "m", "t", "--text", "none.txt", "--allow-destructive"], "none.txt: cannot be",
    ),
    "recover: no text": (
        ["recover", "m", "--text", "none.txt", "--steps", 1, "-o", "t"], "--text none.txt: no such file",
    ),
    "recover: DST": (["recover", "m", "--text", "t.txt", "--steps", 1, "-o", "t.txt"], "t.txt: exists"),
    "patch-attention: limit": (
        ["patch-attention", "m", "p", "--text", "t.txt", "--max-kld", "x"], "--max-kld x: is no divergence",
    ),
    "compress: target": (["compress", "m", "p", "--max-kld", "x"], "--max-kld x: is no divergence"),
    "compress: no text": (
        ["compress", "m", "p", "--max-kld", "0.1", "--text", "none.txt"], "none.txt: cannot be read",
    ),
    "train: no file": (["train", "none.toml"], "none.toml: cannot be read"),
    "train: no key": (["train", "wrong.toml"], "wrong.toml: there is no key 'stpes'"),
    "train: no model": (["train", "lost.toml"], "none: no such file or folder"),
}  # fmt: skip

CODE = """
import contextlib, io, json, sys
from neuzip.cli import run

for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run(arguments)
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    print(json.dumps([code, said.getvalue(), heavy]))
"""


@pytest.mark.slow
def test_what_is_wrong_is_told_before_torch_is_imported(model: Path) -> None:
    """In a process that is new, one after the other: none of them may bring it in."""
    Path("t.txt").write_text("A text of some words. " * 99)
    toml = 'model = "{}"\ntext = ["t.txt"]\noutput = "o"\nlr = 1e-3\noptimizer = "sgd"\n{} = 1\n'
    Path("wrong.toml").write_text(toml.format("m", "stpes"))
    Path("lost.toml").write_text(toml.format("none", "steps"))
    asked = json.dumps([[str(argument) for argument in arguments] for arguments, _ in WRONG.values()])
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE], input=asked, capture_output=True, text=True, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(WRONG), done.stderr
    for (name, (_, problem)), (code, said, heavy) in zip(WRONG.items(), answers, strict=True):
        assert code in (1, 2) and problem in said, (name, said)
        assert heavy == [], name
    assert sorted(p.name for p in Path().iterdir()) == ["lost.toml", "m", "t.txt", "wrong.toml"]


def test_names_that_are_told_without_torch_are_those_that_there_are() -> None:
    assert configuration.KEPT == states.STATE_STORAGES
    assert tuple(optimizers.OPTIMIZERS) == configuration.OPTIMIZERS


@pytest.mark.parametrize("bits", [7, 9])
def test_more_mantissa_bits_than_there_are_round_nothing_and_that_is_said(
    bits: int, model: Path, neuzip: Speak
) -> None:
    said = neuzip("compress", model, "k", "--mantissa-bits", bits)
    assert said.exit_code == 0 and "lossless: all 56 tensors, bit for bit" in said.stdout
    assert said.stderr == f"warning: nothing is rounded: BF16 has 7 mantissa bits, and {bits} keep them all\n"
    found = neuzip("compress", model, "k2", "--mantissa-bits", bits, "--json").json
    assert len(found["warnings"]) == 1
    assert sum(bool(t["note"].endswith("keep them all")) for t in found["tensors"]) == 43


def test_where_some_tensors_keep_all_bits_all_of_them_are_counted(
    tmp_path: Path, save: Callable[..., Path], neuzip: Speak
) -> None:
    """A small one too, if one is large."""
    import numpy as np

    values = np.random.default_rng(0).normal(0, 0.02, 65536).astype(np.float32)
    halves = values.astype(np.float16).view(np.uint16)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {
        "a": ("F16", (64, 1024), halves), "b": ("BF16", (64, 1024), bits),
        "c": ("BF16", (64, 64), bits[:4096]),
    }  # fmt: skip
    save(tmp_path / "model" / "model.safetensors", tensors)
    said = neuzip("compress", tmp_path / "model", tmp_path / "k", "--mantissa-bits", 8)
    assert "1 of 3 tensors rounded" in said.stdout
    assert "stored lossless: 2 tensors, BF16 has 7 mantissa bits, and 8 keep them all" in said.stderr
    assert "warning" not in said.stderr


@pytest.mark.slow
def test_too_few_windows_for_an_error_are_told(model: Path, neuzip: Speak) -> None:
    ask = ("eval", model, "--original", model, "--text", "demo", "--max-tokens")
    said = neuzip(*ask, 500, "--conventions", "token").stdout
    why = "2 windows count as fewer than 3 equal ones"
    assert f"\nno ± standard error: {why}; no special tokens\n" in said
    assert f"500 tokens (token), no ±: {why}:" in said
    said = neuzip(*ask, 800, "--conventions", "token").stdout
    assert "\n± standard error over 4 windows; no special tokens\n" in said and "no ±" not in said
    said = neuzip("layers", model, "--text", "demo", "--max-tokens", 300, "--gradients", 0).stdout
    assert f"errors  no ± standard error: {why}" in said


@pytest.mark.slow
def test_recover_tells_its_losses(
    tiny: Path, tmp_path: Path, root: Path, neuzip: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = ("--steps", 3, "--window", 16, "--batch", 1, "--device", "cpu")
    said = neuzip("recover", tiny, "--text", root / "LICENSE", "-o", "tern", *ask)
    assert said.exit_code == 0, said.stderr
    losses = [json.loads(line)["loss"] for line in Path("tern/recovery.jsonl").read_text().splitlines()]
    assert f"training loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end\n" in said.stdout
    assert "tern/recovery.svg" in said.stdout and Path("tern/recovery.svg").is_file()


def test_a_model_without_some_layers_is_not_compared_tensor_by_tensor(model: Path, neuzip: Speak) -> None:
    ask = ("--text", "demo", "--max-tokens", 100, "--gradients", 0)
    assert neuzip("layers", model, *ask, "--drop", 1, "-o", "shallow").exit_code == 0
    assert neuzip("compress", "shallow", "shallow.nz").exit_code == 0
    said = neuzip("verify", "shallow.nz", "--original", model)
    assert said.exit_code == 1
    assert (
        "error: shallow.nz: was made without some layers of m, and the others have new numbers" in said.stderr
    )
    assert "neuzip eval shallow.nz --original m --text TEXT measures what is missing" in said.stderr
    assert neuzip("verify", "shallow.nz", "--original", "shallow").exit_code == 0
    assert neuzip("verify", "shallow.nz").exit_code == 0
