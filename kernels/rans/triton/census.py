"""Exponents and pairs of exponents counted on a GPU, in Triton, in shared memory that PTX declares.

counters   int64 [tensors, COUNTERS + 2]: pairs of exponents in a window, [second, first]; a pair of 0 and
           one of the window, of one and 0, of 0 and 0; then the lowest mantissa bits of all weights
           united, and the exponent that the window begins with. Single exponents of formats with more
           than 8 bits.
elsewhere  int64 [tensors, 256, 256]: all other pairs, [second, first]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.memory_part import MemoryPart, allocate
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.triton.batch import (
    CENSUS_AT,
    ELEMENTS,
    Batch,
    CensusShares,
    numel_of,
    weights_of,
)
from neuzip.kernels.rans.triton.lists import ENTRIES, row_of
from neuzip.kernels.rans.triton.warp import INTERPRETED

WINDOW = 64
"""Exponents whose pairs are counted in shared memory, and 0 besides: 64 * 64 + 2 * 64 + 1 counters."""

COUNTERS = 5120
"""The counters, rounded up so that any number of threads clears them in whole turns: 20 KB."""

BELOW_MEAN = 40
"""The window begins this far below the mean exponent of a sample: small weights lie further from it."""

_ITEMS = 16
"""Items that a thread counts at a time."""


class Counted(NamedTuple):
    """The counters of a batch, and those of pairs elsewhere. `ends`, int64, are zeros for what codes it."""

    counters: MemoryPart
    elsewhere: MemoryPart
    ends: MemoryPart


def shares(fmt: FloatFormat, threads: int, programs: int) -> CensusShares:
    """How the census of weights is shared by about so many programs of so many threads."""
    return CensusShares(1 if fmt.exponent_bits > 8 else 2, _ITEMS * threads, programs)


def count(batch: Batch, threads: int) -> Counted:
    """Count a batch, whose sizes have shares of the census for programs of so many threads."""
    fmt, n = batch.fmt, len(batch.bits)
    blocks = batch.sizes.shares.blocks
    lengths = n * (COUNTERS + 2), n << 16 if fmt.exponent_bits == 8 else 0, blocks + 1
    counted = Counted(*allocate(batch.device, *[(torch.int64, length) for length in lengths], zero=True))
    launch(
        _census_kernel, (batch.sizes.programs,),
        batch.base, batch.columns, counted.counters, counted.elsewhere,
        BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, COUNTERS=COUNTERS,
        WINDOW=WINDOW, BELOW_MEAN=BELOW_MEAN, SAMPLE=1024, THREADS=threads, TILE=_ITEMS * threads,
        ITEM=ELEMENTS[fmt.bits if fmt.exponent_bits > 8 else 2 * fmt.bits], ENTRIES=ENTRIES,
        STARTS_AT=CENSUS_AT, num_warps=threads // 32, device=batch.device,
    )  # fmt: skip
    return counted


@triton.jit
def slot_of(e0, e1, base, WINDOW: tl.constexpr):
    """The counter of a pair, or -1: both in the window, or the first 0, or the second, or both."""
    s0, s1 = e0 - base, e1 - base
    in0, in1 = (s0 >= 0) & (s0 < WINDOW), (s1 >= 0) & (s1 < WINDOW)
    slot = tl.where((e0 == 0) & (e1 == 0), WINDOW * (WINDOW + 2), -1)
    slot = tl.where((e0 == 0) & in1, WINDOW * WINDOW + s1, slot)
    slot = tl.where((e1 == 0) & in0, WINDOW * (WINDOW + 1) + s0, slot)
    return tl.where(in0 & in1, s0 | s1 * WINDOW, slot)


@triton.jit
def _count_items(
    item, which, base, shared, counters_ptr, elsewhere_ptr,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Count the pairs that are items, or the exponents of single weights."""
    LARGEST: tl.constexpr = (1 << EXPONENT) - 1
    e0 = (item >> MANTISSA).to(tl.int32) & LARGEST
    if EXPONENT == 8 and not INTERPRETED:
        pair = e0 | (item >> (BITS + MANTISSA - 16)).to(tl.int32) & (LARGEST << 16)
        _count_pair(pair, which, base, shared, elsewhere_ptr.to(tl.int64))
    else:
        slot = e0
        if EXPONENT <= 8:
            e1 = (item >> (BITS + MANTISSA)).to(tl.int32) & LARGEST
            slot = e0 | e1 * WINDOW
            if EXPONENT == 8:
                slot = slot_of(e0, e1, base, WINDOW)
                tl.atomic_add(elsewhere_ptr + (e0 | e1 << 8), 1, mask=which & (slot < 0))
        if INTERPRETED:
            tl.atomic_add(counters_ptr + slot, 1, mask=which & (slot >= 0))
        else:
            _count(shared + 4 * slot, which)


@triton.jit
def _census_kernel(
    base_ptr, columns_ptr, counters_ptr, elsewhere_ptr,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, COUNTERS: tl.constexpr,
    WINDOW: tl.constexpr, BELOW_MEAN: tl.constexpr, SAMPLE: tl.constexpr, THREADS: tl.constexpr,
    TILE: tl.constexpr, ITEM: tl.constexpr, ENTRIES: tl.constexpr, STARTS_AT: tl.constexpr,
):  # fmt: skip
    """Add to the counters of a tensor; after them, unite the mantissas' lowest bits, and say where the window
    begins."""
    LARGEST: tl.constexpr = (1 << EXPONENT) - 1
    starts_ptr = columns_ptr + STARTS_AT * ENTRIES
    row = row_of(starts_ptr, tl.program_id(0), ENTRIES)
    first = tl.load(starts_ptr + row)
    pid, programs = tl.program_id(0) - first, tl.load(starts_ptr + row + 1) - first
    items_ptr = weights_of(base_ptr, columns_ptr, row, ITEM, ENTRIES)
    n = numel_of(columns_ptr, row, ENTRIES)
    if EXPONENT <= 8:
        n //= 2
    counters_ptr += row * (COUNTERS + 2)
    elsewhere_ptr += row * (1 << 16)
    base = 0
    if EXPONENT == 8:
        # All programs look at the same weights, and so agree on a window.
        offs_s = tl.arange(0, SAMPLE).to(tl.int64) * tl.maximum(n // SAMPLE, 1)
        sample = tl.load(items_ptr + offs_s, mask=offs_s < n, other=0)
        sample = (sample >> MANTISSA).to(tl.int32) & LARGEST
        base = tl.sum(sample) // tl.maximum(tl.sum((sample != 0).to(tl.int32)), 1) - BELOW_MEAN
    shared = 0
    if not INTERPRETED:
        shared = _counters()
        for i in tl.static_range(0, COUNTERS, THREADS):
            _clear_counter(shared + 4 * (i + tl.arange(0, THREADS)))
        tl.debug_barrier()

    union = tl.zeros([TILE], items_ptr.dtype.element_ty)
    whole = n // TILE * TILE
    for at in range(pid * TILE, whole, programs * TILE):
        item = tl.load(items_ptr + at + tl.arange(0, TILE))
        union |= item
        all_of_them = tl.full([TILE], True, tl.int1)
        _count_items(
            item, all_of_them, base, shared, counters_ptr, elsewhere_ptr, BITS, EXPONENT, MANTISSA, WINDOW
        )
    if whole + pid * TILE < n:
        offs = whole + tl.arange(0, TILE)
        item = tl.load(items_ptr + offs, mask=offs < n, other=0)
        union |= item
        _count_items(
            item, offs < n, base, shared, counters_ptr, elsewhere_ptr, BITS, EXPONENT, MANTISSA, WINDOW
        )

    if not INTERPRETED:
        tl.debug_barrier()
        for i in tl.static_range(0, COUNTERS, THREADS):
            offs_c = i + tl.arange(0, THREADS)
            count = _read_counter(shared + 4 * offs_c)
            tl.atomic_add(counters_ptr + offs_c, count.to(tl.int64), mask=count != 0, sem="relaxed")
    union = union.to(tl.int64)
    if EXPONENT <= 8:
        union |= union >> BITS
    union &= (1 << MANTISSA) - 1
    lowest = tl.min(tl.where(union != 0, union & -union, 1 << 62))
    tl.atomic_or(counters_ptr + COUNTERS, tl.where(lowest < 1 << 62, lowest, 0), sem="relaxed")
    if pid == 0:
        tl.store(counters_ptr + COUNTERS + 1, base)


@triton.jit
def _counters():
    """The address of 5,120 counters in the program's shared memory. To be called once in a kernel."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 counters[20480]; mov.u32 $0, counters; }",
        "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _clear_counter(address):
    tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.u32 z, 0; st.shared.u32 [$1], z; mov.u32 $0, z; }",
        "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _read_counter(address):
    return tl.inline_asm_elementwise(
        "ld.shared.u32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _count(address, which):
    """Add 1 to counters in shared memory."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,r,r", [address, which.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _count_pair(pair, which, base, counters, elsewhere):
    """Count pairs e0 | e1 << 16 of 8-bit exponents where `slot_of` says, at once if both are in the window.

    counters, elsewhere: addresses in shared and in device memory.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred p, z0, z1, w0, w1, q;
        .reg .b32 d, i, e0, e1, s0, s1;
        .reg .b64 a, one;
        mov.u32 $0, 0;
        setp.ne.u32 p, $2, 0;
        @!p bra DONE;
        mul.lo.u32 i, $3, 0x10001;
        sub.u32 d, $1, i;
        and.b32 i, d, 0xFFC0FFC0;
        setp.ne.u32 p, i, 0;
        @p bra UNUSUAL;
        shr.u32 i, d, 10;
        and.b32 d, d, 63;
        or.b32 i, i, d;
        mad.lo.u32 i, i, 4, $4;
        red.shared.add.u32 [i], 1;
        bra DONE;
        UNUSUAL:
        and.b32 e0, $1, 0xFF;
        shr.u32 e1, $1, 16;
        setp.eq.u32 z0, e0, 0;
        setp.eq.u32 z1, e1, 0;
        sub.u32 s0, e0, $3;
        sub.u32 s1, e1, $3;
        setp.lt.u32 w0, s0, 64;
        setp.lt.u32 w1, s1, 64;
        mov.u32 i, 0;
        and.pred q, z0, w1;
        @q add.u32 i, s1, 4096;
        and.pred q, z1, w0;
        @q add.u32 i, s0, 4160;
        and.pred q, z0, z1;
        @q mov.u32 i, 4224;
        setp.ne.u32 q, i, 0;
        mad.lo.u32 i, i, 4, $4;
        @q red.shared.add.u32 [i], 1;
        @q bra DONE;
        mad.lo.u32 e0, e1, 256, e0;
        mov.u64 one, 1;
        mad.wide.u32 a, e0, 8, $5;
        red.relaxed.gpu.global.add.u64 [a], one;
        DONE:
        }""",
        "=r,r,r,r,r,l", [pair, which.to(tl.int32), base, counters, elsewhere],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
