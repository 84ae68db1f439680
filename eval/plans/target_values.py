"""What a target is and how it is said: known before torch is imported. `targets` reaches it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from neuzip.errors import UsageError

Kind = Literal["max-kld", "max-ppl-increase", "target-size"]

UNITS = {"B": 1, **{p + "B": 1000**i for i, p in enumerate(("k", "M", "G", "T"), 1)},
         **{p + "iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)}}  # fmt: skip


@dataclass(frozen=True)
class CompressionTarget:
    """What is asked for, in nats a token, or bytes. `text` is how it was said."""

    kind: Kind
    text: str
    limit: float

    def __str__(self) -> str:
        value = self.text if self.kind == "max-kld" else repr(self.text)
        return f"`{parameter_of(self.kind)}={value}`"


def parameter_of(kind: Kind) -> str:
    """The name of the parameter that gives a target of this kind."""
    return kind.replace("-", "_")


@dataclass(frozen=True)
class RequestedTarget:
    """One of the three targets as it was given, before the checkpoint is known that it is for."""

    kind: Kind
    text: str

    @property
    def parameter(self) -> str:
        """The name of the parameter that gave it."""
        return parameter_of(self.kind)

    def target(self, original: int) -> CompressionTarget:
        """What is asked for of a checkpoint with weight files of `original` bytes. Raises UsageError."""
        if self.kind == "target-size":
            return target_size(self.text, original)
        return max_kld(self.text) if self.kind == "max-kld" else max_ppl_increase(self.text)


def one_goal(
    max_kld: float | str | None, max_ppl_increase: str | None, target_size: int | str | None
) -> RequestedTarget | None:
    """The target that was given, if any; a `target_size` that is a number is bytes.

    Raises UsageError for several.
    """
    size = f"{target_size}B" if isinstance(target_size, int) else target_size
    values: tuple[tuple[Kind, float | str | None], ...] = (
        ("max-kld", max_kld), ("max-ppl-increase", max_ppl_increase), ("target-size", size),
    )  # fmt: skip
    given = [RequestedTarget(kind, str(value)) for kind, value in values if value is not None]
    if len(given) > 1:
        raise UsageError(
            f"`{given[0].parameter}` and `{given[1].parameter}` exclude each other", "give one target"
        )
    return given[0] if given else None


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
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", text.strip())
    if found is None:
        raise UsageError(
            f"`max_ppl_increase={text!r}`: is no increase", "give it in percent, with the sign: 0.5%"
        )
    return CompressionTarget("max-ppl-increase", text, math.log1p(float(found[1]) / 100))


def target_size(text: str, original: int) -> CompressionTarget:
    """The target of `target_size`, in bytes: `60%` of `original`, `6GiB`, `500 MB`. Raises UsageError.

    >>> target_size("60%", 1000).limit, target_size("1.5 kB", 9000).limit
    (600, 1500)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?(%|[kKMGT]?i?B)", text.strip())
    if found is None or (found[2] != "%" and found[2] not in UNITS):
        raise UsageError(
            f"`target_size={text!r}`: is no size", "give a share or a size, with its unit: 60%, 6GiB, 500MB"
        )
    unit = original / 100 if found[2] == "%" else UNITS[found[2]]
    return CompressionTarget("target-size", text, math.floor(float(found[1]) * unit))
