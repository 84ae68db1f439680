"""A list of tensors cut into blocks, which kernels take as if it were one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.dtypes import pattern_dtypes
from neuzip.kernels.sparse_delta.numbers import BLOCK, BLOCK_BITS, COUNT_BITS

MOST_ROWS = 16
"""Tables of offsets that a BlockMap keeps."""


@dataclass(frozen=True)
class BlockMap:
    """Where the blocks of tensors are: `numels` and `itemsizes` of each tensor. A tensor begins a block."""

    numels: tuple[int, ...]
    itemsizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> BlockMap:
        """The blocks of tensors."""
        return cls(tuple(t.numel() for t in tensors), tuple(t.element_size() for t in tensors))

    @functools.cached_property
    def firsts(self) -> npt.NDArray[np.int64]:
        """The first block of each tensor, and behind the last one the number of all blocks."""
        counts = [-(-numel // BLOCK) for numel in self.numels]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])

    @property
    def count(self) -> int:
        """The number of all blocks."""
        return int(self.firsts[-1])

    def tables(self, itemsize: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of all tensors whose weights have `itemsize` bytes, and their tensors: int32 each."""
        key = itemsize, device
        if key not in self._tables:
            counts = np.diff(self.firsts)
            owners = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
            blocks = np.flatnonzero(np.array(self.itemsizes, np.int64)[owners] == itemsize).astype(np.int32)
            self._tables[key] = (
                torch.from_numpy(blocks).to(device),
                torch.from_numpy(owners[blocks]).to(device),
            )
        return self._tables[key]

    def rows(self, offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A row of each tensor: its first block, its weights, and its offset in memory: int64 [tensors, 3].

        The tables of the last MOST_ROWS offsets are kept, as steps of a training use the same memory.
        """
        key = offsets, device
        if key not in self._rows:
            table = np.stack([self.firsts[:-1], np.array(self.numels), np.array(offsets)], 1)
            if len(self._rows) == MOST_ROWS:
                self._rows.pop(next(iter(self._rows)))
            self._rows[key] = torch.from_numpy(table).to(device)
        return self._rows[key]

    @functools.cached_property
    def _rows(self) -> dict[tuple[tuple[int, ...], torch.device], torch.Tensor]:
        return {}

    @functools.cached_property
    def _tables(self) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}


@dataclass(frozen=True)
class CodedDelta:
    """A coded difference: a descriptor of each block, and the words of all, int32 each."""

    descriptors: torch.Tensor
    words: torch.Tensor


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension of integers, without a copy."""
    return tensor.detach().reshape(-1).view(pattern_dtypes()[8 * tensor.element_size()])


def word_counts(descriptors: torch.Tensor) -> torch.Tensor:
    """How many words blocks have: int64, for descriptors in int32, of whatever bits."""
    wide = descriptors.to(torch.int64)
    count, more = wide & ((1 << COUNT_BITS) - 1), wide >> COUNT_BITS & ((1 << COUNT_BITS) - 1)
    width = wide >> 2 * COUNT_BITS & 63
    length = torch.zeros_like(count)
    for bit in range(BLOCK_BITS):
        length += (count - 1) >> bit > 0
    low = (BLOCK_BITS - length).clamp(min=0)
    high = count + (BLOCK >> low) - 1
    bits = torch.where(count > 0, high + count * (low + 2), 0) + more * width
    return (bits + 31) >> 5


def word_starts(descriptors: torch.Tensor) -> torch.Tensor:
    """The first word of each block, and behind the last one the number of all words: int64."""
    counts = word_counts(descriptors)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
