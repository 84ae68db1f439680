"""Blocks of tensors coded on a GPU, span by span: words go to scratch, and from there to their place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.memory_part import MemoryPart, allocate
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RAW_STEPS, RUN, RUNS
from neuzip.kernels.rans.triton.batch import (
    ELEMENTS,
    FIRSTS,
    Batch,
    BlockShares,
    numel_of,
    weights_of,
    whole_of,
    whole_runs,
)
from neuzip.kernels.rans.triton.device_table import FILLER, ROW, TABLE
from neuzip.kernels.rans.triton.encode_kernel import code_kernel
from neuzip.kernels.rans.triton.encode_planes import writes_planes
from neuzip.kernels.rans.triton.encoder_table import EncoderTables
from neuzip.kernels.rans.triton.lists import ENTRIES, on_device, row_of
from neuzip.kernels.tuning import launch_for

SCRATCH = 64 << 20
"""Bytes of scratch that any batch may have. One with a larger tensor may have 4/5 of the size of that."""

NOTES = LANES * RUNS
"""The most notes of a block: one a lane and run."""

ALIGNED_WORDS = 8
"""Words of a tensor begin at multiples of it: of 16 bytes."""

_TILE = 2048
"""Weights of a program that copies tails."""

_ENDS_TILE = 4096
"""Blocks whose lengths are added up at a time."""


def region_words(group: int) -> int:
    """The most words of a block of symbols of `group` weights, without escapes."""
    return HEADER_WORDS + BLOCK // group - RAW_STEPS * LANES


def scratch_bytes(group: int) -> int:
    """Bytes of scratch of a block: its words and notes."""
    return 2 * region_words(group) + 4 * NOTES


def fill_tails(batch: Batch, tables: torch.Tensor) -> None:
    """Copy the tails of a batch, filled up by the exponents that the tables name for that."""
    length = batch.sizes.tail
    if length:
        launch(
            _tails_kernel, (len(batch.bits), triton.cdiv(whole_runs(length), _TILE)),
            batch.base, batch.columns, tables, batch.tails,
            MANTISSA=batch.fmt.mantissa_bits, ELEMENT=ELEMENTS[batch.fmt.bits], BLOCK=BLOCK,
            RUN_WEIGHTS=LANES * RUN, STRIDE=batch.tail_stride, TABLE=TABLE, FILLER=FILLER, TILE=_TILE,
            ENTRIES=ENTRIES, device=batch.device,
        )  # fmt: skip


class BlockCoder:
    """The blocks of some tensors of a batch on their way: coded to scratch, a span of them at a time, and
    gathered from it.

    `rows` are the tensors whose tables have this `group`, and symbols with addends only if `addends`, or None
    for all; what is coded of others is nothing. Blocks of several tensors are one span; those of one are cut
    where `scratch` bytes do not suffice for it. The words that blocks have are written to `index`, that of
    the batch. `ends`, int64, are zeros for all blocks of the batch and one more. `lengths`, int64 [2,
    ENTRIES], says where the words of each tensor begin among all, and where those of the last one end, once
    the last span has been coded; and at which word each is put, a multiple of 16 bytes.
    """

    def __init__(
        self, batch: Batch, tables: EncoderTables, index: torch.Tensor, rows: Sequence[int] | None,
        group: int, addends: bool, scratch: int, ends: MemoryPart | None = None
    ) -> None:  # fmt: skip
        self._batch, self._tables, self._index = batch, tables, index
        self._group, self._addends = group, addends
        self._region, device, warps = region_words(group), batch.device, batch.warps
        self._shares = batch.sizes.shares
        if rows is None:
            self._starts = batch.columns.rows(FIRSTS, FIRSTS + 3, ENTRIES)
        else:
            is_chosen = np.isin(np.arange(len(batch.bits)), rows)
            chosen = [np.where(is_chosen, share, 0) for share in (batch.sizes.blocks, batch.sizes.whole)]
            self._shares = BlockShares.of(chosen[0], chosen[1], warps)
            self._starts = MemoryPart(on_device(self._shares.starts, device), torch.int64, 0, 3 * ENTRIES)
        self._span = blocks = self._shares.blocks
        if len(batch.bits if rows is None else rows) == 1:
            # The tail is no longer than a program, and begins where one would: it is never cut.
            together = max(scratch // scratch_bytes(group) // warps, 1) * warps
            spans = math.ceil(blocks / together)
            self._span = min(math.ceil(blocks / spans / warps) * warps, blocks)
        self.spans = range(0, blocks, self._span)
        self._regions, self._notes, self._counts = allocate(
            device, (torch.int16, self._span * self._region), (torch.int32, self._span * NOTES),
            (torch.int32, self._span * 2),
        )  # fmt: skip
        # Of tensors that others code, all blocks end where they begin.
        self.ends = ends or allocate(device, (torch.int64, blocks + 1), zero=True)[0]
        self.lengths = torch.empty(2, ENTRIES, dtype=torch.int64, device=device)

    def code(self, at: int) -> int:
        """Code the span that begins with block `at`; the block with which the next one begins."""
        shares, warps = self._shares, self._batch.warps
        end = min(at + self._span, shares.blocks)
        if end - at == shares.blocks:
            programs = [(0, shares.programs(ragged=ragged)) for ragged in (False, True)]
        else:  # of one tensor
            last = min(end, shares.whole)
            programs = [(at // warps, last // warps), (max(at - shares.whole, 0), end - shares.whole)]
        for is_ragged, (first, last) in enumerate(programs):
            if first < last:
                self._launch(first, last, at, bool(is_ragged))
        launch(
            _ends_kernel, (1,),
            self.ends, self._starts, self.lengths, at, end,
            TILE=_ENDS_TILE, ENTRIES=ENTRIES, ALIGNED=ALIGNED_WORDS, num_warps=16, device=self._batch.device,
        )  # fmt: skip
        return end

    def _launch(self, first: int, last: int, first_region: int, ragged: bool) -> None:
        batch, tables, warps = self._batch, self._tables, 1 if ragged else self._batch.warps
        fmt = batch.fmt
        own = launch_for("rans.code", batch.device, format=fmt.name, group=self._group)
        registers = {"maxnreg": own["registers"]} if is_compiled(code_kernel) else {}
        launch(
            code_kernel, (last - first,),
            batch.base, batch.planes, batch.columns, self._starts, batch.tails.of(torch.int64),
            tables.tables, tables.facts, tables.symbols, self._regions, self._notes, self._counts, self.ends,
            self._index, first, first_region, self._span,
            BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits,
            GROUP=self._group, RAGGED=ragged, ADDENDS=self._addends, PLANE=writes_planes(fmt), WARPS=warps,
            REGION=self._region, NOTES=NOTES, LANES=LANES, RUN=RUN, RUNS=RUNS, LOWER=LOWER,
            HEADER=HEADER_WORDS, ROW=ROW, CODING=tables.coding, KEYS=tables.keys,
            STRIDE=batch.tail_stride, ENTRIES=ENTRIES, num_warps=warps, **registers, device=batch.device,
        )  # fmt: skip

    def gather(self, at: int, words: torch.Tensor, first_word: int = 0) -> None:
        """Bring the span coded last to where `lengths` puts it in `words`, as far as there is room.

        Words of the only tensor of several spans begin there with word `first_word` of all.
        """
        batch = self._batch
        launch(
            _gather_kernel, (min(self._span, self._shares.blocks - at),),
            batch.base, batch.columns, self._starts, self.lengths, words,
            self._regions, self._notes, self._counts, self.ends,
            at, first_word, self._span, words.numel(),
            EXPONENT=batch.fmt.exponent_bits, MANTISSA=batch.fmt.mantissa_bits,
            ELEMENT=ELEMENTS[batch.fmt.bits], BLOCK=BLOCK, REGION=self._region, NOTES=NOTES, RUN=RUN,
            TILE=1024, ENTRIES=ENTRIES, num_warps=2, device=batch.device,
        )  # fmt: skip


@triton.jit
def _tails_kernel(
    base_ptr, columns_ptr, tables_ptr, tails_ptr,
    MANTISSA: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, RUN_WEIGHTS: tl.constexpr,
    STRIDE: tl.constexpr, TABLE: tl.constexpr, FILLER: tl.constexpr, TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Copy what follows the whole programs of a tensor, and fill it up to whole runs."""
    row = tl.program_id(0)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    before = whole_of(columns_ptr, row, ENTRIES) * BLOCK
    left = (numel_of(columns_ptr, row, ENTRIES) - before).to(tl.int32)
    filler = tl.load(tables_ptr + row * TABLE + FILLER).to(tl.int64) << MANTISSA
    weights = weights_of(base_ptr, columns_ptr, row, ELEMENT, ENTRIES) + before
    tail = tl.load(weights + offs, mask=offs < left, other=0)
    tail = tl.where(offs < left, tail, filler.to(ELEMENT))
    padded = (left + RUN_WEIGHTS - 1) // RUN_WEIGHTS * RUN_WEIGHTS
    tl.store(tails_ptr + row.to(tl.int64) * STRIDE + offs, tail, mask=offs < padded)


@triton.jit(do_not_specialize=["at", "end"])
def _ends_kernel(
    ends_ptr, firsts_ptr, lengths_ptr, at, end,
    TILE: tl.constexpr, ENTRIES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add up what blocks `at` to `end` - 1 have, to where each ends; and say where each tensor begins."""
    carry = tl.load(ends_ptr + at)
    for first in range(at, end, TILE):
        offs = first + 1 + tl.arange(0, TILE)
        mask = offs <= end
        words = tl.load(ends_ptr + offs, mask=mask, other=0).to(tl.int32)
        # Lengths of a tile add up in 32 bits.
        tl.store(ends_ptr + offs, carry + tl.cumsum(words, 0), mask=mask)
        carry += tl.sum(words)
    tl.debug_barrier()
    offs_e = tl.arange(0, ENTRIES)
    first = tl.load(firsts_ptr + offs_e)
    last = tl.load(firsts_ptr + offs_e + 1, mask=offs_e < ENTRIES - 1, other=0)
    begin = tl.load(ends_ptr + first, mask=first <= end, other=0)
    words = tl.load(ends_ptr + last, mask=(first < last) & (last <= end), other=0)
    words = tl.where(words > 0, (words - begin + ALIGNED - 1) // ALIGNED * ALIGNED, 0)
    tl.store(lengths_ptr + offs_e, begin)
    tl.store(lengths_ptr + ENTRIES + offs_e, tl.cumsum(words, 0) - words)


@triton.jit(do_not_specialize=["first_block", "first_word", "span", "room"])
def _gather_kernel(
    base_ptr, columns_ptr, firsts_ptr, lengths_ptr, words_ptr, regions_ptr, notes_ptr, counts_ptr, ends_ptr,
    first_block, first_word, span, room,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
    REGION: tl.constexpr, NOTES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Put a block's words in their place, and its escapes behind them, as far as there is room."""
    number = first_block + tl.program_id(0).to(tl.int64)
    start, end = tl.load(ends_ptr + number), tl.load(ends_ptr + number + 1)
    if end == start:  # coded by others
        return
    row = row_of(firsts_ptr, number, ENTRIES)
    block = number - tl.load(firsts_ptr + row)
    region = number - first_block
    coded = tl.load(counts_ptr + region)
    n_notes = tl.load(counts_ptr + span + region)
    start += tl.load(lengths_ptr + ENTRIES + row) - tl.load(lengths_ptr + row) - first_word
    # A block has less than 2^16 words.
    left = tl.maximum(tl.minimum(room - start, 1 << 16), 0).to(tl.int32)
    words_ptr += start
    region_ptr = regions_ptr + (region + 1) * REGION - coded
    for at in range(0, coded, TILE):
        offs = at + tl.arange(0, TILE)
        mask = offs < tl.minimum(coded, left)
        tl.store(words_ptr + offs, tl.load(region_ptr + offs, mask=mask), mask=mask)

    words_ptr += coded
    notes_ptr += (region + 1) * NOTES - n_notes
    bits_ptr = weights_of(base_ptr, columns_ptr, row, ELEMENT, ENTRIES) + block * BLOCK
    offs_in_run = tl.arange(0, RUN)[None, :]
    done = 0
    for at in range(0, n_notes, 32):
        offs_n = at + tl.arange(0, 32)
        note = tl.load(notes_ptr + offs_n, mask=offs_n < n_notes, other=0)
        chosen = tl.reshape((note[:, None] >> offs_in_run) & 1, [32 * RUN])
        position = tl.reshape((note[:, None] >> 8) * RUN + offs_in_run, [32 * RUN])
        rank = done + tl.cumsum(chosen, 0) - chosen
        exponent = tl.load(bits_ptr + position, mask=chosen != 0, other=0) >> MANTISSA & ((1 << EXPONENT) - 1)
        has_room = (chosen != 0) & (coded + 2 * rank + 1 < left)
        tl.store(words_ptr + 2 * rank, position.to(tl.int16), mask=has_room)
        tl.store(words_ptr + 2 * rank + 1, exponent.to(tl.int16), mask=has_room)
        done += tl.sum(chosen)
