"""The kernels of the decoder on a GPU, in Triton: states, words and escapes of a block a warp.

L is the number of threads of a program. All states are uint32; GROUP, E, M and KEPT are those of SPEC.md.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.rans.coded import (
    COLUMNS,
    COUNTS,
    FIRST,
    LAST,
    NORMALISER,
    NUMEL,
    OUT,
    PLANES,
    ROW,
    STARTS,
    TABLES,
    TENSOR,
    WORDS_END,
)
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN, RUNS, SCALE, SCALE_BITS
from neuzip.kernels.rans.triton import stream as triton_stream
from neuzip.kernels.rans.triton.decode_codes import decode_codes
from neuzip.kernels.rans.triton.decode_planes import (
    assemble,
    load_run,
    merge,
    one_field,
    store_ragged,
    store_run,
    times,
)
from neuzip.kernels.rans.triton.ring import to_shared
from neuzip.kernels.rans.triton.states import begin_blocks, load_escapes, refill

_LANES, _RUN, _RUNS, _BLOCK = (tl.constexpr(v) for v in (LANES, RUN, RUNS, BLOCK))
_SLOTS, _SCALE_BITS = tl.constexpr(SCALE - 1), tl.constexpr(SCALE_BITS)
_C_OUT, _C_WORDS_END, _C_NUMEL, _C_NORMALISER, _C_TENSOR, _C_PLANES = (
    tl.constexpr(v) for v in (OUT, WORDS_END, NUMEL, NORMALISER, TENSOR, PLANES)
)
_COLUMNS = tl.constexpr(COLUMNS)
_C_ROW, _C_STARTS, _C_COUNTS, _C_TABLES, _C_FIRST, _C_LAST = (
    tl.constexpr(v) for v in (ROW, STARTS, COUNTS, TABLES, FIRST, LAST)
)

# How far ahead of the next word 64 words are touched in every run. A run of Gaussian bf16 takes 41.
_TOUCHED_AHEAD = tl.constexpr(64)


@triton.jit
def _step(
    x, p, words, limit, tables, exponents, SPLIT: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Decode a symbol of every lane: its exponents. `p` counts the words of the block taken so far."""
    entry = tl.load(tables + (x & _SLOTS)).to(tl.uint32, bitcast=True)
    x = ((entry >> (4 if SPLIT else 8)) & 0xFFF) * (x >> _SCALE_BITS) + (entry >> 20)
    x, p = refill(x, p, words, limit, L, COMPILED)
    symbol = (entry & 15) | ((entry >> 12) & 0xF0) if SPLIT else entry & 0xFF
    return x, p, _exponents(symbol, exponents)


@triton.jit
def _exponents(symbol, exponents):
    return tl.load(exponents + symbol).to(tl.uint32, bitcast=True)


@triton.jit
def _run(
    x, p, words, limit, tables, exponents,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr, L: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a run: the exponents of four pairs of weights. The last two symbols lie in the state."""
    if GROUP == 2:
        x, p, e0 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, e1 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        if LAST:
            e2 = _exponents(x & 0xFF, exponents)
            e3 = _exponents((x >> 8) & 0xFF, exponents)
        else:
            x, p, e2 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
            x, p, e3 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
    else:
        x, p, a0 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, a1 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, a2 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, a3 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, a4 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        x, p, a5 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        if LAST:
            a6 = _exponents(x & 0xFF, exponents)
            a7 = _exponents((x >> 8) & 0xFF, exponents)
        else:
            x, p, a6 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
            x, p, a7 = _step(x, p, words, limit, tables, exponents, SPLIT, L, COMPILED)
        e0, e1, e2, e3 = a0 | a1 << STRIDE, a2 | a3 << STRIDE, a4 | a5 << STRIDE, a6 | a7 << STRIDE
    return x, p, e0, e1, e2, e3


@triton.jit
def decode_blocks(
    inp, out, starts, counts, descriptors, programs, tables, exponents, errors,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of one tensor of a launch: full ones, or, RAGGED, its last."""
    programs += 3 * tl.program_id(0)
    row, first, first_number = tl.load(programs), tl.load(programs + 1), tl.load(programs + 2)
    own, before = descriptors + row * _COLUMNS, first_number - first
    last = tl.load(own + _C_NUMEL) // _BLOCK - 1
    _decode(
        inp, out, starts + before, counts + before, own, tables + row * (_SLOTS + 1), exponents + row * 256,
        errors, first, last, L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, GRID, COMPILED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def decode_parts_kernel(
    r0, r1, r2, r3, r4, r5, r6, r7, o0, o1, o2, o3, o4, o5, o6, o7, p1, p2, p3, p4, p5, p6, p7,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of one of up to 8 parts that lie anywhere: rows, outputs, first programs.

    The first program of the first part is 0.
    """
    program = tl.program_id(0)
    own, out, before = r0, o0, program * 0
    own, out, before = _from(program, p1, r1, o1, own, out, before)
    own, out, before = _from(program, p2, r2, o2, own, out, before)
    own, out, before = _from(program, p3, r3, o3, own, out, before)
    own, out, before = _from(program, p4, r4, o4, own, out, before)
    own, out, before = _from(program, p5, r5, o5, own, out, before)
    own, out, before = _from(program, p6, r6, o6, own, out, before)
    own, out, before = _from(program, p7, r7, o7, own, out, before)
    first = (program - before) * (L // _LANES)
    _decode_part(
        own, out, first, L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, GRID, COMPILED
    )


@triton.jit(do_not_specialize=["first", "length"])
def decode_chosen_kernel(
    base, rows, places, programs, chosen, out, first, length, items, parts, per_slot, slot_bytes,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of a part of the item that a slot of `out` holds: `chosen[first + slot]`.

    rows      int64 [items, parts, 2]: the descriptor, in bytes from `base` on, and the bytes that are decoded
              before the part's own; 0 for what another launch decodes
    places    int64 [parts]: where a part begins in a slot
    programs  int32 [per_slot, 2]: the part of a slot's program, and its number among those of the part

    Programs of slots without an item, and of those from `length` on, end at once.
    """
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slot = tl.program_id(0) // per_slot
    programs += 2 * (tl.program_id(0) - slot * per_slot)
    part, number = tl.load(programs), tl.load(programs + 1)
    item = tl.load(chosen + first + slot, mask=first + slot < length, other=-1)
    is_item = (item >= 0) & (item < items)
    rows += 2 * (item.to(tl.int64) * parts + part)
    row = tl.load(rows, mask=is_item, other=0)
    if row != 0:
        own = (base + tl.multiple_of(row, 16)).to(tl.pointer_type(tl.int64))
        at = slot.to(tl.int64) * slot_bytes + tl.load(places + part) - tl.load(rows + 1)
        block = number * (L // _LANES)
        if RAGGED or block <= tl.load(own + _C_LAST) - tl.load(own + _C_FIRST):
            _decode_part(
                own, out + tl.multiple_of(at, 16), block,
                L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, GRID, COMPILED,
            )  # fmt: skip


@triton.jit
def _decode_part(
    own, out, begin, L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr,
    SPLIT: tl.constexpr, STREAM: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of a part, from its block `begin` on, to `out`, where its first one begins."""
    inp = own.to(tl.pointer_type(tl.uint8)) - tl.multiple_of(tl.load(own + _C_ROW), 16)
    starts = (inp + tl.load(own + _C_STARTS)).to(tl.pointer_type(tl.int64))
    counts = (inp + tl.load(own + _C_COUNTS)).to(tl.pointer_type(tl.int32))
    tables = (inp + tl.load(own + _C_TABLES)).to(tl.pointer_type(tl.int32))
    last = tl.load(own + _C_LAST)
    first = tl.load(own + _C_NUMEL) // _BLOCK if RAGGED else tl.load(own + _C_FIRST)
    _decode(
        inp, out, starts, counts, own, tables, tables + (_SLOTS + 1), inp.to(tl.pointer_type(tl.int32)),
        first + begin, last, L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, GRID, COMPILED,
    )  # fmt: skip


@triton.jit
def _from(program, first, row, output, own, out, before):
    """A part and its first program, where it begins with that or an earlier one; else what was before."""
    begun = program >= first
    return tl.where(begun, row, own), tl.where(begun, output, out), tl.where(begun, first, before)


@triton.jit
def _decode(
    inp, out, starts, counts, own, tables, exponents, errors, first, last,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of a tensor from the `first` on, none beyond the `last` full one."""
    if GRID:
        decode_codes(
            inp, out, starts, counts, own, tables, exponents, errors, first, last,
            L, RAGGED, GROUP, BITS, M, KEPT, GRID, ELEMENT, STREAM, COMPILED,
        )  # fmt: skip
    else:
        _decode_floats(
            inp, out, starts, counts, own, tables, exponents, errors, first, last,
            L, RAGGED, GROUP, BITS, E, M, KEPT, NORM, ELEMENT, SPLIT, STREAM, COMPILED,
        )  # fmt: skip


@triton.jit
def _decode_floats(
    inp, out, starts, counts, own, tables, exponents, errors, first, last,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr, ELEMENT: tl.constexpr, SPLIT: tl.constexpr,
    STREAM: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode blocks of floats: see `_decode`."""
    W: tl.constexpr = KEPT + 1
    N: tl.constexpr = BITS // 8
    STRIDE: tl.constexpr = BITS if BITS <= 16 else BITS // 4
    numel = tl.load(own + _C_NUMEL)
    lane = tl.arange(0, L) % _LANES
    block = first.to(tl.int64) + tl.arange(0, L) // _LANES
    if not RAGGED:
        # Where blocks are left over, the last is decoded by several warps: all write the same.
        block = tl.minimum(block, last)
    words, whole, escapes, limit, x, p = begin_blocks(inp, starts, counts, own, block, lane, L)
    if L == _LANES:
        # A line of the table each, and three more: the look-ups of the first runs find them in the cache.
        line = tables + tl.arange(0, L) * 128
        warm = tl.load(line) | tl.load(line + 32) | tl.load(line + 64) | tl.load(line + 96)

    run = block * (_BLOCK // _RUN) + lane
    planes32 = (inp + tl.multiple_of(tl.load(own + _C_PLANES), 16)).to(tl.pointer_type(tl.uint64)) + 4 * run
    planes16 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 1), 16)).to(
        tl.pointer_type(tl.uint64)
    ) + 2 * run
    planes8 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 2), 16)).to(tl.pointer_type(tl.uint64)) + run
    planes4 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 3), 16)).to(tl.pointer_type(tl.uint32)) + run
    planes2 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 4), 16)).to(tl.pointer_type(tl.uint16)) + run
    planes1 = (inp + tl.multiple_of(tl.load(own + _C_PLANES + 5), 16)).to(tl.pointer_type(tl.uint8)) + run
    normaliser = inp + tl.load(own + _C_NORMALISER)
    out += tl.multiple_of(tl.load(own + _C_OUT), 16)
    elements = out.to(tl.pointer_type(ELEMENT))
    target = out.to(tl.pointer_type(tl.uint64)) + (
        run[:, None] * N + tl.arange(0, 1 if BITS == 8 else 2)[None, :]
    )

    runs = (
        ((numel - numel // _BLOCK * _BLOCK + _LANES * _RUN - 1) // (_LANES * _RUN)).to(tl.int32)
        if RAGGED
        else _RUNS
    )
    # Weights from this lane's part of run 0 to the end of the tensor; only a ragged block asks.
    left = (numel - run * _RUN).to(tl.int32) if RAGGED else p

    touched = tl.zeros([L], tl.uint16)
    if STREAM:
        shared = to_shared(tables, triton_stream.WARP_BYTES, L, COMPILED)
        lowest = tl.load(exponents).to(tl.uint32, bitcast=True)
        highest = tl.load(exponents + 255).to(tl.uint32, bitcast=True)
        if highest - lowest == (15 << M) * 0x10001:  # a palette of 16 exponents in a row
            x, p = triton_stream.runs(
                x, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, lane, lane, 0,
                False, True, M, L, COMPILED,
            )  # fmt: skip
        else:
            x, p = triton_stream.runs(
                x, p, words, limit, tables, exponents, lowest, planes8, target, lane, shared, lane, lane, 0,
                False, False, M, L, COMPILED,
            )  # fmt: skip
    else:
        q0, q1, q2, q3, d0, d1, b8, b4, b2, b1 = load_run(
            planes32, planes16, planes8, planes4, planes2, planes1, 0, left, W, RAGGED
        )
        r0, r1, r2, r3, f0, f1, c8, c4, c2, c1 = load_run(
            planes32, planes16, planes8, planes4, planes2, planes1,
            _LANES, left - _LANES * _RUN, W, RAGGED,
        )  # fmt: skip
        # Never widened in the loop: that would be a use, and would wait.
        if L == _LANES:
            touched |= warm.to(tl.uint16)
        touching = tl.zeros([L], tl.uint16)
        factor = tl.zeros([L], tl.float32)
        for i in range(runs - 1):
            touched |= touching
            ahead = p + _TOUCHED_AHEAD + 2 * lane
            touching = tl.load(words + ahead, mask=ahead < limit, other=0)
            after = tl.minimum(i + 2, runs - 1) * _LANES
            s0, s1, s2, s3, g0, g1, t8, t4, t2, t1 = load_run(
                planes32, planes16, planes8, planes4, planes2, planes1, after, left - after * _RUN, W, RAGGED
            )
            if NORM:
                factor = 1 + tl.load(normaliser + (run + i * _LANES) * _RUN // NORM).to(tl.float32) * (
                    1 / 256
                )
            x, p, e0, e1, e2, e3 = _run(
                x, p, words, limit, tables, exponents, SPLIT, GROUP, STRIDE, False, L, COMPILED
            )
            w0, w1, w2, w3, w4, w5, w6, w7 = merge(
                e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor, BITS, E, M, KEPT, NORM
            )
            if RAGGED:
                at = i * _LANES * _RUN
                store_ragged(
                    elements + run * _RUN + at, left - at, w0, w1, w2, w3, w4, w5, w6, w7, BITS, ELEMENT
                )
            else:
                store_run(target + i * _LANES * N, w0, w1, w2, w3, w4, w5, w6, w7, BITS)
            q0, q1, q2, q3, d0, d1, b8, b4, b2, b1 = r0, r1, r2, r3, f0, f1, c8, c4, c2, c1
            r0, r1, r2, r3, f0, f1, c8, c4, c2, c1 = s0, s1, s2, s3, g0, g1, t8, t4, t2, t1

        last = runs - 1
        if NORM:
            at = (run + last * _LANES) * _RUN
            factor = 1 + tl.load(normaliser + at // NORM, mask=at < numel, other=0).to(tl.float32) * (1 / 256)
        x, p, e0, e1, e2, e3 = _run(
            x, p, words, limit, tables, exponents, SPLIT, GROUP, STRIDE, True, L, COMPILED
        )
        w0, w1, w2, w3, w4, w5, w6, w7 = merge(
            e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor, BITS, E, M, KEPT, NORM
        )
        if RAGGED:
            at = last * _LANES * _RUN
            store_ragged(elements + run * _RUN + at, left - at, w0, w1, w2, w3, w4, w5, w6, w7, BITS, ELEMENT)
        else:
            store_run(target + last * _LANES * N, w0, w1, w2, w3, w4, w5, w6, w7, BITS)

    tl.debug_barrier()  # an escape is another lane's weight
    bad = (whole == 0) | ((x >> 16) != 1) | (p != limit)
    first = block * _BLOCK
    in_block = tl.minimum(numel - first, _BLOCK).to(tl.int32)
    escapes = tl.where(whole, escapes, 0)
    for k in range(0, tl.max(escapes), _LANES):
        mine, where, exponent, misplaced = load_escapes(words, limit, k + lane, escapes, in_block)
        bad |= misplaced | (mine & ((exponent >> E) != 0))
        weight = first + where
        field = one_field(inp, own, weight, mine, W)
        value = assemble(exponent & ((1 << E) - 1), field, BITS, M, KEPT)
        if NORM:
            q = tl.load(normaliser + weight // NORM, mask=mine, other=0)
            value = times(value, 1 + q.to(tl.float32) * (1 / 256), BITS, E)
        tl.store(elements + weight, value.to(ELEMENT), mask=mine)
    # That they are reported keeps the words that were touched from being optimised away.
    tensor = tl.load(own + _C_TENSOR)
    tl.atomic_or(errors + tensor + tl.zeros([L], tl.int32), 1 | touched.to(tl.int32) << 1, mask=bad)
