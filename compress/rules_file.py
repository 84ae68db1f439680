"""Plan files: rules as TOML, read and written."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuzip.errors import NeuzipError, UsageError, unknown_key

from .rules import Rule
from .scheme import KINDS, scheme_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NUMBERS = ("mantissa_bits", "block_size", "min_dimensions")
"""Keys of rules that have whole numbers."""

DROPPED_LAYERS = "dropped_layers"
"""What a plan file and config.json call the layers that a model was made without."""

MEAN_STEP = "mean_step"
"""The key of a plan file for the mean step of quantised weights, from which a search chose all steps."""


KEYS = ("rule", DROPPED_LAYERS, MEAN_STEP)
"""Keys of a plan file."""


@dataclass(frozen=True)
class PlanFile:
    """What a plan file holds.

    dropped_layers  layers that the model is to lose before the rules apply
    mean_step       the mean step that a search has found for quantised weights, None without a search
    """

    rules: tuple[Rule, ...]
    dropped_layers: tuple[int, ...] = ()
    mean_step: float | None = None


def read_plan_file(path: str | os.PathLike[str]) -> list[Rule]:
    """Rules from a TOML file: [[rule]] tables in order, with the keys of Rule and Scheme.

    Raises NeuzipError (UsageError for an unknown key), also for a plan of a model without some of its layers.
    """
    plan = read_plan(path)
    if plan.dropped_layers:
        numbers = ", ".join(map(str, plan.dropped_layers))
        raise NeuzipError(
            f"{path}: is a plan of the model without its layers {numbers}: what is left has other numbers",
            "repeat the command in its first line with another `destination`",
        )
    return list(plan.rules)


def read_plan(path: str | os.PathLike[str]) -> PlanFile:
    """A plan from a TOML file. Raises as `read_plan_file`, but not for dropped layers."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number too long, nested too deeply
        raise NeuzipError(f"{path}: not a TOML file: {error}") from error
    for key in document:
        if key not in KEYS:
            raise unknown_key(path, key, KEYS)
    entries, dropped = document.get("rule"), document.pop(DROPPED_LAYERS, [])
    if not isinstance(dropped, list) or not all(type(n) is int and n >= 0 for n in dropped):
        raise NeuzipError(f"{path}: {DROPPED_LAYERS} is no list of numbers of layers")
    step = document.get(MEAN_STEP)
    if step is not None and not (type(step) is float and 0 < step < math.inf):
        raise NeuzipError(f"{path}: {MEAN_STEP} is no positive number")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise NeuzipError(f"{path}: a plan is a list of [[rule]] tables", "see `neuzip compress --help`")
    rules = [_rule_of(entry, f"{path}: rule {number}") for number, entry in enumerate(entries, 1)]
    return PlanFile(tuple(rules), tuple(dropped), step)


def _rule_of(entry: dict[str, Any], place: str) -> Rule:
    """The rule of a [[rule]] table. Raises NeuzipError that names the `place` of it."""
    known = rule_keys()
    for key in entry:
        if key not in known:
            raise unknown_key(place, key, known)
    if not isinstance(entry.get("match"), str):
        raise NeuzipError(f"{place}: match is missing")
    if any(type(entry.get(key, 0)) is not int for key in NUMBERS):
        raise NeuzipError(f"{place}: {', '.join(NUMBERS)} are whole numbers")
    default = "truncated" if "mantissa_bits" in entry else "lossless"
    values = {key: value for key, value in entry.items() if key not in ("match", "scheme", "min_dimensions")}
    try:
        scheme = scheme_of(entry.get("scheme", default), values)
    except UsageError as error:
        raise NeuzipError(f"{place}: {error.message}", error.hint) from error
    return Rule(entry["match"], scheme, entry.get("min_dimensions", 0))


def rule_keys() -> tuple[str, ...]:
    """All keys that rules may have: those of every kind of scheme, and those of Rule."""
    keys = dict.fromkeys(key for kind in KINDS.values() for key in kind.keys if key not in NUMBERS)
    return ("match", "scheme", *NUMBERS, *keys)


def plan_bytes(plan: PlanFile, comments: Sequence[str]) -> bytes:
    """A plan as a file that `read_plan` reads, which begins with comments."""
    lines = [f"# {_one_line(comment)}" for comment in comments]
    if plan.dropped_layers:
        lines += ["", f"{DROPPED_LAYERS} = {list(plan.dropped_layers)}"]
    if plan.mean_step is not None:
        lines += ["", f"{MEAN_STEP} = {plan.mean_step!r}"]
    for rule in plan.rules:
        lines += ["", "[[rule]]", *(f"{key} = {_toml(value)}" for key, value in rule.to_json().items())]
    return ("\n".join(lines) + "\n").encode()


def _toml(value: str | int) -> str:
    """A string or a number as TOML writes it: JSON's escapes are TOML's, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
