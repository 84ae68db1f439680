"""Block formats of GGML: Q4_0, Q5_0, Q8_0 and Q6_K, rounded as its reference functions round.

Source: ggml-common.h and ggml-quants.c (quantize_row_*_ref), as llama.cpp uses them without an importance
matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import cut, inverse, joined

BLOCK = 32
"""Weights of a block of Q4_0, Q5_0 and Q8_0."""

SUPER, SUB = 256, 16
"""Weights of a block of Q6_K, and those of them that share an 8-bit scale."""

TINY = 1e-15
"""Magnitudes and scales below it count as 0 in Q6_K."""


def q4_0(weight: Tensor) -> Tensor:
    """An fp32 matrix in Q4_0: the weight of the largest magnitude gets code -8 of -8 to 7."""
    return _signed_peak(weight, 8)


def q5_0(weight: Tensor) -> Tensor:
    """An fp32 matrix in Q5_0: the weight of the largest magnitude gets code -16 of -16 to 15."""
    return _signed_peak(weight, 16)


def _signed_peak(weight: Tensor, most: int) -> Tensor:
    blocks = cut(weight, BLOCK)
    scale = _peak(blocks) / -most
    codes = (blocks * inverse(scale) + (most + 0.5)).trunc().clamp(max=2 * most - 1) - most
    return joined(codes * scale.half().float(), weight.shape)


def _peak(blocks: Tensor) -> Tensor:
    """The first weight of the largest magnitude in each block, [n, 1]."""
    return blocks.gather(1, blocks.abs().argmax(1, keepdim=True))


def q8_0(weight: Tensor) -> Tensor:
    """An fp32 matrix in Q8_0: codes -127 to 127, scale = largest magnitude / 127, halves away from zero."""
    blocks = cut(weight, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    x = blocks * inverse(scale)
    codes = (x.abs() + 0.5).floor() * x.sign()
    return joined(codes * scale.half().float(), weight.shape)


def q6_k(weight: Tensor) -> Tensor:
    """An fp32 matrix in Q6_K: codes -32 to 31, with GGML's search for the scale of 16 weights.

    These scales are stored as integers of 8 bits times the fp16 scale of 256 weights, and the codes are
    rounded again with the stored scales.
    """
    subs = cut(weight, SUPER).reshape(-1, SUB)
    scale = _searched_scale(subs, 32).reshape(-1, SUPER // SUB)
    peak = _peak(scale)
    to_integer = torch.where(peak.abs() < TINY, 0.0, -128 * inverse(peak))
    integers = (to_integer * scale).round().clamp(max=127)
    stored = (inverse(to_integer).half().float() * integers).reshape(-1, 1)
    codes = (subs * inverse(stored)).round().clamp(-32, 31)
    return joined(codes * stored, weight.shape)


def _searched_scale(blocks: Tensor, most: int) -> Tensor:
    """The best of 19 scales near peak / -most of each block [n, size], by errors weighted with w^2: [n]."""
    peak = _peak(blocks)
    weights = blocks.square()
    scale, best = torch.zeros_like(peak), torch.zeros_like(peak)
    for trial in (0, *range(-9, 0), *range(1, 10)):
        codes = (blocks * (-(most + 0.1 * trial) * inverse(peak))).round().clamp(-most, most - 1)
        weighted = weights * codes
        dot, norm = (weighted * blocks).sum(1, keepdim=True), (weighted * codes).sum(1, keepdim=True)
        fitted = dot * inverse(norm)
        better = (norm > 0) & (dot * dot > best * norm)
        scale, best = torch.where(better, fitted, scale), torch.where(better, fitted * dot, best)
    return torch.where(peak.abs() < TINY, 0.0, scale)[:, 0]
