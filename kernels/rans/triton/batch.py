"""Tensors of one format that a GPU codes together, and what each launch has to know of them.

Whole programs of blocks are coded where they lie. What is left of a tensor, its *tail*, is coded from a copy
that is filled up to whole runs, so that no kernel reads beyond a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.memory_part import MemoryPart, allocate
from neuzip.kernels.float_fields import FloatFormat, plane_bytes, plane_widths
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.triton.lists import ENTRIES, Ints, on_device, starts_of

INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Signed dtypes by their bits."""

ELEMENTS = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}
"""Dtypes of kernels by their bits."""

PLANE_WIDTHS = (32, 16, 8, 4, 2, 1)

# Columns of a batch: where the weights are, how many they are, blocks in whole programs, blocks of the
# tensors before, and where the planes are, by width. Weights are bytes from the first tensor on, planes bytes
# from a memory of theirs: what is added to a pointer that a launch is given keeps its alignment for the
# compiler; an address as a number has none. Then starts: of blocks, of the programs that code whole groups of
# blocks, and tails, and of those that take the census.
BITS_AT, NUMEL, WHOLE, INDEX, PLANES_AT = range(5)
FIRSTS = PLANES_AT + len(PLANE_WIDTHS)
CENSUS_AT = FIRSTS + 3
COLUMNS = CENSUS_AT + 1

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
class PlaneLayout:
    """Where the planes of some tensors lie in a memory of `nbytes`: whole runs each, by width and by tensor.

    `places`, [PLANE_WIDTHS, tensors], are bytes. `pieces` are where the planes of each tensor begin, and how
    long they are, by width; a tensor without weights has none.
    """

    places: Ints
    pieces: list[dict[int, tuple[int, int]]]
    nbytes: int

    @classmethod
    def of(cls, numels: Sequence[int], mantissa_bits: int) -> PlaneLayout:
        """The layout for tensors of so many weights, of so many mantissa bits."""
        places = np.zeros((len(PLANE_WIDTHS), len(numels)), np.int64)
        pieces: list[dict[int, tuple[int, int]]] = [{} for _ in numels]
        end = 0
        for width in plane_widths(1 + mantissa_bits):
            for number, numel in enumerate(numels):
                places[PLANE_WIDTHS.index(width), number] = end
                if numel:
                    pieces[number][width] = end, plane_bytes(width, numel)
                end += whole_runs(numel) * width // 8
        return cls(places, pieces, end)

    def planes(self, memory: torch.Tensor) -> list[Planes]:
        """The planes of each tensor in a memory."""
        return [{width: cut(memory, *piece) for width, piece in own.items()} for own in self.pieces]


def cut(memory: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """A piece of a one-dimensional array that begins with its memory. A slice takes twice as long."""
    return memory.as_strided((length,), (1,), start)


@dataclass(frozen=True, eq=False)
class BatchSizes:
    """What follows from the sizes of tensors alone. Arrays have an entry for each; nobody writes to them.

    `columns` are those of a batch of one; larger ones lack where weights are. `programs` take the census.
    `tail` is the largest number of weights of a tail. `key` are the arguments of `sizes_of`.
    """

    key: tuple[Any, ...]
    numels: Ints
    blocks: Ints
    whole: Ints
    shares: BlockShares
    columns: Ints
    programs: int
    tail: int
    layout: PlaneLayout | None


class CensusShares(NamedTuple):
    """How the census of tensors is shared: items of a tile, and about how many programs.

    An item is `weights` weights: two neighbours, or one.
    """

    weights: int
    tile: int
    programs: int


@lru_cache(maxsize=512)
def sizes_of(
    numels: tuple[int, ...], warps: int, mantissa_bits: int | None, census: CensusShares | None = None
) -> BatchSizes:
    """The sizes of tensors of so many weights, whose programs code `warps` blocks each.

    With `mantissa_bits` they have a layout of planes, with `census` starts of programs for it.
    """
    counts = np.array(numels, np.int64)
    blocks = -(-counts // BLOCK)
    whole = counts // (warps * BLOCK) * warps
    shares = BlockShares.of(blocks, whole, warps)
    columns = np.zeros((COLUMNS, ENTRIES), np.int64)
    columns[[NUMEL, WHOLE, INDEX], : counts.size] = counts, whole, np.cumsum(blocks) - blocks
    columns[FIRSTS:CENSUS_AT] = shares.starts
    layout = None if mantissa_bits is None else PlaneLayout.of(numels, mantissa_bits)
    if layout is not None:
        columns[PLANES_AT:FIRSTS, : counts.size] = layout.places
    if census is not None:
        tiles = -(-(counts // census.weights) // census.tile)
        each = max(1, -(-int(tiles.sum()) // census.programs))
        columns[CENSUS_AT] = starts_of(np.maximum(1, -(-tiles // each)))
    tail = int((counts - whole * BLOCK).max())
    programs = int(columns[CENSUS_AT, -1])
    key = numels, warps, mantissa_bits, census
    return BatchSizes(key, counts, blocks, whole, shares, columns, programs, tail, layout)


@cache
def _columns_of_one(key: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The columns of a batch of one tensor, which all of its size share, on a device, for ever: 8 KB.

    The host waits until they are there, so any stream may read them.
    """
    with torch.inference_mode(False):
        return torch.from_numpy(sizes_of(*key).columns).to(device, copy=True)


class Batch:
    """Bit patterns of some tensors, one-dimensional, contiguous, at multiples of 16 bytes, none empty.

    Planes that are written while the tensors are coded lie by the layout of `sizes`; or else after `planes`,
    where `places` say, as those of a layout do.
    """

    def __init__(
        self, bits: Sequence[torch.Tensor], fmt: FloatFormat, warps: int, sizes: BatchSizes,
        planes: torch.Tensor | None = None, places: Ints | None = None,
    ) -> None:  # fmt: skip
        self.bits, self.fmt, self.warps, self.sizes, self.device = bits, fmt, warps, sizes, bits[0].device
        self.base = MemoryPart(bits[0], torch.uint8, 0, bits[0].nbytes)
        if planes is not None:
            self.planes = planes
        if len(bits) == 1 and places is None:
            columns = _columns_of_one(sizes.key, self.device)
        else:
            columns = self.columns_with(
                sizes.columns[PLANES_AT:FIRSTS, : len(bits)] if places is None else places
            )
        self.columns = MemoryPart(columns, torch.int64, 0, COLUMNS * ENTRIES)

    @cached_property
    def planes(self) -> torch.Tensor:
        """The memory of the planes, uint8."""
        layout = self.sizes.layout
        return torch.empty(layout.nbytes if layout else 0, dtype=torch.uint8, device=self.device)

    @cached_property
    def tails(self) -> MemoryPart:
        """Memory for the tails of all tensors, `tail_stride` weights for each."""
        if not self.sizes.tail:
            return self.columns  # nobody reads it
        return allocate(self.device, (INTEGERS[self.fmt.bits], len(self.bits) * self.tail_stride))[0]

    @property
    def tail_stride(self) -> int:
        """Weights of a whole program."""
        return self.warps * BLOCK

    def columns_with(self, places: Ints) -> torch.Tensor:
        """The columns, with where planes of each tensor are, on the device. Nobody waits for them."""
        columns: Ints = self.sizes.columns.copy()
        base = self.base.address
        columns[BITS_AT, : len(self.bits)] = [one.data_ptr() - base for one in self.bits]
        columns[PLANES_AT:FIRSTS, : len(self.bits)] = places
        return on_device(columns, self.device)


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
