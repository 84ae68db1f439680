"""Targets of compression and their texts. Imports no torch, so that commands can parse them at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.estimates import Estimate

Kind = Literal["max-kld", "max-ppl-increase", "target-size", "bits"]
SIZES: tuple[Kind, ...] = ("target-size", "bits")
"""The kinds whose limit is in bytes; the others limit the loss of quality, in nats a token."""

UNITS = {"B": 1, **{p + "B": 1000**i for i, p in enumerate(("k", "M", "G", "T"), 1)},
         **{p + "iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)}}  # fmt: skip

NUMBER = r"\d+(?:\.\d*)?|\.\d+"
"""A positive decimal number, as a regular expression."""


@dataclass(frozen=True)
class CompressionTarget:
    """A target: a limit in nats a token, or in bytes. `text` is how the user wrote it."""

    kind: Kind
    text: str
    limit: float

    @property
    def limits_size(self) -> bool:
        """Whether the limit is one of bytes, and quality is what is sought; else the other way round."""
        return self.kind in SIZES

    def __str__(self) -> str:
        value = self.text if self.kind in ("max-kld", "bits") else repr(self.text)
        return f"`{parameter_of(self.kind)}={value}`"


def parameter_of(kind: Kind) -> str:
    """The name of the parameter that gives a target of this kind."""
    return kind.replace("-", "_")


@dataclass(frozen=True)
class RequestedTarget:
    """A target as the user wrote it, before the size of the checkpoint is known."""

    kind: Kind
    text: str

    @property
    def limits_size(self) -> bool:
        """Whether the limit is one of bytes."""
        return self.kind in SIZES

    @property
    def parameter(self) -> str:
        """The name of its parameter."""
        return parameter_of(self.kind)

    def target(self, original: int, weights: int) -> CompressionTarget:
        """The target for a checkpoint with `weights` weights in files of `original` bytes.

        Raises UsageError for a text that states no limit.
        """
        if self.kind == "bits":
            return bits_per_weight(self.text, weights)
        if self.kind == "target-size":
            return target_size(self.text, original)
        return max_kld(self.text) if self.kind == "max-kld" else max_ppl_increase(self.text)


def one_goal(
    max_kld: float | str | None,
    max_ppl_increase: str | None,
    target_size: int | str | None,
    bits: float | str | None,
) -> RequestedTarget | None:
    """The target among the four parameters, if any. A number as `target_size` is bytes.

    Raises UsageError for several.
    """
    size = f"{target_size}B" if isinstance(target_size, int) else target_size
    values: tuple[tuple[Kind, float | str | None], ...] = (
        ("max-kld", max_kld), ("max-ppl-increase", max_ppl_increase), ("target-size", size), ("bits", bits),
    )  # fmt: skip
    targets = [RequestedTarget(kind, str(value)) for kind, value in values if value is not None]
    if len(targets) > 1:
        raise UsageError(
            f"`{targets[0].parameter}` and `{targets[1].parameter}` exclude each other", "give one target"
        )
    return targets[0] if targets else None


def max_kld(text: str) -> CompressionTarget:
    """The target of `max_kld`, in nats per token: `0.01`. Raises UsageError."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise UsageError(f"`max_kld={text!r}`: is no divergence", "give nats per token, for example 0.01")
    return CompressionTarget("max-kld", text, limit)


def max_ppl_increase(text: str) -> CompressionTarget:
    """The target of `max_ppl_increase`, as the difference of NLL that it is: `0.5%`. Raises UsageError.

    >>> round(max_ppl_increase("0.5%").limit, 6)
    0.004988
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", text.strip())
    if match is None:
        raise UsageError(
            f"`max_ppl_increase={text!r}`: is no increase", "give it in percent, with the sign: 0.5%"
        )
    return CompressionTarget("max-ppl-increase", text, math.log1p(float(match[1]) / 100))


def target_size(text: str, original: int) -> CompressionTarget:
    """The target of `target_size`, in bytes: `60%` of `original`, `6GiB`, `500 MB`. Raises UsageError.

    >>> target_size("60%", 1000).limit, target_size("1.5 kB", 9000).limit
    (600, 1500)
    """
    match = re.fullmatch(rf"({NUMBER}) ?%", text.strip())
    limit = size_in_bytes(text) if match is None else math.floor(float(match[1]) * (original / 100))
    if limit is None:
        raise UsageError(
            f"`target_size={text!r}`: is no size", "give a share or a size, with its unit: 60%, 6GiB, 500MB"
        )
    return CompressionTarget("target-size", text, limit)


def bits_per_weight(text: str, weights: int) -> CompressionTarget:
    """The target of `bits`, in bytes of all weight files of a checkpoint with `weights` weights: `4.25`.

    Raises UsageError.

    >>> bits_per_weight("4.25", 1000).limit
    531
    """
    try:
        bits = float(text)
    except ValueError:
        bits = math.nan
    if not 0 < bits < math.inf:
        raise UsageError(
            f"`bits={text!r}`: is no number of bits", "give the bits of a weight, above 0, for example 4.25"
        )
    return CompressionTarget("bits", text, math.floor(bits * weights / 8))


def size_in_bytes(text: str) -> int | None:
    """Bytes of a size with its unit, as `6GiB` or `500 MB`; None for a text that is no size.

    Zero needs no unit.

    >>> size_in_bytes("1.5 kB"), size_in_bytes("0B"), size_in_bytes("0"), size_in_bytes("6")
    (1500, 0, 0, None)
    """
    if text.strip() == "0":
        return 0
    match = re.fullmatch(rf"({NUMBER}) ?([kKMGT]?i?B)", text.strip())
    return None if match is None or match[2] not in UNITS else math.floor(float(match[1]) * UNITS[match[2]])


MARGIN = 2.0
"""Standard errors that a search leaves between a divergence and its limit: it then holds on other texts."""


def sought_value(kind: Kind, comparison: Comparison) -> Estimate:
    """The value that a search keeps within the limit: `value_of`, and of a divergence also its margin."""
    value = value_of(kind, comparison)
    if kind != "max-kld":
        return value
    return replace(value, value=value.value + MARGIN * (comparison.kld.mean.standard_error or 0.0))


def value_of(kind: Kind, comparison: Comparison) -> Estimate:
    """The value of a comparison for a target of quality, in nats a token.

    A difference of losses has its standard error, which may be as large. A divergence is taken without one.
    """
    if kind == "max-kld":
        return replace(comparison.kld.mean, standard_error=None)
    return comparison.nll_difference
