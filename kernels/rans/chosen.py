"""Coded items, such as experts, of which a device chooses those that are decoded: into slots of memory.

An item has the same matrices as every other: of an expert for example two. Tables on the device tell a kernel
where the parts of each item lie coded, so that a list of items in the device's memory is all that a launch
needs. The host neither knows the list nor waits for it.

    slot      | margin | first matrix of an item | margin | second matrix | ...

Whole blocks are decoded. Where items do not begin with a block, margins take what is decoded before and
after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from neuzip.kernels.rans.coded import ALIGNMENT, ChosenLaunch, Kind
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.ops import ResidentTensor

SLOT_ALIGNMENT = 512
"""Bytes that slots, and matrices of them without margins, begin at multiples of."""

ChunkOf = tuple[ResidentTensor, int]
"""A chunk of a coded tensor: its number there."""


@dataclass(frozen=True)
class SlotRegion:
    """Where a matrix is in a slot: its first byte, and how many it has."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class CodedItems:
    """The matrices of several items, coded on one device. `slot_bytes` are those of a slot."""

    regions: tuple[SlotRegion, ...]
    slot_bytes: int
    launches: tuple[ChosenLaunch, ...]
    sources: tuple[torch.Tensor, ...] = field(repr=False)
    """All that launches read: of codes they know only where they are."""

    def decode(self, chosen: torch.Tensor, first: int, out: torch.Tensor) -> None:
        """Decode items into slots of `out`, uint8: item `chosen[first + s]`, int32, to slot s.

        Slots without an item, of -1 or beyond the end of the list, keep what they hold.
        """
        from neuzip.kernels.rans.triton.decode import decode_chosen

        decode_chosen(self.launches, chosen, first, out, self.slot_bytes)


def can_choose(matrices: Sequence[Sequence[Sequence[ChunkOf]]]) -> bool:
    """Whether `coded_items` takes these: parts begin at multiples of 16 bytes in their tensors."""
    return all(
        edge * tensor.layout.format.bits // 8 % ALIGNMENT == 0
        for items in matrices
        for chunks in items
        for tensor, number in chunks
        for edge in (tensor.chunk(number).start, tensor.chunk(number).stop)
    )


def coded_items(matrices: Sequence[Sequence[Sequence[ChunkOf]]]) -> CodedItems:
    """Tables for items whose matrices have these chunks, in their order: `matrices[matrix][item][part]`.

    All tensors are on one device. Raises ValueError where `can_choose` says no.
    """
    if not can_choose(matrices):
        raise ValueError(f"parts of items begin at multiples of {ALIGNMENT} bytes")
    regions: list[SlotRegion] = []
    parts: list[list[ChunkOf]] = []  # of each part of an item: the chunk of each item
    places: list[int] = []
    end = 0
    for items in matrices:
        margin, sizes = _margin(items), [_own_bytes(*chunk) for chunk in items[0]]
        start = _aligned(end) + margin
        regions.append(SlotRegion(start, sum(sizes)))
        parts += [list(chunks) for chunks in zip(*items, strict=True)]
        places += [start + before for before in accumulate([0, *sizes[:-1]])]
        end = start + sum(sizes) + margin
    launches = tuple(chosen_launches(parts, places))
    memories = {id(m): m for chunks in parts for t, _ in chunks for m in t.memories}
    tables = [table for one in launches for table in (one.rows, one.places, one.programs)]
    return CodedItems(tuple(regions), _aligned(end), launches, (*memories.values(), *tables))


def _own_bytes(tensor: ResidentTensor, number: int) -> int:
    chunk = tensor.chunk(number)
    return (chunk.stop - chunk.start) * tensor.layout.format.bits // 8


def _margin(items: Sequence[Sequence[ChunkOf]]) -> int:
    """Bytes before and after a matrix that blocks may take which are not its own alone."""
    chunks = [(tensor, tensor.chunk(number)) for chunks in items for tensor, number in chunks]
    own = all(c.start % BLOCK == 0 and (c.stop % BLOCK == 0 or c.ragged(t.layout)) for t, c in chunks)
    return 0 if own else BLOCK * chunks[0][0].layout.format.bits // 8


def chosen_launches(
    parts: Sequence[Sequence[ChunkOf]], places: Sequence[int], warps: int | None = None
) -> list[ChosenLaunch]:
    """One launch for the full blocks of each kind, and one for the ragged ones. `parts[part][item]`.

    `warps` are those of a program for full blocks, chosen by their number if not given.
    """
    from neuzip.kernels.rans.triton.decode import warps_of

    base = parts[0][0][0].memory
    blocks: dict[tuple[Kind, bool], list[list[int]]] = {}  # of each part: those of each item
    for part, chunks in enumerate(parts):
        for item, (tensor, number) in enumerate(chunks):
            coded = tensor.part(number)
            for ragged, count in (False, coded.full), (True, int(coded.ragged)):
                if count:
                    table = blocks.setdefault((coded.kind, ragged), [[0] * len(chunks) for _ in parts])
                    table[part][item] = count
    launches = []
    for (kind, ragged), table in blocks.items():
        most = [max(counts) for counts in table]
        own = 1 if ragged else warps or warps_of(kind, sum(most), base.device)
        programs = [(part, number) for part, count in enumerate(most) for number in range(-(-count // own))]
        rows = [
            [
                _row(tensor, number, base) if count else (0, 0)
                for (tensor, number), count in zip(chunks, counts, strict=True)
            ]
            for chunks, counts in zip(parts, table, strict=True)
        ]
        launches.append(
            ChosenLaunch(
                kind, ragged, own, base,
                torch.tensor(rows, dtype=torch.int64).transpose(0, 1).contiguous().to(base.device),
                torch.tensor(places, dtype=torch.int64).to(base.device),
                torch.tensor(programs, dtype=torch.int32).to(base.device),
            )
        )  # fmt: skip
    return launches


def _row(tensor: ResidentTensor, number: int, base: torch.Tensor) -> tuple[int, int]:
    """A chunk's descriptor in bytes from `base` on, and the bytes that are decoded before its own."""
    chunk = tensor.chunk(number)
    before = chunk.part(tensor.layout).start * tensor.layout.format.bits // 8
    return tensor.part(number).row.data_ptr() - base.data_ptr(), before


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
