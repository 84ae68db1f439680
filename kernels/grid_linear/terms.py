"""Steps as two bf16 numbers, with which bf16 arithmetic makes the weights of a grid, rounded as they are.

    weight = fma(code, first, code * second)        all in bf16, each operation rounded once

`first` and `second` add up to about the step. Which sums near it round all codes of a window as the step does
is tried out: 34 candidates for every step. A code that none of them rounds right is an escape of the form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST, LARGEST = 2.0**-80, 2.0**80
"""Steps that are written so: nothing is near the ends of bf16's range."""

SHIFTS = range(-8, 9)
"""How far the sum of both is from the step, in 2^-18 of it."""


@dataclass(frozen=True)
class StepTerms:
    """Steps as two terms: pairs [U, 2] (int32, a bf16 number twice), and wrong codes [U, codes] (bool)."""

    pairs: Tensor
    wrong: Tensor


def terms_of(steps: Tensor, codes: Tensor, counts: Tensor) -> StepTerms:
    """The terms of steps (fp32) [U] for codes [C] that occur `counts` times: those with the fewest wrong."""
    wanted = (codes.to(torch.float32) * steps[:, None]).to(torch.bfloat16)  # [U, C]
    nearest = steps.to(torch.bfloat16)
    firsts = [nearest, torch.where(nearest < steps, _next(nearest, 1), _next(nearest, -1))]
    best, least = None, None
    for first in firsts:
        for shift in SHIFTS:
            second = (steps.double() * (1 + shift * 2.0**-18) - first.double()).to(torch.bfloat16)
            wrong = product(codes, first[:, None], second[:, None]) != wanted.double()
            cost = (wrong * counts).sum(1)
            mine = _pairs(first, second)
            if best is None or least is None:
                best, least = StepTerms(mine, wrong), cost
            else:
                better = (cost < least)[:, None]
                best = StepTerms(
                    torch.where(better, mine, best.pairs), torch.where(better, wrong, best.wrong)
                )
                least = torch.minimum(cost, least)
    assert best is not None
    return best


def product(codes: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Codes times steps as a GPU computes them with bf16 numbers, in fp64, which holds the sums exactly."""
    wide = codes.double()
    return rounded(wide * first.double() + rounded(wide * second.double()))


def rounded(numbers: Tensor) -> Tensor:
    """Numbers (fp64), not near the ends of bf16's range, rounded to the nearest that bf16 has, to even."""
    bits = numbers.view(torch.int64)
    upper = bits + ((1 << 44) - 1) + (bits >> 45 & 1)
    return (upper >> 45 << 45).view(torch.float64)


def _next(numbers: Tensor, by: int) -> Tensor:
    """The neighbours of positive bf16 numbers."""
    return (numbers.view(torch.int16) + by).view(torch.bfloat16)


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Both numbers twice in an int32: [U, 2]."""
    bits = torch.stack((first, second), 1).view(torch.int16).to(torch.int32)
    return bits << 16 | bits & 0xFFFF
