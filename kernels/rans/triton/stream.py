"""How full blocks of bf16 are decoded of which nothing was dropped: all comes by way of shared memory.

Loads of a warp to registers are waited for together, those of a moment ago with those of long ago; a
program that decodes cannot prefetch far ahead with them. Copies to shared memory end in the order they were
begun in, and are waited for in groups: a run of all lanes waits for what was prefetched three runs ago.

    table     4,096 slots of 32 bits, for all warps of the program: 16 KB
    a warp    a ring of 1,024 words, in four pieces, 2 KB; the planes of four runs, 256 bytes each

A piece is copied when the one whose place it takes has been read. A run takes 128 words at most, so that
the words of a piece are needed five runs later at the earliest; they are waited for after three.

The interpreter has no shared memory: it reads words and planes where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.numbers import LANES, RUN, RUNS
from neuzip.kernels.rans.triton.ring import (
    RING_BYTES,
    copy_words,
    end_group,
    fill_ring,
    joined,
    next_entry,
    own_memory,
    wait,
    wait_all,
)

WARPS = 8
"""Warps of a program. Five programs of 40 KB share a multiprocessor."""

REGISTERS = 48
"""Registers of a thread, at most, so that five programs fit."""

AHEAD = 3
"""Runs that planes are prefetched ahead, and that a group has to end."""

WARP_BYTES = tl.constexpr(RING_BYTES + (AHEAD + 1) * LANES * RUN)
"""Bytes of shared memory of a warp."""

_RUNS, _LANES, _RUN_WORDS = tl.constexpr(RUNS), tl.constexpr(LANES), tl.constexpr(LANES * RUN * 2 // 8)
_AHEAD, _RING_BYTES = tl.constexpr(AHEAD), tl.constexpr(RING_BYTES)
_PLANES_OF_RUN = tl.constexpr(LANES * RUN)
_RUN_BYTES = tl.constexpr(2 * LANES * RUN)


@triton.jit
def runs(
    x, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared,
    vector, at, runs_of_row,
    MULTIPLY: tl.constexpr, IN_A_ROW: tl.constexpr, M: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode all runs of full blocks, one a warp, and store them or MULTIPLY: states in the end, words taken.

    words: uint16 pointers, of a block whose tensor's words begin at a multiple of 16 bytes; p of them were
    taken, and none is read from `limit` on. planes8, target: where a lane's first run is, 8 bytes and 16.
    lowest: how two weights hold the first exponent of the palette; IN_A_ROW says that the others follow it.

    With MULTIPLY a row of a matrix is `runs_of_row` runs, and is multiplied with a vector: addresses of a
    lane's part of its first run, bf16. The first run of the block is the run `at` of its row. `target` are
    addresses of that row's sum: the second of two numbers, fp32, if the row began in the block before, and
    else the first. The numbers of the rows after it follow.
    """
    total = tl.zeros([L], tl.float32)
    # Words count from a multiple of 16 bytes on, as pieces begin there.
    skipped = (words.to(tl.int64) & 15).to(tl.int32) >> 1
    words -= skipped
    p += skipped
    end = tl.where(limit > 0, limit + skipped, 0)  # 0: no words, wherever they should be
    own = own_memory(shared, WARP_BYTES, L)
    piece = fill_ring(p, end, words, own, lane, COMPILED)
    for run in tl.static_range(_AHEAD):
        _copy_planes(planes8, run, own, lane, COMPILED)
        end_group(own, COMPILED)
    for run in range(_RUNS - 1):
        wait(own, _AHEAD, COMPILED)
        if run < _RUNS - _AHEAD:
            _copy_planes(planes8, run + _AHEAD, own, lane, COMPILED)
        piece = copy_words(p, piece, end, words, own, lane, COMPILED)
        end_group(own, COMPILED)
        v0, v1, v2, v3 = _load_vector(vector, at, MULTIPLY, COMPILED)
        x, p, e0 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
        x, p, e1 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
        x, p, e2 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
        x, p, e3 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
        m0, m1, m2, m3 = _weights(run, e0, e1, e2, e3, planes8, own, lane, COMPILED)
        if MULTIPLY:
            total = _add_products(total, m0, m1, m2, m3, v0, v1, v2, v3)
            total, target, at = _end_run(total, target, at, runs_of_row, lane, False, L, COMPILED)
        else:
            _store(target, run, m0, m1, m2, m3)
    wait(own, _AHEAD, COMPILED)
    v0, v1, v2, v3 = _load_vector(vector, at, MULTIPLY, COMPILED)
    x, p, e0 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
    x, p, e1 = _step(x, p, words, end, tables, exponents, lowest, own, shared, IN_A_ROW, M, L, COMPILED)
    e2 = _exponents_of((x & 15) | ((x & 0xF0) << 12), exponents, lowest, IN_A_ROW, M, COMPILED)
    e3 = _exponents_of(((x >> 8) & 15) | ((x & 0xF000) << 4), exponents, lowest, IN_A_ROW, M, COMPILED)
    m0, m1, m2, m3 = _weights(_RUNS - 1, e0, e1, e2, e3, planes8, own, lane, COMPILED)
    if MULTIPLY:
        total = _add_products(total, m0, m1, m2, m3, v0, v1, v2, v3)
        total, target, at = _end_run(total, target, at, runs_of_row, lane, True, L, COMPILED)
    else:
        _store(target, _RUNS - 1, m0, m1, m2, m3)
    wait_all(own, COMPILED)
    return x, p - skipped


@triton.jit
def _copy_planes(planes8, run, own, lane, COMPILED: tl.constexpr):
    """Begin to copy a lane's 8 bytes of a run."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "cp.async.ca.shared.global [$1], [$2], 8; mov.b32 $0, 0;", "=r,r,l",
            [_place_of(run, own, lane), (planes8 + run * _LANES).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _place_of(run, own, lane):
    """Where the planes of a lane's run are in shared memory."""
    return own + _RING_BYTES + run % (_AHEAD + 1) * _PLANES_OF_RUN + lane * 8


@triton.jit
def _step(
    x, p, words, end, tables, exponents, lowest, own, shared,
    IN_A_ROW: tl.constexpr, M: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a symbol of every lane: its exponents. `p` counts the words taken so far."""
    x, p, entry = next_entry(x, p, words, end, tables, own, shared, 4, False, L, COMPILED)
    return x, p, _exponents_of(entry, exponents, lowest, IN_A_ROW, M, COMPILED)


@triton.jit
def _exponents_of(entry, exponents, lowest, IN_A_ROW: tl.constexpr, M: tl.constexpr, COMPILED: tl.constexpr):
    """Exponents of two weights in a word, whose places in a palette are bits 0 to 3 and 16 to 19."""
    if not IN_A_ROW:
        pair = tl.load(exponents + ((entry & 15) | ((entry >> 12) & 0xF0))).to(tl.uint32, bitcast=True)
    elif COMPILED:  # where the compiler would make three instructions of it
        pair = tl.inline_asm_elementwise(
            f"{{ .reg .b32 both; and.b32 both, $1, 0x000F000F; mad.lo.u32 $0, both, {1 << M}, $2; }}",
            "=r,r,r", [entry, lowest], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pair = lowest + ((entry & 0x000F000F) << M)
    return pair


@triton.jit
def _weights(run, e0, e1, e2, e3, planes8, own, lane, COMPILED: tl.constexpr):
    """The exponents of a lane's 8 weights, merged with what else they have: two weights a word."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [_place_of(run, own, lane)],
            dtype=(tl.uint32, tl.uint32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        both = tl.load(planes8 + run * _LANES)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    return (
        _merged(e0, low, 0, COMPILED), _merged(e1, low, 1, COMPILED), _merged(e2, high, 0, COMPILED),
        _merged(e3, high, 1, COMPILED),
    )  # fmt: skip


@triton.jit
def _store(target, run, m0, m1, m2, m3):
    """Store a lane's 8 weights of a run."""
    tl.store(target + run * _RUN_WORDS, tl.join(joined(m0, m1), joined(m2, m3)))


@triton.jit
def _load_vector(vector, at, MULTIPLY: tl.constexpr, COMPILED: tl.constexpr):
    """The 8 numbers that a lane's weights of run `at` of a row are multiplied with: two a word."""
    none = at.to(tl.uint32)
    v0, v1, v2, v3 = none, none, none, none
    if MULTIPLY:
        address = vector + at * _RUN_BYTES
        if COMPILED:
            v0, v1, v2, v3 = tl.inline_asm_elementwise(
                "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address],
                dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            pointers = address.to(tl.pointer_type(tl.uint32))
            v0, v1 = tl.load(pointers), tl.load(pointers + 1)
            v2, v3 = tl.load(pointers + 2), tl.load(pointers + 3)
    return v0, v1, v2, v3


@triton.jit
def _add_products(total, m0, m1, m2, m3, v0, v1, v2, v3):
    """A lane's sum with the products of 8 weights."""
    total = _add_two(total, m0, v0)
    total = _add_two(total, m1, v1)
    total = _add_two(total, m2, v2)
    return _add_two(total, m3, v3)


@triton.jit
def _add_two(total, m, v):
    """total + the products of the two bf16 numbers in each of two words."""
    total += (m << 16).to(tl.float32, bitcast=True) * (v << 16).to(tl.float32, bitcast=True)
    high: tl.constexpr = 0xFFFF0000
    return total + (m & high).to(tl.float32, bitcast=True) * (v & high).to(tl.float32, bitcast=True)


@triton.jit
def _end_run(
    total, target, at, runs_of_row, lane, LAST: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Where a row ends, or the LAST run of the block, the warp's sum goes to `target`: what is next."""
    at += 1
    is_end = at == runs_of_row
    writes = (at > 0) if LAST else is_end
    if COMPILED:
        total = tl.inline_asm_elementwise(
            _ending(), "=f,f,r,l,r", [total, writes.to(tl.int32), target, lane],
            dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        lanes = tl.reshape(total, [L // _LANES, _LANES])
        of_warp = tl.reshape(tl.broadcast_to(tl.sum(lanes, 1)[:, None], [L // _LANES, _LANES]), [L])
        tl.store(target.to(tl.pointer_type(tl.float32)), of_warp, mask=writes & (lane == 0))
        total = tl.where(writes, 0.0, total)
    return total, tl.where(writes, (target & -8) + 8, target), tl.where(is_end, 0, at)


@triton.constexpr_function
def _ending():
    shuffles = " ".join(
        f"shfl.sync.bfly.b32 other, sum, {distance}, 0x1f, 0xffffffff; add.f32 sum, sum, other;"
        for distance in (16, 8, 4, 2, 1)
    )
    return f"""{{
        .reg .pred ends, first;
        .reg .f32 sum, other;
        mov.f32 sum, $1;
        setp.ne.s32 ends, $2, 0;
        @!ends bra DONE;
        {shuffles}
        setp.eq.s32 first, $4, 0;
        @first st.global.f32 [$3], sum;
        mov.f32 sum, 0f00000000;
        DONE:
        mov.f32 $0, sum;
        }}"""


@triton.jit
def _merged(e, fields, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Two weights in a word: their exponents, and two bytes of the fields, sign and mantissa each."""
    if COMPILED:
        twice = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3322;" if HALF else "prmt.b32 $0, $1, 0, 0x1100;", "=r,r", [fields],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        two = fields >> (16 * HALF)
        twice = (two & 0xFF) * 0x101 | ((two >> 8) & 0xFF) * 0x1010000
    return e | (twice & 0x807F807F)
