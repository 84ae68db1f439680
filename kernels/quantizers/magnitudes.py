"""The largest and the mean magnitude of rows, with the same bits on every machine and in any order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

AT_A_TIME = 1 << 22
"""Numbers that are widened to 64 bits at once: keeps the intermediate arrays small."""

PRECISION = 40
"""Most bits of a magnitude that `mean` adds; `unit` chooses them."""

TOTAL_BITS, UNIT_STEP, LAST_UNIT = 44, 11, 72
"""For `mean_by_fours`: bits of a total; log2 of the ratio of successive units; log2 of the last unit."""


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
    return _of_rows(_mean, x)


def mean_by_fours(x: Tensor) -> Tensor:
    """The mean magnitude of each row, as fast kernels can have it too: fp32 [..., 1] for [..., n].

    Four that follow each other are added in fp32, (a + b) + (c + d), with zeros behind the last. Those sums
    are cut to multiples of a unit and added as int64, which has no order. Times 1 / n and times the unit, in
    fp32, that total is the mean. The unit is `first_unit`, or the first 2**11, 2**22 and so on times as large
    with which the total is below 2**44: so nobody has to look for the largest magnitude first.

    0 if n is 0; NaN where not all is finite, or the sum is too large: 2**126, or sometimes 2**116.
    What cutting takes from the mean is less than the unit, and less than n 2**-34 of it if another unit than
    the first is taken.
    """
    return _of_rows(_mean_by_fours, x)


def first_unit(n: int) -> int:
    """The exponent of the unit that does for n magnitudes of a mean below 8."""
    return (n - 1).bit_length() - TOTAL_BITS + 3


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

    With 2**e the smallest power of two above the peak, or 1 for a peak of 0, it is 2**(`sum_bits` - e).
    """
    finite = torch.where(peak.isfinite(), peak, 0)
    return _power_of_two(sum_bits(n) - torch.frexp(finite).exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp64."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _of_rows(mean_of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[..., 1] for [..., n], some rows at a time; 0 if n is 0."""
    n = x.shape[-1]
    if x.numel() == 0:
        return largest(x)
    blocks = [mean_of(rows) for rows in torch.split(x.reshape(-1, n), max(1, AT_A_TIME // n))]
    return torch.cat(blocks).reshape(*x.shape[:-1], 1)


def _mean(rows: Tensor) -> Tensor:
    n = rows.shape[-1]
    peak = largest(rows)
    scale = unit(peak, n)
    total = torch.zeros_like(scale, dtype=torch.int64)
    for part in torch.split(rows, AT_A_TIME, -1):
        total += (part.double().abs() * scale).long().sum(-1, keepdim=True)
    return torch.where(peak.isfinite(), quotient(total.double() / scale, n), torch.nan).float()


def _mean_by_fours(rows: Tensor) -> Tensor:
    n = rows.shape[-1]
    a, b, c, d = F.pad(rows.abs().float(), (0, -n % 4)).view(len(rows), -(-n // 4), 4).unbind(-1)
    sums = ((a + b) + (c + d)).double()
    first = first_unit(n)
    last = -(-(LAST_UNIT - first) // UNIT_STEP)
    finite = sums.isfinite().all(-1, keepdim=True)
    sums = torch.where(finite, sums, 0)
    # By a sum that is a little too small it is this unit, or the next, as so much may be cut off.
    below = torch.frexp(sums.sum(-1, keepdim=True) * (1 - 2.0**-10)).exponent - first - TOTAL_BITS
    step = (below + (UNIT_STEP - 1)).div(UNIT_STEP, rounding_mode="floor").clamp(min=0)
    total = _total(sums, first + UNIT_STEP * step)
    more = total >= 1 << TOTAL_BITS
    step += more
    total = torch.where(more, _total(sums, first + UNIT_STEP * step), total)
    unit = _power_of_two(first + UNIT_STEP * step).float()
    mean = total.float() * (1 / n) * unit
    return torch.where(finite & (step <= last), mean, torch.nan)


def _total(sums: Tensor, unit: Tensor) -> Tensor:
    """The sum of each row, int64: its sums are cut off to multiples of 2**unit."""
    return (sums * _power_of_two(-unit)).long().sum(-1, keepdim=True)
