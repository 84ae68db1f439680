"""Comparisons of tensors bit by bit: a tolerance would hide what a lossless scheme or a kernel changes."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each size in bytes."""


def patterns(x: Tensor) -> Tensor:
    """The bits of a tensor as integers of its size, contiguous."""
    return x.detach().contiguous().view(INTEGERS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal on any device: the zeros differ, a NaN equals itself."""
    a, b = a.cpu(), b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(patterns(a), patterns(b))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal, but that a NaN equals every NaN: for what is computed."""
    a, b = a.cpu(), b.cpu()
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return same_bits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))
