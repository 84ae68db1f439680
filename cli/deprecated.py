"""Old names of options, which are accepted until version 0.2, each with a warning.

The names are replaced before typer reads them, so that commands know the new ones alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from neuzip.errors import UsageError

NAMES: Mapping[str, Mapping[str, str]] = {
    "compress": {"--against": "--base"},
    "verify": {"--against": "--original"},
    "eval": {"--base": "--original"},
    "sweep": {"--out": "--output"},
    "ternarize": {
        "--calibration": "--text",
        "--calibration-tokens": "--max-tokens",
        "--group": "--ternary-group",
        "--quantizer": "--ternary-quantizer",
    },
    "recover": {
        "--base": "--original",
        "--out": "--output",
        "--group": "--ternary-group",
        "--length": "--window",
    },
    "patch-attention": {"--picture": "--plot"},
    "layers": {"--picture": "--plot", "--out": "--output"},
}
"""By command, what each old name is called now."""

VALUES: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("export", "--activations", "int8"): ("--activations", "b1.58"),
}
"""By command, option and value, what is to be given now."""


def renamed(
    verb: str, arguments: Iterable[str], takes_value: Callable[[str], bool], warn: Callable[[str], None]
) -> list[str]:
    """Replace the old names in the arguments of a command. `takes_value` knows its options by their names.

    Raises UsageError for one option by both of its names: only one of the values would have an effect.

    >>> renamed("verify", ["a", "--against=b"], lambda name: name == "--original", print)
    --against is now called --original; version 0.2 removes the old name
    ['a', '--original=b']
    """
    renamed_arguments: list[str] = []
    names: dict[str, set[str]] = defaultdict(set)
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            renamed_arguments += [argument, *rest]
            break
        name, has_value, value = argument.partition("=")
        new = NAMES.get(verb, {}).get(name, name)
        if not name.startswith("--") or not (takes_value(new) or has_value):
            renamed_arguments.append(argument)  # an argument, a short option, or one that is on or off
            if takes_value(argument):
                renamed_arguments += _next(rest)
            continue
        values = [value] if has_value else _next(rest)
        if values and (verb, name, values[0]) in VALUES:
            new, replaced = VALUES[verb, name, values[0]]
            names[new].add(name)
            warn(f"{name} {values[0]} is now {new} {replaced}; version 0.2 removes the old form")
            renamed_arguments += [new, replaced]
            continue
        if new != name:
            warn(f"{name} is now called {new}; version 0.2 removes the old name")
        names[new].add(name)
        renamed_arguments += [f"{new}={value}"] if has_value else [new, *values]
    for new, given_as in names.items():
        for old in sorted(given_as - {new}):
            if new in given_as:
                raise UsageError(f"{old} and {new} are one option", f"leave out {old}")
    return renamed_arguments


def _next(arguments: Iterator[str]) -> list[str]:
    """The value of an option that was just read: whatever comes next, if it looks like an option too."""
    return [value for value in [next(arguments, None)] if value is not None]
