"""The largest and the mean magnitude of rows, with the same bits on every machine and in any order."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

AT_A_TIME = 1 << 22
"""Numbers that are widened to 64 bits at once: keeps the intermediate arrays small."""

PRECISION = 37
"""Bits of magnitudes that are added, from the largest one's on: a sum of 2**16 is a number of fp64."""

SUM_BITS = 62
"""A sum of more than 2**25 stays below 2**62, with fewer bits of each."""


def check_floats(x: Tensor) -> None:
    """Raise TypeError for numbers that are not bf16, fp16 or fp32, ValueError for an array of no axes."""
    if x.dtype not in DTYPES:
        raise TypeError(f"quantisers take bf16, fp16 or fp32, not {x.dtype}")
    if x.dim() == 0:
        raise ValueError("quantisers take arrays of at least one axis")


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each row, fp32 [..., 1] for [..., n]. NaN where a row has one, 0 if n is 0."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    return x.abs().amax(-1, keepdim=True).float()


def mean(x: Tensor) -> Tensor:
    """The mean magnitude of each row, fp32 [..., 1] for [..., n]; 0 if n is 0, NaN where one is not finite.

    Magnitudes are cut to multiples of 1 / `unit` and added as int64, which has no order; the sum is then
    rounded to fp64, divided by n and rounded to fp32. What the mean loses by cutting is less than 2**-36 of
    the largest magnitude for n up to 2**25, and nothing at all if the magnitudes span fewer than 2**28 in
    bf16, 2**25 in fp16, 2**12 in fp32.
    """
    n = x.shape[-1]
    if n == 0:
        return largest(x)
    rows = x.reshape(-1, n)
    blocks = [_mean(block) for block in torch.split(rows, max(1, AT_A_TIME // n))]
    return torch.cat(blocks).reshape(*x.shape[:-1], 1) if blocks else largest(x)


def quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, rounded once: torch multiplies by a reciprocal if a number divides on CUDA, or is divided."""
    a = a if isinstance(a, Tensor) else torch.full_like(b, a)  # type: ignore[arg-type]
    return a / (b if isinstance(b, Tensor) else torch.full_like(a, b))


def unit(peak: Tensor, n: int) -> Tensor:
    """The power of two by which n magnitudes up to `peak` are multiplied to be added as int64; fp64.

    With e the exponent of the smallest power of two above the peak (0 for a peak of 0) it is 2**(37 - e), or
    2**(62 - ceil(log2 n) - e) if that is less.
    """
    finite = torch.where(peak.isfinite(), peak, 0)
    bits = min(PRECISION, SUM_BITS - (n - 1).bit_length())
    exponent = bits - torch.frexp(finite).exponent.long()
    return ((exponent + 1023) << 52).view(torch.float64)


def _mean(rows: Tensor) -> Tensor:
    n = rows.shape[-1]
    peak = largest(rows)
    scale = unit(peak, n)
    total = torch.zeros_like(scale, dtype=torch.int64)
    for part in torch.split(rows, AT_A_TIME, -1):
        total += (part.double().abs() * scale).long().sum(-1, keepdim=True)
    return torch.where(peak.isfinite(), quotient(total.double() / scale, n), torch.nan).float()
