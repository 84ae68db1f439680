"""Schemes, and the rules that choose one for each tensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from neuzip.errors import NeuzipError, UsageError, unknown_key
from neuzip.formats.manifest import PACKINGS, SCALE_DTYPES, is_block_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NUMBERS = ("mantissa_bits", "block_size", "min_dimensions")
_TERNARY = ("quantizer", "group", "packing", "scale_dtype")
_KEYS = ("match", "scheme", *_NUMBERS, *_TERNARY)
TERNARY_DTYPES = ("BF16", "F16", "F32")
QUANTIZERS = ("absmean", "absmean-clamped", "least-squares")
LINEAR_WEIGHTS = "*layers.*_proj.weight"
"""What `--ternary` is for: the linear layers of attention and MLP, as most models call them."""
DROPPED_LAYERS = "dropped_layers"
"""What a plan file calls them."""
BLOCK_SIZES = "a power of two from 8 to 16384"


@dataclass(frozen=True)
class Scheme:
    """How a tensor is stored: `kind` is "raw", "lossless", "truncated" to `mantissa_bits`, or "ternary".

    `block_size` is the number of weights that share a per-block scale, or None. The other fields are for
    "ternary". `quantizer` is "absmean", "absmean-clamped" or "least-squares". `group` is the number of
    weights of a row that share a scale: "row" for the whole row, None for the whole tensor. `packing` is
    "trits" or "2bit", `scale_dtype` "F32" or "F16".

    Raises UsageError for values that do not exist or do not fit the kind.

    >>> str(Scheme("truncated", mantissa_bits=3, block_size=512))
    'k=3 block=512'
    """

    kind: str = "lossless"
    mantissa_bits: int | None = None
    block_size: int | None = None
    quantizer: str = "absmean"
    group: int | str | None = None
    packing: str = "trits"
    scale_dtype: str = "F32"

    def __post_init__(self) -> None:
        if self.kind not in ("raw", "lossless", "truncated", "ternary"):
            raise UsageError(
                f"unknown scheme {self.kind!r}", "the schemes are raw, lossless, truncated and ternary"
            )
        self._check_ternary()
        if (self.kind == "truncated") != (self.mantissa_bits is not None):
            raise UsageError(f"the scheme {self.kind!r} with mantissa bits {self.mantissa_bits}")
        for name in ("mantissa_bits", "block_size"):
            if type(getattr(self, name)) not in (int, type(None)):
                raise UsageError(f"`{name}={getattr(self, name)!r}` is no whole number")
        if self.mantissa_bits is not None and not 0 <= self.mantissa_bits <= 51:
            raise UsageError(
                f"{self.mantissa_bits} mantissa bits are not 0 to 51, which formats can be rounded to",
                "give 0 to 6 for bf16; 7 is lossless",
            )
        if self.block_size is not None and self.mantissa_bits is None:
            raise UsageError("a block size needs mantissa bits to be dropped", "add `mantissa_bits=K`")
        if self.block_size is not None and not is_block_size(self.block_size):
            raise UsageError(f"the block size {self.block_size} is not {BLOCK_SIZES}")

    def _check_ternary(self) -> None:
        if self.kind != "ternary":
            for field in fields(self):
                if field.name in _TERNARY and getattr(self, field.name) != field.default:
                    raise UsageError(f"the scheme {self.kind!r} has no {field.name}", "only ternary has")
            return
        for name, choices in (
            ("quantizer", QUANTIZERS), ("packing", PACKINGS), ("scale_dtype", SCALE_DTYPES),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{getattr(self, name)!r} is no {name} of ternary weights", f"give {' or '.join(choices)}"
                )
        if self.group not in (None, "row") and (type(self.group) is not int or self.group < 1):
            raise UsageError(
                f"the group {self.group!r} is no number of weights",
                "give a number such as 128, or row; without one the tensor has one scale",
            )

    def __str__(self) -> str:
        if self.kind == "ternary":
            group = "" if self.group is None else f" group={self.group}"
            return f"ternary {self.quantizer}{group}"
        if self.kind != "truncated":
            return self.kind
        return f"k={self.mantissa_bits}" + (f" block={self.block_size}" if self.block_size else "")


RAW = Scheme("raw")
LOSSLESS = Scheme("lossless")


@dataclass(frozen=True)
class Rule:
    """A scheme for the tensors whose names match the glob `match`, of at least `min_dimensions`.

    In a list of rules the first that matches a tensor applies. Matrices have 2 dimensions, norms 1.

    >>> Rule("*", Scheme("truncated", mantissa_bits=3), min_dimensions=2).to_json()["mantissa_bits"]
    3
    """

    match: str
    scheme: Scheme
    min_dimensions: int = 0

    def to_json(self) -> dict[str, Any]:
        """The keys and values of the rule in a plan file."""
        entry: dict[str, Any] = {"match": self.match, "scheme": self.scheme.kind}
        if self.scheme.mantissa_bits is not None:
            entry["mantissa_bits"] = self.scheme.mantissa_bits
        if self.scheme.block_size is not None:
            entry["block_size"] = self.scheme.block_size
        if self.scheme.kind == "ternary":
            entry |= {key: value for key in _TERNARY if (value := getattr(self.scheme, key)) is not None}
        if self.min_dimensions:
            entry["min_dimensions"] = self.min_dimensions
        return entry


def rules_of_options(
    mantissa_bits: int | None,
    block_size: str,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    ternary: Scheme | None = None,
    bits_for: Sequence[str] = (),
) -> list[Rule]:
    """The rules that the options of `neuzip compress` stand for. Raises UsageError.

    `block_size` is a number or "none"; each of `bits_for` is GLOB=K, mantissa bits of the matrices that match
    in place of `mantissa_bits`. Only tensors of two and more dimensions are rounded: norms and biases
    weigh little and matter much, so they stay lossless. `ternary` is for LINEAR_WEIGHTS only.
    """
    if ternary is not None and include:
        raise UsageError(
            "`ternary` excludes `include`", f"for other tensors than {LINEAR_WEIGHTS} write a `plan`"
        )
    size = block_size_of(block_size)
    alone = mantissa_bits is None and bits_for  # then a block size is for those
    kind = "lossless" if mantissa_bits is None else "truncated"
    scheme = Scheme(kind, mantissa_bits, None if alone else size)
    rules = [Rule(glob, RAW) for glob in exclude]
    for asked in bits_for:
        glob, _, bits = asked.rpartition("=")
        if not (glob and bits.isdecimal() and len(bits) < 10):
            raise UsageError(
                f"`bits_for={asked!r}`: is no GLOB=K", "give names and bits, as in '*embed_tokens.weight=4'"
            )
        rules.append(Rule(glob, Scheme("truncated", int(bits), size), min_dimensions=2))
    if ternary is not None:
        rules.append(Rule(LINEAR_WEIGHTS, ternary, min_dimensions=2))
    for glob in include or ["*"]:
        if scheme.mantissa_bits is not None:
            rules.append(Rule(glob, scheme, min_dimensions=2))
        rules.append(Rule(glob, LOSSLESS))
    return [*rules, Rule("*", RAW)] if include else rules


def block_size_of(text: str) -> int | None:
    """The number of weights that share a per-block scale; None for "none". Raises UsageError."""
    if text != "none" and not (text.isdecimal() and len(text) < 10):
        raise UsageError(f"`block_size={text!r}` is neither a number nor none")
    size = None if text == "none" else int(text)
    if size is not None and not is_block_size(size):
        raise UsageError(f"the block size {size} is not {BLOCK_SIZES}")
    return size


def ternary_of_options(quantizer: str, group: str, packing: str) -> Scheme:
    """The scheme that the parameters ternary_... stand for. `group` is a number, "row" or "tensor"."""
    if group not in ("row", "tensor") and not (group.isdecimal() and len(group) < 10):
        raise UsageError(f"`ternary_group={group!r}` is neither a number nor row nor tensor")
    size = int(group) if group.isdecimal() else None if group == "tensor" else group
    return Scheme("ternary", quantizer=quantizer, group=size, packing=packing)


def choose(rules: Iterable[Rule], name: str, dimensions: int) -> Scheme:
    """The scheme of the first rule that matches a tensor's name; lossless if none does.

    >>> rules = [Rule("*", Scheme("truncated", 3), min_dimensions=2), Rule("*", LOSSLESS)]
    >>> str(choose(rules, "model.norm.weight", 1)), str(choose(rules, "lm_head.weight", 2))
    ('lossless', 'k=3')
    """
    for rule in rules:
        if dimensions >= rule.min_dimensions and fnmatchcase(name, rule.match):
            return rule.scheme
    return LOSSLESS


def read_plan_file(path: str | os.PathLike[str]) -> list[Rule]:
    """Rules from a TOML file: [[rule]] tables in order, with the keys of Rule and Scheme.

    Raises NeuzipError (UsageError for an unknown key), also for a plan of a model without some of its layers.
    """
    rules, dropped = read_plan(path)
    if dropped:
        numbers = ", ".join(map(str, dropped))
        raise NeuzipError(
            f"{path}: is a plan of the model without its layers {numbers}: what is left has other numbers",
            "repeat the command in its first line with another `destination`",
        )
    return rules


def read_plan(path: str | os.PathLike[str]) -> tuple[list[Rule], tuple[int, ...]]:
    """Rules as `read_plan_file`, and `dropped_layers`: those that the model is to lose before they apply."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number too long, nested too deeply
        raise NeuzipError(f"{path}: not a TOML file: {error}") from error
    for key in document:
        if key not in ("rule", DROPPED_LAYERS):
            raise unknown_key(path, key, ("rule", DROPPED_LAYERS))
    entries, dropped = document.get("rule"), document.pop(DROPPED_LAYERS, [])
    if not isinstance(dropped, list) or not all(type(n) is int and n >= 0 for n in dropped):
        raise NeuzipError(f"{path}: {DROPPED_LAYERS} is no list of numbers of layers")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise NeuzipError(f"{path}: a plan is a list of [[rule]] tables", "see `neuzip compress --help`")
    rules = []
    for number, entry in enumerate(entries, 1):
        for key in entry:
            if key not in _KEYS:
                raise unknown_key(f"{path}: rule {number}", key, _KEYS)
        if not isinstance(entry.get("match"), str):
            raise NeuzipError(f"{path}: rule {number}: match is missing")
        if any(type(entry.get(key, 0)) is not int for key in _NUMBERS):
            raise NeuzipError(f"{path}: rule {number}: {', '.join(_NUMBERS)} are whole numbers")
        try:
            default = "truncated" if "mantissa_bits" in entry else "lossless"
            named = {key: entry[key] for key in _TERNARY if key in entry}
            scheme = Scheme(
                entry.get("scheme", default), entry.get("mantissa_bits"), entry.get("block_size"), **named
            )
        except UsageError as error:
            raise NeuzipError(f"{path}: rule {number}: {error.message}", error.hint) from error
        rules.append(Rule(entry["match"], scheme, entry.get("min_dimensions", 0)))
    return rules, tuple(dropped)
