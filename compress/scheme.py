"""Schemes: how tensors are to be stored, in the words of rules and plan files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from neuzip.errors import UsageError


class SchemeKind(Protocol):
    """What a kind of scheme has: its keys in rules and plan files, what they may be, and its words."""

    keys: tuple[str, ...]
    scheme_type: type[Scheme]

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for values that do not exist or do not fit the kind."""

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""


KINDS: dict[str, SchemeKind] = {}
"""All kinds of schemes by name; neuzip.compress.schemes fills it."""


@dataclass(frozen=True)
class Scheme:
    """How a tensor is stored, by `kind`: "raw", "lossless", "truncated", "ternary" or "quantized".

    `mantissa_bits` and `block_size` are for "truncated"; `block_size` is the number of weights that share a
    per-block scale, or None. `step` is for "quantized": the distance between neighbouring values.
    `row_factors` and `column_factors` multiply it by a factor for each row and for each column. The other
    fields are for "ternary". `quantizer` is "absmean", "absmean-clamped" or "least-squares". `group` is the
    number of weights of a row that share a scale: "row" for the whole row, None for the whole tensor.
    `packing` is "trits" or "2bit", `scale_dtype` "F32" or "F16".

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
    step: float | None = None
    row_factors: bool = False
    column_factors: bool = False

    def __post_init__(self) -> None:
        if self.kind not in tuple(KINDS):
            *most, last = KINDS
            raise UsageError(f"unknown scheme {self.kind!r}", f"the schemes are {', '.join(most)} and {last}")
        KINDS[self.kind].check(self)

    def __str__(self) -> str:
        return KINDS[self.kind].words(self)

    def to_json(self) -> dict[str, Any]:
        """The keys and values of the scheme in a plan file."""
        values = {key: getattr(self, key) for key in KINDS[self.kind].keys}
        present = {key: value for key, value in values.items() if value is not None and value is not False}
        return {"scheme": self.kind} | present


def scheme_of(kind: Any, values: Mapping[str, Any]) -> Scheme:
    """The scheme of a kind with the `values` of its keys. Raises UsageError."""
    scheme_type = KINDS[kind].scheme_type if isinstance(kind, str) and kind in KINDS else Scheme
    known = {field.name for field in fields(scheme_type)}
    for key in values:
        if key not in known:
            raise UsageError(f"the scheme {kind!r} has no {key}", _owners(key))
    return scheme_type(kind, **values)


def require_own_keys(scheme: Scheme) -> None:
    """Raise UsageError for a value that belongs to schemes of another kind."""
    own = KINDS[scheme.kind].keys
    for field in fields(Scheme):
        key, value = field.name, getattr(scheme, field.name)
        if key in ("kind", *own) or value == field.default:
            continue
        if key == "mantissa_bits":
            raise UsageError(f"the scheme {scheme.kind!r} with mantissa bits {value}")
        if key == "block_size":
            raise UsageError("a block size needs mantissa bits to be dropped", "add `mantissa_bits=K`")
        raise UsageError(f"the scheme {scheme.kind!r} has no {key}", _owners(key))


def _owners(key: str) -> str:
    """Which kinds have a key."""
    return f"only {' and '.join(kind for kind, of in KINDS.items() if key in of.keys)} has"
