"""Rules that choose a scheme for each tensor, and the options of `neuzip compress` as rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from neuzip.errors import UsageError
from neuzip.formats.records import is_block_size

from .globs import matches
from .scheme import Scheme
from .schemes.lossless import LOSSLESS
from .schemes.raw import RAW
from .schemes.ternary import LINEAR_WEIGHTS
from .schemes.truncated import BLOCK_SIZES

__all__ = [
    "LINEAR_WEIGHTS",
    "LOSSLESS",
    "RAW",
    "Rule",
    "Scheme",
    "block_size_of",
    "choose",
    "rules_of_options",
    "ternary_of_options",
]


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
        entry = {"match": self.match, **self.scheme.to_json()}
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
    for option in bits_for:
        glob, _, bits = option.rpartition("=")
        if not (glob and bits.isdecimal() and len(bits) < 10):
            raise UsageError(
                f"`bits_for={option!r}`: is no GLOB=K", "give names and bits, as in '*embed_tokens.weight=4'"
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
        if dimensions >= rule.min_dimensions and matches(name, rule.match):
            return rule.scheme
    return LOSSLESS
