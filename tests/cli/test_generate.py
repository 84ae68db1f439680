"""`neuzip generate`: what it prints in each mode, where the prompt comes from, wrong use, interrupts."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuzip.runtime.decode import generate as generate_module
from neuzip.runtime.decode.generate import Generation

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_command_in_all_modes(small: Path, in_all_modes):
    said = in_all_modes("generate", small, "--prompt", "def main(", "--max-new-tokens", 12, "--device", "cpu")
    answer = said["json"].json
    text = answer["text"]
    assert said["human"].stdout == f"{text}\n"
    assert said["quiet"].stdout.splitlines() == text.splitlines()
    assert (said["json"].stderr, said["quiet"].stderr) == ("", "")
    summary = said["human"].stderr
    assert summary.startswith("loaded in ") and summary.endswith("; residency dense\n")
    assert " tokens/s; peak memory " in summary
    assert len(answer["tokens"]) == 12
    assert answer["prompt"] == "def main("
    assert answer["seconds"] > answer["first_token_seconds"] > 0
    assert answer["peak_bytes"] > 1e7
    assert (answer["residency"], answer["device"]) == ("dense", "cpu")
    assert (answer["graphed"], answer["not_graphed"]) == (False, "it is not on a GPU")


def test_kernels_are_compiled_for_the_tokens_of_the_prompt(small: Path, neuzip, monkeypatch):
    from neuzip.cli.commands import generate

    counts: list[int] = []
    monkeypatch.setattr(generate, "prefetch_kernels", lambda *arguments: counts.append(arguments[-1]))
    prompt = "word " * 13  # by its bytes 16 tokens, and of these many are compiled for
    answer = neuzip("generate", small, prompt, "--max-new-tokens", 1, "--device", "cpu", "--json").json
    assert answer["prompt_tokens"] != 16
    assert counts == [16, answer["prompt_tokens"]]
    assert answer["capture_seconds"] == 0


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> None:
    """Give stdin some bytes; None is a terminal, on which nobody types."""
    source = io.BytesIO(data or b"")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=source, isatty=lambda: data is None))


def test_a_prompt_is_an_argument_an_option_or_stdin(small: Path, neuzip, monkeypatch):
    few = ("--max-new-tokens", 1, "--device", "cpu", "--json")
    stdin(monkeypatch, b"from stdin\n")
    for words, prompt in (
        (("from an argument",), "from an argument"),
        (("-p", "from an option"), "from an option"),
        ((), "from stdin"),
    ):
        assert neuzip("generate", small, *words, *few).json["prompt"] == prompt
    both = neuzip("generate", small, "a", "--prompt", "b")
    assert both.exit_code == 2
    assert both.stderr.startswith("error: --prompt and PROMPT: both give a prompt\n")
    stdin(monkeypatch, None)
    none = neuzip("generate", small)
    assert none.exit_code == 2 and none.stderr.startswith("error: PROMPT: is missing\nhint: ")


def test_slow_code_for_packed_weights_is_told(small: Path, neuzip):
    arguments = ("generate", small, "import", "--max-new-tokens", 1, "--device", "cpu")
    hint = "hint: on a CPU packed weights run by slow reference code; --residency dense is faster\n"
    assert hint in neuzip(*arguments, "--residency", "packed").stderr
    assert hint not in neuzip(*arguments).stderr


def test_a_stop_string_may_be_a_line_end(small: Path, neuzip):
    command = ("generate", small, "def main(", "--max-new-tokens", 40, "--device", "cpu", "--json")
    whole, made = neuzip(*command).json, neuzip(*command, "--stop", r"\n").json
    assert "\n" in whole["text"] and made["text"] == whole["text"].partition("\n")[0]
    assert (whole["finish_reason"], made["finish_reason"]) == ("length", "stop")


def test_prompt_from_stdin_less_its_last_line_end(small: Path, neuzip, monkeypatch):
    stdin(monkeypatch, "def über(\n\n".encode())
    said = neuzip("generate", small, "--prompt", "-", "--max-new-tokens", 3, "--device", "cpu", "--json")
    assert said.json["prompt"] == "def über(\n"
    stdin(monkeypatch, b"ab\xff")
    said = neuzip("generate", small, "--prompt", "-")
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("error: PROMPT from stdin: not UTF-8: byte 0xff at position 2\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "--prompt: is empty"),
        (["--prompt", "x", "--max-new-tokens", "300"], "--max-new-tokens 300: behind 1 of prompt"),
        (["--prompt", "x", "--seed", "1"], "--seed: has no effect at temperature 0"),
        (
            ["--prompt", "x", "--temperature", "1", "--top-p", "0"],
            "--top-p 0.0: is not above 0 and at most 1",
        ),
        (["--prompt", "x", "--top-k", "5"], "--top-k: has no effect at temperature 0"),
        (["--prompt", "x", "--min-p", "0.1"], "--min-p: has no effect at temperature 0"),
        (["--prompt", "x", "--temperature", "1", "--min-p", "1"], "--min-p 1.0: is not from 0 to below 1"),
        (["--prompt", "x", "--temperature", "1e-40"], "--temperature 1e-40: is too small to divide by"),
        (
            ["--prompt", "x", "--temperature", "1", "--seed", str(1 << 64)],
            "--seed 18446744073709551616: is no",
        ),
        (["--prompt", "x", "--stop", ""], "--stop: is empty"),
        (["--prompt", "x", "--residency", "ans", "--device", "cpu"], ""),
    ],
    ids=[
        "empty prompt",
        "too long",
        "seed",
        "top-p",
        "top-k",
        "min-p",
        "most",
        "cold",
        "long seed",
        "stop",
        "ans on a CPU",
    ],
)
def test_wrong_use(options: list[str], message: str, small: Path, neuzip):
    said = neuzip("generate", small, *options)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith(f"error: {message}")
    assert "hint: " in said.stderr


def test_wrong_use_is_said_before_the_weights_are_read(small: Path, neuzip, monkeypatch):
    from neuzip.runtime.hf import load

    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert neuzip("generate", small, "--prompt", "x", "--max-new-tokens", 300).exit_code == 2


@pytest.mark.parametrize(
    "options", [["--top-k", 5], ["--temperature", 1, "--top-p", 0], ["--stop", ""]], ids=["k", "p", "stop"]
)
def test_wrong_use_is_said_before_a_download(options: list[object], neuzip, monkeypatch):
    from neuzip.formats.hub import download

    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("the model was downloaded"))
    assert neuzip("generate", "org/model", "x", *options).exit_code == 2


def test_text_cannot_steer_the_terminal_but_json_has_it(small: Path, neuzip, monkeypatch):
    def say(*_: Any, on_text: Callable[[str], None], **__: Any) -> Generation:
        on_text("a\x1b[2J")
        on_text("b\n")
        return Generation("a\x1b[2Jb\n", (1, 2), 0.2, 0.1)

    monkeypatch.setattr(generate_module, "generate", say)
    said = neuzip("generate", small, "--prompt", "x", "--device", "cpu")
    assert said.stdout == "a\\x1b[2Jb\n\n"
    assert "; 2 tokens in 0.20 s; the first after 0.10 s, then 10.0 tokens/s; peak " in said.stderr
    assert neuzip("generate", small, "--prompt", "x", "--json").json["text"] == "a\x1b[2Jb\n"


def test_interrupt_ends_the_line_and_the_command(small: Path, neuzip, monkeypatch):
    def say(*_: Any, on_text: Callable[[str], None], **__: Any) -> Generation:
        on_text("half a")
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "generate", say)
    said = neuzip("generate", small, "--prompt", "x", "--device", "cpu")
    assert (said.exit_code, said.stdout) == (130, "half a\n")
    assert said.stderr == "error: interrupted\n"
