"""The kernel that codes blocks on a GPU, in Triton: a warp a block, a thread a lane, from its end on."""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.triton import device_table
from neuzip.kernels.rans.triton.batch import (
    INDEX,
    PLANE_WIDTHS,
    PLANES_AT,
    array_of,
    numel_of,
    weights_of,
    whole_of,
)
from neuzip.kernels.rans.triton.lists import row_of
from neuzip.kernels.rans.triton.warp import INTERPRETED, count_ones, rank_of, sum_of_warp

GROUP_AT, ADDENDS_AT = tl.constexpr(device_table.GROUP), tl.constexpr(device_table.ADDENDS)
TABLE, INDEX_AT = tl.constexpr(device_table.TABLE), tl.constexpr(INDEX)
PLANE_AT = tl.constexpr(PLANES_AT + PLANE_WIDTHS.index(8))


@triton.jit
def _load_run(words_ptr, BITS: tl.constexpr):
    """The 8 weights of every lane as 64-bit words; where they are fewer than 8 words, some come again."""
    if BITS == 8:
        a = tl.load(words_ptr)
        return a, a, a, a, a, a, a, a
    if BITS == 16:
        a, b = tl.split(tl.load(words_ptr[:, None] + tl.arange(0, 2)[None, :]))
        return a, b, a, b, a, b, a, b
    a, b = tl.load(words_ptr), tl.load(words_ptr + 1)
    c, d = tl.load(words_ptr + 2), tl.load(words_ptr + 3)
    if BITS == 32:
        return a, b, c, d, a, b, c, d
    e, f = tl.load(words_ptr + 4), tl.load(words_ptr + 5)
    g, h = tl.load(words_ptr + 6), tl.load(words_ptr + 7)
    return a, b, c, d, e, f, g, h


@triton.jit
def _exponent(
    a, b, c, d, e, f, g, h,
    N: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """The exponent of weight N of a run."""
    WORD: tl.constexpr = N * BITS // 64
    if WORD < 4:
        v = a if WORD == 0 else b if WORD == 1 else c if WORD == 2 else d
    else:
        v = e if WORD == 4 else f if WORD == 5 else g if WORD == 6 else h
    return (v >> (N * BITS % 64 + MANTISSA)).to(tl.int32) & ((1 << EXPONENT) - 1)


@triton.jit
def _key(
    a, b, c, d, N: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr
):  # fmt: skip
    """The exponents of weights 2 N and 2 N + 1 of a run: first | second << 8."""
    FIRST: tl.constexpr = (1 << EXPONENT) - 1
    if BITS == 8:
        return (a >> (16 * N + MANTISSA)).to(tl.int32) & (FIRST | FIRST << 8)
    elif BITS == 32:
        v = a if N == 0 else b if N == 1 else c if N == 2 else d
        return (v >> MANTISSA).to(tl.int32) & 0xFF | (v >> (24 + MANTISSA)).to(tl.int32) & 0xFF00
    else:
        v = a if N < 2 else b
        HALF: tl.constexpr = N % 2
        if INTERPRETED:
            w = (v >> (32 * HALF + MANTISSA)).to(tl.int32)
            return w & FIRST | (w >> 8) & (FIRST << 8)
        else:
            # Shifted so, the two exponents of a 32-bit word begin in its second and in its fourth byte.
            key = tl.inline_asm_elementwise(
                "{ .reg .b32 w, other; mov.b64 " + ("{other, w}" if HALF else "{w, other}") + ", $1; "
                + ("shl.b32 w, w, 1;" if MANTISSA == 7 else "shr.u32 w, w, 2;")
                + " prmt.b32 $0, w, 0, 0x4431; }",
                "=r,l", [v], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            return key & (FIRST | FIRST << 8)


@triton.jit
def _fields(a, b):
    """Sign and mantissa of the 8 bf16 weights of a run, a byte each."""
    if INTERPRETED:
        fields = tl.zeros(a.shape, tl.int64)
        for i in tl.static_range(8):
            v = (a if i < 4 else b) >> (i % 4 * 16)
            fields |= ((v >> 8) & 0x80 | v & 0x7F) << (8 * i)
        return fields
    # Lower and upper bytes of four weights; the mantissas of the former, the signs of the latter.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w0, w1, w2, w3, m, s;
        mov.b64 {w0, w1}, $1;
        mov.b64 {w2, w3}, $2;
        prmt.b32 m, w0, w1, 0x6420;
        prmt.b32 s, w0, w1, 0x7531;
        lop3.b32 w0, m, s, 0x7F7F7F7F, 0xE4;
        prmt.b32 m, w2, w3, 0x6420;
        prmt.b32 s, w2, w3, 0x7531;
        lop3.b32 w1, m, s, 0x7F7F7F7F, 0xE4;
        mov.b64 $0, {w0, w1};
        }""",
        "=l,l,l", [a, b], dtype=tl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _look_up(coding_ptr, key, ROW: tl.constexpr):
    """The two halves of the facts of the symbol that codes a key."""
    fact = tl.load(coding_ptr + (key + (key >> 8) * (ROW - 256)))
    return fact.to(tl.uint32), (fact >> 32).to(tl.uint32)


@triton.jit
def _step(x, p, region_ptr, lower, upper, ADDENDS: tl.constexpr):
    """Code a symbol of each lane; p is where the word written last stands."""
    full = x >= upper * 0xFFF00000  # the frequency << 20
    rank, all = rank_of(full)
    p -= all
    tl.store(region_ptr + (p + rank), x.to(tl.int16), mask=full)
    x = tl.where(full, x >> 16, x)
    dividend = x
    if ADDENDS:
        dividend += (upper >> 12) & 1
    quotient = tl.umulhi(dividend, lower) >> ((upper >> 15) & 15)
    return quotient * (upper & 0xFFF) + (x + (upper >> 19)), p


@triton.jit
def _escapes(upper, N: tl.constexpr, GROUP: tl.constexpr):
    """The escapes of symbol N of a run, a bit a weight."""
    return (upper >> 13 & (1 << GROUP) - 1) << N * GROUP


@triton.jit
def _code_run(
    x, p, q, escaped, run, valid, a, b, c, d, e, f, g, h, lane,
    coding_ptr, symbols_ptr, region_ptr, notes_ptr,
    LAST: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    GROUP: tl.constexpr, RAGGED: tl.constexpr, ADDENDS: tl.constexpr, LANES: tl.constexpr,
    RUN: tl.constexpr, LOWER: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Code the symbols of a run, the last first; of the last run, the last two are the initial state."""
    if GROUP == 2:
        k0 = _key(a, b, c, d, 0, BITS, EXPONENT, MANTISSA)
        k1 = _key(a, b, c, d, 1, BITS, EXPONENT, MANTISSA)
        k2 = _key(a, b, c, d, 2, BITS, EXPONENT, MANTISSA)
        k3 = _key(a, b, c, d, 3, BITS, EXPONENT, MANTISSA)
        l0, u0 = _look_up(coding_ptr, k0, ROW)
        l1, u1 = _look_up(coding_ptr, k1, ROW)
        l2, u2 = _look_up(coding_ptr, k2, ROW)
        l3, u3 = _look_up(coding_ptr, k3, ROW)
        if LAST:
            s = tl.load(symbols_ptr + k3).to(tl.uint32) & 0xFF
            x = LOWER | s << 8 | tl.load(symbols_ptr + k2).to(tl.uint32) & 0xFF
        else:
            x, p = _step(x, p, region_ptr, l3, u3, ADDENDS)
            x, p = _step(x, p, region_ptr, l2, u2, ADDENDS)
        x, p = _step(x, p, region_ptr, l1, u1, ADDENDS)
        x, p = _step(x, p, region_ptr, l0, u0, ADDENDS)
        mask = _escapes(u0, 0, 2) | _escapes(u1, 1, 2) | _escapes(u2, 2, 2) | _escapes(u3, 3, 2)
    else:
        e0 = _exponent(a, b, c, d, e, f, g, h, 0, BITS, EXPONENT, MANTISSA)
        e1 = _exponent(a, b, c, d, e, f, g, h, 1, BITS, EXPONENT, MANTISSA)
        e2 = _exponent(a, b, c, d, e, f, g, h, 2, BITS, EXPONENT, MANTISSA)
        e3 = _exponent(a, b, c, d, e, f, g, h, 3, BITS, EXPONENT, MANTISSA)
        e4 = _exponent(a, b, c, d, e, f, g, h, 4, BITS, EXPONENT, MANTISSA)
        e5 = _exponent(a, b, c, d, e, f, g, h, 5, BITS, EXPONENT, MANTISSA)
        e6 = _exponent(a, b, c, d, e, f, g, h, 6, BITS, EXPONENT, MANTISSA)
        e7 = _exponent(a, b, c, d, e, f, g, h, 7, BITS, EXPONENT, MANTISSA)
        l0, u0 = _look_up(coding_ptr, e0, ROW)
        l1, u1 = _look_up(coding_ptr, e1, ROW)
        l2, u2 = _look_up(coding_ptr, e2, ROW)
        l3, u3 = _look_up(coding_ptr, e3, ROW)
        l4, u4 = _look_up(coding_ptr, e4, ROW)
        l5, u5 = _look_up(coding_ptr, e5, ROW)
        l6, u6 = _look_up(coding_ptr, e6, ROW)
        l7, u7 = _look_up(coding_ptr, e7, ROW)
        if LAST:
            s = tl.load(symbols_ptr + e7).to(tl.uint32) & 0xFF
            x = LOWER | s << 8 | tl.load(symbols_ptr + e6).to(tl.uint32) & 0xFF
        else:
            x, p = _step(x, p, region_ptr, l7, u7, ADDENDS)
            x, p = _step(x, p, region_ptr, l6, u6, ADDENDS)
        x, p = _step(x, p, region_ptr, l5, u5, ADDENDS)
        x, p = _step(x, p, region_ptr, l4, u4, ADDENDS)
        x, p = _step(x, p, region_ptr, l3, u3, ADDENDS)
        x, p = _step(x, p, region_ptr, l2, u2, ADDENDS)
        x, p = _step(x, p, region_ptr, l1, u1, ADDENDS)
        x, p = _step(x, p, region_ptr, l0, u0, ADDENDS)
        mask = _escapes(u0, 0, 1) | _escapes(u1, 1, 1) | _escapes(u2, 2, 1) | _escapes(u3, 3, 1)
        mask |= _escapes(u4, 4, 1) | _escapes(u5, 5, 1) | _escapes(u6, 6, 1) | _escapes(u7, 7, 1)
    mask = mask.to(tl.int32)
    at = run * LANES + lane
    if RAGGED:  # what fills up the last run has no escapes
        mask &= (1 << tl.minimum(tl.maximum(valid - at * RUN, 0), RUN)) - 1
    rank, all = rank_of(mask != 0)
    q -= all
    tl.store(notes_ptr + (q + rank), at << 8 | mask, mask=mask != 0)
    return x, p, q, escaped + count_ones(mask)


@triton.jit(do_not_specialize=["first_program", "first_region", "span"])
def code_kernel(
    base_ptr, planes_ptr, columns_ptr, firsts_ptr, tails_ptr, tables_ptr, coding_ptr, symbols_ptr,
    regions_ptr, notes_ptr, counts_ptr, ends_ptr, index_ptr, first_program, first_region, span,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ADDENDS: tl.constexpr, PLANE: tl.constexpr, WARPS: tl.constexpr,
    REGION: tl.constexpr, NOTES: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    LOWER: tl.constexpr, HEADER: tl.constexpr, ROW: tl.constexpr, CODING: tl.constexpr, KEYS: tl.constexpr,
    STRIDE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Code a block a warp, to the end of its region: of the tensors whose tables have this GROUP, and addends
    only where ADDENDS.

    firsts: the first block of each tensor among those that are coded; behind these, the first of the programs
    for whole groups of blocks, and of those for tails. The programs begin with `first_program`, the regions
    with block `first_region`. counts: words without escapes, and notes, each [span]; ends: from 1 on the
    words of all blocks. RAGGED programs have one warp and code the tails, of which the last block may be
    shorter than others. With PLANE, weights are bf16, and signs and mantissas are written where the plane of
    8 bits is.
    """
    program = first_program + tl.program_id(0)
    starts_ptr = firsts_ptr + (2 if RAGGED else 1) * ENTRIES
    row = row_of(starts_ptr, program, ENTRIES)
    tables_ptr += row * TABLE
    if (tl.load(tables_ptr + GROUP_AT) == GROUP) & (tl.load(tables_ptr + ADDENDS_AT) <= ADDENDS):
        number = program - tl.load(starts_ptr + row)
        whole = whole_of(columns_ptr, row, ENTRIES)
        valid, runs = LANES * RUN * RUNS, RUNS
        if RAGGED:
            block = whole + number + tl.zeros([LANES], tl.int64)
            before = (whole + number) * (LANES * RUN * RUNS)
            valid = tl.minimum(numel_of(columns_ptr, row, ENTRIES) - before, valid).to(tl.int32)
            runs = (valid + LANES * RUN - 1) // (LANES * RUN)
            words_ptr = tails_ptr + row.to(tl.int64) * (STRIDE * BITS // 64)
            words_ptr += (block - whole) * (LANES * RUN * RUNS * BITS // 64)
        else:
            block = number * WARPS + tl.arange(0, WARPS * LANES) // LANES  # [WARPS * LANES]
            words_ptr = weights_of(base_ptr, columns_ptr, row, tl.int64, ENTRIES)
            words_ptr += block * (LANES * RUN * RUNS * BITS // 64)
        plane_ptr = words_ptr
        if PLANE:
            plane_ptr = array_of(planes_ptr, columns_ptr + PLANE_AT * ENTRIES, row, tl.int64)
            plane_ptr += block * (LANES * RUNS)
        region = tl.load(firsts_ptr + row) + block
        index = tl.load(columns_ptr + INDEX_AT * ENTRIES + row) + block
        _code_block(
            words_ptr, plane_ptr,
            coding_ptr + row.to(tl.int64) * CODING, symbols_ptr + row.to(tl.int64) * KEYS,
            regions_ptr + (region - first_region) * REGION, notes_ptr + (region - first_region) * NOTES,
            counts_ptr + (region - first_region), ends_ptr + region + 1, index_ptr + index,
            valid, runs, span,
            BITS, EXPONENT, MANTISSA, GROUP, RAGGED, ADDENDS, PLANE, WARPS, REGION, NOTES, LANES, RUN, LOWER,
            HEADER, ROW,
        )  # fmt: skip


@triton.jit
def _code_block(
    words_ptr, plane_ptr, coding_ptr, symbols_ptr, region_ptr, notes_ptr, counts_ptr, end_ptr, index_ptr,
    valid, runs, span,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, ADDENDS: tl.constexpr, PLANE: tl.constexpr, WARPS: tl.constexpr,
    REGION: tl.constexpr, NOTES: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, LOWER: tl.constexpr,
    HEADER: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Code the `runs` runs of a block, of `valid` weights, from the last on. Pointers are those of lanes."""
    STRIDE: tl.constexpr = LANES * RUN * BITS // 64  # of runs, in 64-bit words
    lane = tl.arange(0, WARPS * LANES) % LANES
    words_ptr += lane * (RUN * BITS // 64)
    plane_ptr += lane
    x = tl.full([WARPS * LANES], LOWER, tl.uint32)
    p = tl.full([WARPS * LANES], REGION, tl.int32)
    q = tl.full([WARPS * LANES], NOTES, tl.int32)
    escaped = tl.zeros([WARPS * LANES], tl.int32)
    a, b, c, d, e, f, g, h = _load_run(words_ptr + (runs - 1) * STRIDE, BITS)
    if PLANE:
        tl.store(plane_ptr + (runs - 1) * LANES, _fields(a, b))
    x, p, q, escaped = _code_run(
        x, p, q, escaped, runs - 1, valid, a, b, c, d, e, f, g, h, lane, coding_ptr, symbols_ptr, region_ptr,
        notes_ptr, True, BITS, EXPONENT, MANTISSA, GROUP, RAGGED, ADDENDS, LANES, RUN, LOWER, ROW,
    )  # fmt: skip
    # A run is loaded while the one after it is coded.
    a, b, c, d, e, f, g, h = _load_run(words_ptr + tl.maximum(runs - 2, 0) * STRIDE, BITS)
    for i in range(1, runs):
        run = runs - 1 - i
        na, nb, nc, nd, ne, nf, ng, nh = _load_run(words_ptr + tl.maximum(run - 1, 0) * STRIDE, BITS)
        if PLANE:
            tl.store(plane_ptr + run * LANES, _fields(a, b))
        x, p, q, escaped = _code_run(
            x, p, q, escaped, run, valid, a, b, c, d, e, f, g, h, lane, coding_ptr, symbols_ptr, region_ptr,
            notes_ptr, False, BITS, EXPONENT, MANTISSA, GROUP, RAGGED, ADDENDS, LANES, RUN, LOWER, ROW,
        )  # fmt: skip
        a, b, c, d, e, f, g, h = na, nb, nc, nd, ne, nf, ng, nh

    escaped = sum_of_warp(escaped)
    p -= HEADER
    head_ptr = region_ptr + p
    tl.store(head_ptr, escaped.to(tl.int16), mask=lane == 0)
    tl.store(head_ptr + 1 + lane, x.to(tl.int16))
    tl.store(head_ptr + 1 + LANES + lane, (x >> 16).to(tl.int16))
    coded = REGION - p
    tl.store(counts_ptr, coded, mask=lane == 0)
    tl.store(counts_ptr + span, NOTES - q, mask=lane == 0)
    words = coded + 2 * escaped
    tl.store(end_ptr, words.to(tl.int64), mask=lane == 0)
    tl.store(index_ptr, words.to(tl.int16), mask=lane == 0)
