"""Names of options: one for one thing, old ones with a warning, and none that has no effect."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.models import OptionInfo

from neuzip.cli import commands, deprecated
from neuzip.cli.needs import Needs
from neuzip.errors import NeuzipError

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
    "compress": ["SRC", "DST"], "inspect": ["SRC"], "verify": ["SRC"], "eval": ["SRC"],
    "sweep": ["SRC", "--text", "T"],
    "ternarize": ["SRC", "DST"], "recover": ["SRC", "--text", "T", "-o", "O"],
    "patch-attention": ["SRC", "DST", "--text", "T"], "layers": ["SRC", "--text", "T"],
    "experts": ["SRC", "--text", "T"],
    "export": ["SRC", "DST"], "generate": ["SRC", "PROMPT"], "bench": ["SRC"],
}  # fmt: skip
"""What each command needs besides an option that is tried."""


NEEDED_WITH_OLD = {
    ("ternarize", "--max-tokens"): ["--text", "T"],
    ("layers", "--output"): ["--drop", "1"],
}  # fmt: skip
"""What an option needs that is tried by its old name."""


@pytest.mark.parametrize("verb", commands.VERBS)
def test_an_option_whose_metavar_is_its_name_is_named(verb: str):
    """Typer 0.27 takes the metavar for the name of such an option, and `--base` was `--BASE`."""
    module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")
    for name, parameter in signature(module.command, eval_str=True).parameters.items():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if getattr(option, "metavar", None) == name.upper() and isinstance(option, OptionInfo):
                assert str(option.default).startswith("--"), f"{verb}: {name}"


@pytest.mark.parametrize("glued", [False, True], ids=["apart", "with ="])
@pytest.mark.parametrize(("verb", "old", "new"), OLD, ids=" ".join)
def test_old_names_are_accepted_with_a_warning(
    verb: str, old: str, new: str, glued: bool, neuzip: Any, heard: dict[str, Any]
):
    value = {"--calibration-tokens": "4096", "--length": "16", "--group": "row"}.get(old, "least-squares")
    needed = NEEDED_WITH_OLD.get((verb, new), [])
    said = neuzip(verb, *REQUIRED[verb], *needed, *([f"{old}={value}"] if glued else [old, value]))
    assert (said.exit_code, said.stdout) == (0, ""), said.stderr
    assert said.stderr == f"warning: {old} is now called {new}; version 0.2 removes the old name\n"
    parameter = new.removeprefix("--").replace("-", "_")
    given = heard[parameter]
    assert str(given[-1] if isinstance(given, list) else given) == value
    page = neuzip(verb, "--help").stdout.split()
    assert new in page and (old not in page or (verb, old) == ("verify", "--base"))


@pytest.mark.parametrize(
    ("verb", "old", "parameter", "value"),
    [
        ("export", ["--to", "compressed-tensors", "--activations=int8"], "activations", "b1.58"),
        ("export", ["--to", "compressed-tensors", "--activations", "int8"], "activations", "b1.58"),
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
        "compress",
        "--text",
        "--against",
        "--bits-for=--calibration",
        "--max-kld",
        "1",
        "--",
        "--against",
        "--against=x",
    )
    assert (said.exit_code, said.stderr) == (0, "")
    assert (heard["text"], heard["bits_for"]) == ("--against", ["--calibration"])
    assert (heard["src"], heard["dst"]) == ("--against", Path("--against=x"))


def test_an_old_name_without_its_value_is_a_usage_error(neuzip: Any):
    said = neuzip("verify", "a", "--against")
    assert said.exit_code == 2 and "'--original' requires an argument" in said.stderr
    assert said.stderr.endswith("hint: try `neuzip verify --help`\n")


@pytest.mark.parametrize(
    "value", [["7"], ["row", "--no-such-option"]], ids=["a wrong value", "another mistake"]
)
def test_an_error_after_an_old_name_is_told_with_the_warning(value: list[str], neuzip: Any):
    said = neuzip("recover", *REQUIRED["recover"], "--group", *value)
    assert said.exit_code == 2
    assert said.stderr.startswith("warning: --group is now called --ternary-group; ")


@pytest.mark.parametrize(
    ("verb", "both"),
    [
        ("verify", ["--against", "a", "--original", "b"]),
        ("verify", ["--original=b", "--against=a"]),
    ],
)
def test_one_option_by_both_of_its_names_is_refused(
    verb: str, both: list[str], neuzip: Any, heard: dict[str, Any]
):
    said = neuzip(verb, *REQUIRED[verb], *both)
    assert said.exit_code == 2 and "are one option\nhint: leave out --" in said.stderr


# Options without effect


def _needs(verb: str) -> Needs:
    found: Needs = getattr(import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}"), "NEEDS", {})
    return found


CASES = [
    (verb, option, other)
    for verb in commands.VERBS
    for option, others in _needs(verb).items()
    for other in others
]

SAMPLES = {
    "--sensitivity": "fisher", "--drop-layers": "auto", "--block-size": "64", "--mantissa-bits": "3",
    "--ternary-quantizer": "least-squares", "--ternary-group": "row", "--ternary-packing": "2bit",
    "--activations": "none", "--attention": "8bit", "--choice": "block", "--drop": "1", "--window": "9",
    "--stride": "9", "--max-tokens": "4096", "--kv-bits": "8", "--query-bits": "4", "--limit": "9",
    "--gguf-type": "q2_0",
    "--kv-form": "a4.8", "--linear-class": "bitlinear", "--mode": "online", "--max-kld": "1",
    "--bits": "4", "--scheme": "rounded", "--calibration": "none",
}  # fmt: skip
"""Values that are not the default; other options take any, or none."""

FLAGS = {
    "--ternary", "--allow-destructive", "--private", "--allow-private-files", "--overwrite", "--sparsity",
    "--gguf-mixed",
}  # fmt: skip

OTHERWISE = {"eval": ["--tasks", "a"], "export": ["--to", "gguf"]}
"""What makes the rest of a command whole where an option has no effect."""


def _asked(option: str) -> list[str]:
    name, _, value = option.partition(" ")
    return [name] if name in FLAGS else [name, value or SAMPLES.get(name, "x")]


@pytest.mark.parametrize(("verb", "option", "other"), CASES, ids=" ".join)
def test_options_that_would_be_ignored_are_refused(
    verb: str, option: str, other: str, neuzip: Any, heard: dict[str, Any]
):
    rest = OTHERWISE.get(verb, [])
    if verb == "export" and "gguf" in option:
        rest = ["--to", "compressed-tensors"]
    if option == "--limit":
        rest = ["--text", "T"]
    said = neuzip(verb, *REQUIRED[verb], *rest, *_asked(option))
    assert (said.exit_code, said.stdout, heard) == (2, "", {})
    assert said.stderr.startswith(f"error: {option} has no effect without ") and other in said.stderr
    assert f"or leave out {option}" in said.stderr.splitlines()[1]
    more, name = _asked(other), other.partition(" ")[0]
    while needs := _needs(verb).get(name):
        more += _asked(needs[0])
        name = needs[0].partition(" ")[0]
    assert neuzip(verb, *REQUIRED[verb], *more, *_asked(option)).exit_code == 0
    assert heard


@pytest.mark.parametrize("verb", [verb for verb in commands.VERBS if _needs(verb)])
def test_needs_are_options_that_there_are(verb: str, neuzip: Any):
    words = set(neuzip(verb, "--help").stdout.replace(",", " ").split())
    for option, others in _needs(verb).items():
        assert {option, *(other.split()[0] for other in others)} <= words


def test_a_default_that_is_given_is_no_mistake(neuzip: Any, heard: dict[str, Any]):
    assert neuzip("compress", "a", "b", "--block-size", "none", "--sensitivity", "auto").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["eval", "m", "--text", "demo", "--conventions", "token", "--stride", 8],
            "--stride 8 has no effect",
        ),
        (
            ["sweep", "m", "--text", "demo", "--schemes", "k3b64", "--blocks", "32"],
            "--blocks 32 has no effect",
        ),
    ],
    ids=lambda case: str(case[0]),
)
def test_values_that_would_be_ignored_are_refused(arguments: list[object], problem: str, neuzip: Any):
    said = neuzip(*arguments)
    assert (said.exit_code, said.stdout) == (2, "")
    assert problem in said.stderr and "hint: " in said.stderr


# Short names


@pytest.mark.parametrize(
    ("arguments", "parameter", "value"),
    [
        (["compress", "a", "b", "-k", "3"], "mantissa_bits", 3),
        (["recover", "a", "--text", "t", "-o", "b"], "output", Path("b")),
        (["layers", "a", "--text", "t", "--drop", "1", "-o", "b"], "output", Path("b")),
        (["sweep", "a", "--text", "t", "-o", "b"], "output", Path("b")),
        (["demo", "-o", "b"], "output", Path("b")),
        (["generate", "a", "-p", "Hello"], "prompt_option", "Hello"),
        (["verify", "a", "-j", "2"], "jobs", 2),
        (["verify", "a", "-q"], "quiet", True),
    ],
    ids=lambda case: case[0] if isinstance(case, list) else None,
)
def test_short_names(arguments: list[str], parameter: str, value: object, neuzip: Any, heard: dict[str, Any]):
    assert neuzip(*arguments).exit_code == 0
    assert heard[parameter] == value


def test_version_by_its_short_name(neuzip: Any):
    assert neuzip("-V") == neuzip("--version") and neuzip("-V").exit_code == 0


@pytest.mark.parametrize("verb", commands.VERBS)
def test_verbose_adds_the_traceback_before_and_after_the_verb(
    verb: str, neuzip: Any, monkeypatch: pytest.MonkeyPatch
):
    module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")

    def command() -> None:
        """Fail"""
        raise NeuzipError("no")

    monkeypatch.setattr(module, "command", command)
    for arguments in (["-v", verb], [verb, "-v"], [verb, "--verbose"]):
        said = neuzip(*arguments)
        assert said.exit_code == 1 and said.stderr.endswith("error: no\n")
        assert said.stderr.startswith("Traceback (most recent call last)")
    assert neuzip(verb).stderr == "error: no\n", "the next command is not asked for it"


@pytest.mark.parametrize(
    "line",
    [
        "compress a b --text demo", "compress a b --sensitivity weights", "compress a b --block-size 64",
        "compress a b --drop-layers 2", "compress a b --ternary-group row", "compress a b --private",
        "compress a b --allow-destructive", "eval a --tasks x --stride 8", "eval a --text demo --limit 8",
        "eval a --text demo --overwrite", "eval a --text demo --sweep s", "eval a --tasks x --kv-bits 3",
        "sweep a --text demo --overwrite", "layers a --text demo --choice block", "inspect a --overwrite",
        "layers a --text demo -o b", "layers a --text demo --overwrite", "ternarize a b --max-tokens 999",
        "recover a --text t -o b --steps 1 --max-tokens 99", "export a b.gguf --to gguf --mode online",
        "export a b --to compressed-tensors --gguf-type q2_0", "train run.toml --resume --overwrite",
        "generate a hello --seed 1", "generate a hello --kv-text b", "bench a --kv-plan b",
        "generate a hello --kv-bits 4 --kv-text b", "bench a --kv-bits 4 --kv-plan b",
    ],
)  # fmt: skip
def test_no_option_is_ignored(line: str, neuzip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    said = neuzip(*line.split())
    assert (said.exit_code, said.stdout) == (2, ""), said.stderr
    assert "no effect" in said.stderr or "exclude each other" in said.stderr
    assert "\nhint: " in said.stderr and list(tmp_path.iterdir()) == []
