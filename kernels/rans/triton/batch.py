"""Tensors of one format that a GPU codes together, and what each launch has to know of them.

Whole programs of blocks are coded where they lie. What is left of a tensor, its *tail*, is coded from a copy
that is filled up to whole runs, so that no kernel reads beyond a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.float_fields import FloatFormat, plane_widths
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.triton.lists import ENTRIES, Ints, on_device, starts_of

INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Signed dtypes by their bits."""

ELEMENTS = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}
"""Dtypes of kernels by their bits."""

PLANE_WIDTHS = (32, 16, 8, 4, 2, 1)

# Columns of a batch: where the weights are, how many they are, blocks in whole programs, blocks of the
# tensors before, and where the planes are, by width. Places are bytes from the first tensor on: what is added
# to a pointer that a launch is given keeps its alignment for the compiler; an address as a number has none.
# Then starts: of blocks, and of the programs that code whole groups of blocks, and tails.
BITS_AT, NUMEL, WHOLE, INDEX, PLANES_AT = range(5)
FIRSTS = PLANES_AT + len(PLANE_WIDTHS)
COLUMNS = FIRSTS + 3

Planes = dict[int, torch.Tensor]


def whole_runs(numel: Any) -> Any:
    """`numel`, a number or an array, rounded up to whole runs of all lanes."""
    return -(-numel // (LANES * RUN)) * LANES * RUN


@dataclass(frozen=True)
class BlockShares:
    """Blocks of some tensors that are coded in one go: where those of each start, and its programs.

    `starts` are columns: of blocks, of programs of `warps` blocks each, and of programs for the tails.
    """

    starts: Ints
    whole: int
    blocks: int

    @classmethod
    def of(cls, blocks: Ints, whole: Ints, warps: int) -> BlockShares:
        """The shares of tensors that have so many blocks, and so many of them in whole programs."""
        starts = np.stack([starts_of(share) for share in (blocks, whole // warps, blocks - whole)])
        return cls(starts, int(whole.sum()), int(blocks.sum()))

    def programs(self, *, ragged: bool) -> int:
        """Programs for all whole groups of blocks, or for all tails."""
        return int(self.starts[2 if ragged else 1, -1])


@dataclass(frozen=True, eq=False)
class BatchSizes:
    """What follows from the sizes of tensors alone. Arrays have an entry for each; nobody writes to them.

    `columns` are those of a batch, without places. `tail` is the largest number of weights of a tail.
    """

    numels: Ints
    blocks: Ints
    whole: Ints
    before: Ints
    shares: BlockShares
    columns: Ints
    tail: int


@lru_cache(maxsize=512)
def sizes_of(numels: tuple[int, ...], warps: int) -> BatchSizes:
    """The sizes of tensors of so many weights, whose programs code `warps` blocks each."""
    counts = np.array(numels, np.int64)
    blocks = -(-counts // BLOCK)
    whole = counts // (warps * BLOCK) * warps
    before = np.cumsum(blocks) - blocks
    shares = BlockShares.of(blocks, whole, warps)
    columns = np.zeros((COLUMNS, shares.starts.shape[1]), np.int64)
    columns[[NUMEL, WHOLE, INDEX], : counts.size] = counts, whole, before
    columns[FIRSTS:] = shares.starts
    return BatchSizes(counts, blocks, whole, before, shares, columns, int((counts - whole * BLOCK).max()))


class Batch:
    """Bit patterns of some tensors, one-dimensional, contiguous, at multiples of 16 bytes, none empty.

    `planes` are where those are written that are written while the tensors are coded.
    """

    def __init__(
        self, bits: Sequence[torch.Tensor], fmt: FloatFormat, warps: int, planes: Sequence[Planes] = ()
    ) -> None:
        self.bits, self.fmt, self.warps, self.planes = bits, fmt, warps, planes
        self.device = bits[0].device
        self.sizes = sizes_of(tuple([one.numel() for one in bits]), warps)
        self.tails = torch.empty(
            (len(bits), warps * BLOCK) if self.sizes.tail else (1, 8),
            dtype=INTEGERS[fmt.bits],
            device=self.device,
        )
        self._starts: list[Ints] = []

    @cached_property
    def base(self) -> torch.Tensor:
        """What places count from: the bytes of the first tensor."""
        return self.bits[0].view(torch.uint8)

    def places(self, arrays: Sequence[torch.Tensor | None]) -> Ints:
        """Where arrays are; 0 for those that there are not."""
        base = self.bits[0].data_ptr()
        return np.array([0 if one is None else one.data_ptr() - base for one in arrays], np.int64)

    def add_starts(self, starts: Ints) -> int:
        """Another column for the launches to read, before any has read some: its number."""
        assert "columns" not in self.__dict__
        self._starts.append(starts)
        return COLUMNS + len(self._starts) - 1

    @cached_property
    def columns(self) -> torch.Tensor:
        """The columns that all launches read, on the device: int64 [COLUMNS and those added, ENTRIES]."""
        columns = np.concatenate([self._placed(self.planes).reshape(-1), *self._starts])
        return on_device(columns.reshape(-1, ENTRIES), self.device)

    def columns_with(self, planes: Sequence[Planes | None]) -> torch.Tensor:
        """The columns, with where other planes of each tensor are."""
        return on_device(self._placed(planes), self.device)

    def _placed(self, planes: Sequence[Planes | None]) -> Ints:
        columns: Ints = self.sizes.columns.copy()
        columns[BITS_AT, : len(self.bits)] = self.places(self.bits)
        for width in {width for own in planes if own for width in own}:
            places = self.places([own.get(width) if own else None for own in planes])
            columns[PLANES_AT + PLANE_WIDTHS.index(width), : len(planes)] = places
        return columns


def empty_planes(numel: int, mantissa_bits: int, device: torch.device) -> Planes:
    """Planes for the fields of a tensor, with room for whole runs."""
    size = whole_runs(numel)
    return {
        width: torch.empty(size * width // 8, dtype=torch.uint8, device=device)
        for width in plane_widths(1 + mantissa_bits)
    }


_C_BITS_AT, _C_NUMEL, _C_WHOLE = tl.constexpr(BITS_AT), tl.constexpr(NUMEL), tl.constexpr(WHOLE)


@triton.jit
def array_of(base_ptr, column_ptr, row, ELEMENT: tl.constexpr):
    """An array of a tensor, which begins at a multiple of 16 bytes, by the column of its places."""
    return (base_ptr + tl.multiple_of(tl.load(column_ptr + row), 16)).to(tl.pointer_type(ELEMENT))


@triton.jit
def weights_of(base_ptr, columns_ptr, row, ELEMENT: tl.constexpr, ENTRIES: tl.constexpr):
    """The weights of a tensor, seen as integers."""
    return array_of(base_ptr, columns_ptr + _C_BITS_AT * ENTRIES, row, ELEMENT)


@triton.jit
def numel_of(columns_ptr, row, ENTRIES: tl.constexpr):
    """The weights of a tensor."""
    return tl.load(columns_ptr + _C_NUMEL * ENTRIES + row)


@triton.jit
def whole_of(columns_ptr, row, ENTRIES: tl.constexpr):
    """The blocks of a tensor that are in whole programs."""
    return tl.load(columns_ptr + _C_WHOLE * ENTRIES + row)
