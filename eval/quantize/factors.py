"""Factors of rows and columns: whether steps within a tensor pay, and by which sensitivities they go.

With one step for all weights of a tensor, codes have the least entropy; with steps that go by
1 / sqrt(sensitivity) errors do the least harm. In between lies what saves most: steps of a power of it. The
bits that factors save are the change of the codes' entropy, and half the binary logarithm of the change of
the expected divergence. What factors of rows and of columns save is taken to add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.grid import factor_bytes, factors

ROW_POWERS = (0.25, 0.5, 0.75)
COLUMN_POWERS = (0.5, 1.0)
"""Powers of 1 / sqrt(sensitivity) that are tried, beside 0."""

FLOOR = 0.1
"""Share of the mean sensitivity that is added to that of each row: a text shows only part of a vocabulary."""

CLAMP = (0.2, 5.0)
"""The smallest and the largest factor."""

STEP = 0.25
"""Step at which entropies are compared, in standard deviations of the weights."""

SAMPLE = 1 << 16
"""Weights whose codes' entropy is compared."""


@dataclass(frozen=True, eq=False)
class StepFactors:
    """Factor bytes of rows, uint8 [R], and columns, uint8 [C]; None for factors of 1.

    harm  mean sensitivity of a weight, times the square of its factors
    """

    rows: Tensor | None
    columns: Tensor | None
    harm: float


def choose_factors(weight: Tensor, rows: Tensor, pivots: Tensor | None) -> StepFactors:
    """The factors that save most bits, of powers of the sensitivities.

    weight  fp32 [R, C]
    rows    fp32 [2, R], sensitivities of rows by two halves of a text; factors by one are judged by the other
    pivots  fp32 [C], what an error in a column costs after compensation, as a share of the mean, or None
    """
    by_rows, by_columns = rows.mean(0), torch.ones(1) if pivots is None else pivots
    row_bytes = column_bytes = None
    if float(by_rows.sum()) and float(weight.square().sum()):
        plain = _entropy(weight, None, None)
        row_bytes = _best(weight, plain, [_rows(rows, power) for power in ROW_POWERS], of_rows=True)
        if pivots is not None:
            candidates = [_columns(pivots, power) for power in COLUMN_POWERS]
            column_bytes = _best(weight, plain, candidates, of_rows=False)
    harm = 1.0
    for sensitivity, found in ((by_rows, row_bytes), (by_columns, column_bytes)):
        harm *= float((sensitivity if found is None else sensitivity * factors(found).square()).mean())
    return StepFactors(row_bytes, column_bytes, harm)


def _best(
    weight: Tensor, plain: float, candidates: Sequence[tuple[Tensor, float]], *, of_rows: bool
) -> Tensor | None:
    """The factor bytes that save most, None if none saves anything; gains are those at equal entropy."""
    best, most = None, 0.0
    for found, gain in candidates:
        entropy = _entropy(weight, found, None) if of_rows else _entropy(weight, None, found)
        saved = gain - (entropy - plain) - 8 * len(found) / weight.numel()
        if saved > most:
            best, most = found, saved
    return best


def _rows(rows: Tensor, power: float) -> tuple[Tensor, float]:
    """Factor bytes by a power of the sensitivities, and the bits that they save at equal entropy."""
    gains = []
    for own, other in (rows, rows.flip(0)):
        gains.append(_gain(other, factors(_bytes(own + FLOOR * own.mean(), power))))
    mean = rows.mean(0)
    return _bytes(mean + FLOOR * mean.mean(), power), sum(gains) / 2


def _columns(pivots: Tensor, power: float) -> tuple[Tensor, float]:
    found = _bytes(pivots, power)
    return found, _gain(pivots, factors(found))


def _bytes(sensitivity: Tensor, power: float) -> Tensor:
    """Factor bytes of a geometric mean of about 1."""
    logarithm = sensitivity.clamp(min=torch.finfo(torch.float32).tiny).log() * (-power / 2)
    return factor_bytes((logarithm - logarithm.mean()).exp().clamp(*CLAMP))


def _gain(sensitivity: Tensor, factor: Tensor) -> float:
    """Bits that factors save at equal entropy, taken to a geometric mean of 1."""
    factor = factor / factor.log().mean().exp()
    with_factors, mean = float((sensitivity * factor.square()).mean()), float(sensitivity.mean())
    return 0.5 * math.log2(mean / with_factors) if with_factors > 0 else 0.0


def _entropy(weight: Tensor, rows: Tensor | None, columns: Tensor | None) -> float:
    """Bits of a weight's code, at factors of a geometric mean of 1."""
    stride = max(1, weight.numel() // SAMPLE)
    part = weight[::stride]
    if rows is not None:
        factor = factors(rows)
        part = part / (factor / factor.log().mean().exp())[::stride, None]
    if columns is not None:
        factor = factors(columns)
        part = part / (factor / factor.log().mean().exp())
    scale = STEP * float(weight[::stride].square().mean().sqrt())
    codes = (part / scale).round_().flatten().clamp_(-(1 << 15), 1 << 15).long()
    counts = torch.bincount(codes - codes.min()).double()
    chances = counts[counts > 0] / len(codes)
    return float(-(chances * chances.log2()).sum())
