"""Names of options: one for one thing, old ones with a warning, and none that has no effect."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from neuzip.cli import commands, deprecated

OLD = [(verb, old, new) for verb, names in deprecated.NAMES.items() for old, new in names.items()]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the function of a command is called with, in place of its work."""
    found: dict[str, Any] = {}
    for verb in commands.VERBS:
        module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")

        def command(**options: Any) -> None:
            found.update(options)

        command.__signature__ = signature(module.command, eval_str=True)  # type: ignore[attr-defined]
        command.__doc__ = module.command.__doc__
        monkeypatch.setattr(module, "command", command)
    return found


REQUIRED = {
    "compress": ["SRC", "DST"], "verify": ["SRC"], "eval": ["SRC"], "sweep": ["SRC", "--text", "T"],
    "ternarize": ["SRC", "DST"], "recover": ["SRC", "--text", "T", "-o", "O"],
    "patch-attention": ["SRC", "DST", "--text", "T"], "layers": ["SRC", "--text", "T"],
    "export": ["SRC", "DST", "--to", "compressed-tensors"],
}  # fmt: skip
"""What each command needs besides an option that is tried."""


@pytest.mark.parametrize("glued", [False, True], ids=["apart", "with ="])
@pytest.mark.parametrize(("verb", "old", "new"), OLD, ids=" ".join)
def test_old_names_are_accepted_with_a_warning(
    verb: str, old: str, new: str, glued: bool, neuzip: Any, heard: dict[str, Any]
):
    value = {"--calibration-tokens": "4096", "--length": "16", "--group": "row"}.get(old, "least-squares")
    said = neuzip(verb, *REQUIRED[verb], *([f"{old}={value}"] if glued else [old, value]))
    assert (said.exit_code, said.stdout) == (0, ""), said.stderr
    assert said.stderr == f"warning: {old} is now called {new}; the old name goes with version 0.2\n"
    parameter = new.removeprefix("--").replace("-", "_")
    given = heard[parameter]
    assert str(given[-1] if isinstance(given, list) else given) == value
    page = neuzip(verb, "--help").stdout.split()
    assert new in page and (old not in page or (verb, old) == ("verify", "--base"))


@pytest.mark.parametrize(
    ("verb", "old", "parameter", "value"),
    [
        ("compress", ["--calibration", "none"], "sensitivity", "weights"),
        ("compress", ["--calibration=none"], "sensitivity", "weights"),
        ("export", ["--activations", "int8"], "activations", "b1.58"),
    ],
)
def test_old_values_are_accepted_with_a_warning(
    verb: str, old: list[str], parameter: str, value: str, neuzip: Any, heard: dict[str, Any]
):
    said = neuzip(verb, *REQUIRED[verb], *old)
    assert said.exit_code == 0 and heard[parameter] == value
    assert said.stderr.startswith("warning: ") and f"is now --{parameter} {value};" in said.stderr


def test_values_that_look_like_old_names_stay_as_they_are(neuzip: Any, heard: dict[str, Any]):
    said = neuzip(
        "compress", "--text", "--against", "--bits-for=--calibration", "--", "--against", "--against=x"
    )
    assert (said.exit_code, said.stderr) == (0, "")
    assert (heard["text"], heard["bits_for"]) == ("--against", ["--calibration"])
    assert (heard["src"], heard["dst"]) == ("--against", Path("--against=x"))


def test_an_old_name_without_its_value_is_a_usage_error(neuzip: Any):
    said = neuzip("verify", "a", "--against")
    assert said.exit_code == 2 and "'--original' requires an argument" in said.stderr
