"""The orthonormal Hadamard transform of heads, with the same bits on every machine."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_width(width: int) -> int:
    """The numbers that one transform mixes: the largest power of two that divides `width`.

    >>> [block_width(width) for width in (64, 80, 96, 112, 128, 192, 256)]
    [64, 16, 32, 16, 128, 64, 256]
    """
    return width & -width


def hadamard(x: Tensor) -> Tensor:
    """The transform of each row [..., width] in blocks of `block_width`: fp32 [..., width].

    The transform is its own inverse. In fp32: for h = 1, 2, 4 and so on below the width of a block, a and b,
    h apart, become a + b and a - b; in the end all are multiplied by 1 / sqrt(block), rounded to fp32.
    """
    width = x.shape[-1]
    block = block_width(width)
    x = x.float()
    if block <= 1:
        return x
    shape, h = x.shape, 1
    while h < block:
        a, b = x.reshape(*shape[:-1], width // (2 * h), 2, h).unbind(-2)
        x = torch.stack([a + b, a - b], -2)
        h *= 2
    return x.reshape(shape) * (1 / math.sqrt(block))
