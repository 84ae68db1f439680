"""Laws of random weights, with seeds: Gaussian weights, and weights that look like those of a trained LLM.

`trained_like` has what makes weights of large language models harder to pack than Gaussian ones: heavy tails,
rows of unequal scale, and a few columns that are much larger. Packed in bf16 it takes 11.7 bits a weight;
N(0, 0.02) takes 11.4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor

SCALE = 0.02
"""Scale of both laws: the standard deviation of Gaussian weights, the factor of Student's t."""

DEGREES = 6
"""Degrees of freedom of Student's t: the smaller, the heavier the tails."""

ROW_SPREAD = 0.35
"""Standard deviation of the logarithms of the scales of rows."""

OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 6.0
"""Share of the columns that are larger, at least one, and how many times."""

CHUNK = 1 << 26
"""Weights that are drawn at a time, to bound the memory of their float32 parts."""


def generator_on(device: torch.device | str, seed: int = 0) -> torch.Generator:
    """A seeded generator on a device."""
    return torch.Generator(device).manual_seed(seed)


def gaussian(
    out: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """N(0, 0.02) weights [out, columns] on the generator's device."""
    weight = torch.empty(out, columns, dtype=dtype, device=generator.device)
    for part in weight.split(max(1, CHUNK // max(1, columns))):
        part.copy_(_normal(len(part), columns, generator) * SCALE)
    return weight


def trained_like(
    out: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Weights [out, columns] on the generator's device that look trained.

    Student's t with 6 degrees of freedom times 0.02, times row scales exp(N(0, 0.35)); one column in a
    hundred, at least one, is six times as large.
    """
    weight = torch.empty(out, columns, dtype=dtype, device=generator.device)
    outliers = torch.randperm(columns, generator=generator, device=generator.device)
    factors = torch.full((columns,), SCALE, device=generator.device)
    factors[outliers[: max(1, round(columns * OUTLIER_SHARE))]] *= OUTLIER_FACTOR
    for part in weight.split(max(1, CHUNK // max(1, columns))):
        rows = torch.exp(ROW_SPREAD * _normal(len(part), 1, generator))
        part.copy_(_student_t(len(part), columns, generator) * rows * factors)
    return weight


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.empty(rows, columns, device=generator.device).normal_(generator=generator)


def _student_t(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Student's t: a chi-square of 2 n degrees is twice the sum of n exponential numbers."""
    half = torch.zeros(rows, columns, device=generator.device)
    for _ in range(DEGREES // 2):
        half += torch.empty_like(half).exponential_(generator=generator)
    return _normal(rows, columns, generator) * (DEGREES / 2 / half).sqrt()


Law = Callable[[int, int, torch.Generator, torch.dtype], Tensor]

LAWS: dict[str, Law] = {"gaussian": gaussian, "trained-like": trained_like}
"""Laws by the names that results and options have for them."""
