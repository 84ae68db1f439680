"""The largest and the mean magnitude of rows, with the same bits on every machine and in any order."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

AT_A_TIME = 1 << 22
"""Numbers that are widened to 64 bits at once: keeps the intermediate arrays small."""

PRECISION = 40
"""Bits of magnitudes that are added, at most: see `unit`."""

SPAN, USUAL = 8, 7
"""Magnitudes are cut off below a power of two whose exponent is 7 and a multiple of 8: the same for all rows
whose largest is 1/2 to 128, so that a kernel can begin to add before it knows which that is."""


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
    rounded to fp64, divided by n and rounded to fp32. What the mean loses by cutting is less than 2**-32 of
    the largest magnitude for n up to 2**14 (2**-29 up to 2**25), and nothing at all if the magnitudes span
    fewer than 2**24 in bf16, 2**21 in fp16, 2**8 in fp32.
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


def sum_bits(n: int) -> int:
    """Bits of each of n magnitudes that are added: 40, of more than 2**14 fewer, so that sums have 54.

    From 2**17 to 2**25 they are 37, and sums have more; of still more magnitudes sums have 62 bits.
    """
    length = (n - 1).bit_length()
    return min(PRECISION, 54 - min(length, 17), 62 - length)


def unit(peak: Tensor, n: int) -> Tensor:
    """The power of two by which n magnitudes up to `peak` are multiplied to be added as int64; fp64.

    With e the smallest exponent of `USUAL` and multiples of `SPAN` whose power of two is above the peak (that
    above 1 for a peak of 0) it is 2**(`sum_bits` - e).
    """
    finite = torch.where(peak.isfinite(), peak, 0)
    above = torch.frexp(finite).exponent.long()
    exponent = sum_bits(n) - (USUAL - (USUAL - above).div(SPAN, rounding_mode="floor") * SPAN)
    return ((exponent + 1023) << 52).view(torch.float64)


def _mean(rows: Tensor) -> Tensor:
    n = rows.shape[-1]
    peak = largest(rows)
    scale = unit(peak, n)
    total = torch.zeros_like(scale, dtype=torch.int64)
    for part in torch.split(rows, AT_A_TIME, -1):
        total += (part.double().abs() * scale).long().sum(-1, keepdim=True)
    return torch.where(peak.isfinite(), quotient(total.double() / scale, n), torch.nan).float()
