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
    h apart, become a + b and a - b; in the end all are multiplied by 1 / sqrt(block), rounded to fp32. No
    gradients flow.
    """
    width = x.shape[-1]
    block = block_width(width)
    x = x.detach().float()
    if block <= 1:
        return x
    y, spare = torch.empty_like(x), torch.empty_like(x)
    h = 1
    while h < block:
        pairs = width // (2 * h), 2, h
        a, b = torch.unflatten(x, -1, pairs).unbind(-2)
        total, difference = torch.unflatten(y, -1, pairs).unbind(-2)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        x, y, spare = y, spare, y
        h *= 2
    return x.mul_(1 / math.sqrt(block))
