"""Quantisation next to yardsticks: its size at the divergence of each, and its divergence at their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[str, float, float]
"""A name, bits per weight, and the mean KL divergence in nats per token."""


@dataclass(frozen=True)
class Saving:
    """A yardstick, and the curve of quantisation next to it.

    `bits` and `kld` are of the yardstick. `quantized_bits` is what quantisation takes at the divergence
    `kld`, and `quantized_kld` its divergence at `bits`: each interpolated between two measured points,
    linear in bits and in the logarithm of the divergence, and None where there are no two points around it.
    """

    yardstick: str
    bits: float
    kld: float
    quantized_bits: float | None
    quantized_kld: float | None

    @property
    def saved(self) -> float | None:
        """The share of the yardstick's size that quantisation saves at its divergence."""
        return None if self.quantized_bits is None else 1 - self.quantized_bits / self.bits


def savings(quantized: Sequence[Point], yardsticks: Sequence[Point]) -> tuple[Saving, ...]:
    """Each yardstick next to the curve through the points of quantisation."""
    curve = sorted((bits, math.log(kld)) for _, bits, kld in quantized if kld > 0)
    results = []
    for name, bits, kld in yardsticks:
        log_kld = _interpolated(curve, bits)
        results.append(
            Saving(
                name, bits, kld,
                _interpolated([(y, x) for x, y in curve], math.log(kld)) if kld > 0 else None,
                None if log_kld is None else math.exp(log_kld),
            )
        )  # fmt: skip
    return tuple(results)


def _interpolated(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value at `x` between two neighbours of a curve, None outside of it.

    >>> _interpolated([(1, 10), (2, 20)], 1.25), _interpolated([(1, 10), (2, 20)], 3)
    (12.5, None)
    """
    for (x0, y0), (x1, y1) in pairwise(curve):
        if min(x0, x1) <= x <= max(x0, x1):
            return y0 if x0 == x1 else y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return None
