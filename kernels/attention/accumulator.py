"""Sums of FP8 products as the matrix instruction of Ada and Hopper GPUs computes them, in plain torch.

The accumulator of mma(f32.f8.f8.f32) is an fp32 register of which the instruction writes 22 bits: a sign, 8
bits of exponent and 13 of mantissa (SageAttention2, arXiv 2411.10958, section 3.4). An instruction multiplies
32 numbers of a row with 32 of a column. Two models of what it does with the products:

    whole    adds the exact sum of 32 products to the accumulator, and cuts the result to 13 bits of mantissa
    aligned  first cuts every product and the accumulator to multiples of 2^(e - 13), where e is the exponent
             of the largest of them (DeepSeek-AI 2025, arXiv 2505.09343, section 3.1)

Cutting is rounding towards zero. benchmarks/fp8_instruction.py compares both models with a GPU.

    >>> cut(torch.tensor([1 + 2**-13 + 2**-14, -3.0, torch.inf])).tolist() == [1 + 2**-13, -3.0, torch.inf]
    True
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MANTISSA_BITS = 13
"""Bits of the accumulator's mantissa, without the leading one."""

STEP = 32
"""Products that an instruction adds to one accumulator."""

PRODUCTS = 1 << 24
"""Products that the aligned model has in memory at once."""

Alignment = Literal["whole", "aligned"]


def cut(x: Tensor, bits: int = MANTISSA_BITS) -> Tensor:
    """Numbers with all but the first `bits` bits of their mantissas set to 0; fp32 or fp64, any shape.

    Infinities stay, and so does NaN. Raises TypeError for another dtype.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x is {x.dtype}: give float32 or float64")
    word, mantissa = (torch.int32, 23) if x.dtype == torch.float32 else (torch.int64, 52)
    prefix = (x.contiguous().view(word) & -(1 << (mantissa - bits))).view(x.dtype)
    return torch.where(x.isnan(), x, prefix)


def accumulate(p: Tensor, v: Tensor, start: Tensor | None = None, alignment: Alignment = "whole") -> Tensor:
    """`start` + p @ v as the instruction sums it, fp32 [..., M, N].

    `p` [..., M, K] and `v` [..., K, N] hold numbers of E4M3 in any float dtype; `start` [..., M, N] is 0 if
    None. Instructions take 32 of K, the last one what is left. Exact while magnitudes are below 2^30.
    """
    p, v = p.double(), v.double()
    total = p[..., :0] @ v[..., :0, :]  # zeros of the result's shape
    if start is not None:
        total = total + cut(start.double())
    add = _add_aligned if alignment == "aligned" else _add_whole
    for first in range(0, p.shape[-1], STEP):
        total = add(total, p[..., first : first + STEP], v[..., first : first + STEP, :])
    return total.float()


def _add_whole(total: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Products of E4M3 are multiples of 2^-18 and below 2^18: their sums are exact in fp64."""
    return cut(total + p @ v)


def _add_aligned(total: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """Some rows at a time: the products of all would be 256 bytes for each number of the result."""
    rows = max(1, PRODUCTS // max(1, STEP * total[..., :1, :].numel()))
    parts = []
    for row in range(0, total.shape[-2], rows):
        few = total[..., row : row + rows, :]
        products = p[..., row : row + rows, :, None] * v[..., None, :, :]
        addends = torch.cat([products, few[..., None, :]], -2)
        # frexp's exponents are those of mantissas in [1/2, 1).
        unit = torch.exp2(addends.abs().amax(-2).frexp()[1] - 1.0 - MANTISSA_BITS)
        parts.append(cut((addends / unit[..., None, :]).trunc().sum(-2) * unit))
    return torch.cat(parts, -2) if parts else total
