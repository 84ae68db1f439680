"""Weights cut into blocks that share a scale, and the bits that a format of such blocks takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """What a format stores of a matrix, in bits.

    `code` is for each weight. `shared` has pairs (weights, bits): so many neighbours share so many bits, such
    as a scale; 0 weights stands for a whole row. A row begins with a new block, unless blocks run
    `across_rows`. The last block may be short, and its shared bits count in full. `tensor` counts once.
    """

    code: int
    shared: tuple[tuple[int, int], ...] = ()
    across_rows: bool = False
    tensor: int = 0

    @cached_property
    def bits_per_weight(self) -> float:
        """Bits per weight in whole blocks, without what belongs to a row or to the tensor."""
        return self.code + sum(bits / weights for weights, bits in self.shared if weights)

    def bits(self, rows: int, width: int) -> int:
        """Exact bits of a matrix.

        >>> Layout(4, ((32, 16),)).bits(2, 64), Layout(4, ((32, 16),)).bits(2, 65)
        (576, 616)
        """
        if rows * width == 0:
            return 0
        runs, length = (1, rows * width) if self.across_rows else (rows, width)
        blocks = sum(bits * runs * -(-length // (weights or width)) for weights, bits in self.shared)
        return self.code * rows * width + blocks + self.tensor


def cut(weight: Tensor, size: int, across_rows: bool = False) -> Tensor:
    """A matrix [rows, width] as blocks [n, size], a short last block filled up with zeros."""
    runs = weight.reshape(1, -1) if across_rows else weight
    missing = -runs.shape[1] % size
    return torch.nn.functional.pad(runs, (0, missing)).reshape(-1, size)


def joined(blocks: Tensor, shape: torch.Size, across_rows: bool = False) -> Tensor:
    """The inverse of `cut`: blocks [n, size] as a matrix of `shape`, [rows, width]."""
    runs, length = (1, shape.numel()) if across_rows else shape
    return blocks.reshape(runs, -1)[:, :length].reshape(shape)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is not finite: weights so small become 0."""
    reciprocal = 1 / scale
    return torch.where(reciprocal.isfinite(), reciprocal, 0.0)
