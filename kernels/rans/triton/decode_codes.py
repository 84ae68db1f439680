"""Blocks of weights on a grid, in Triton: codes decoded, and multiplied with their steps in one pass.

L is the number of threads of a program, GRID the bits of `Kind.grid`. A code is stored as u = code + 2^(E-1),
E being its bits; a value is code * step in fp32, rounded to the format. `neuzip.kernels.grid` defines both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.coded import BEGIN, NUMEL, OUT, ROW_WEIGHTS, TENSOR
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN, RUNS
from neuzip.kernels.rans.triton.code_values import (
    code_of,
    codes_of_run,
    load_code_bits,
    low_plane,
    rounded,
    step_at,
    steps_of_run,
    with_low,
    with_low_bits,
    words_of_values,
)
from neuzip.kernels.rans.triton.decode_planes import one_field, store_ragged, store_run
from neuzip.kernels.rans.triton.ring import to_shared
from neuzip.kernels.rans.triton.states import begin_blocks, load_escapes
from neuzip.kernels.rans.triton.stream_codes import CODES_WARP_BYTES, runs_of_codes

_LANES, _RUN, _RUNS, _BLOCK = (tl.constexpr(v) for v in (LANES, RUN, RUNS, BLOCK))
_C_OUT, _C_NUMEL, _C_TENSOR, _C_BEGIN, _C_ROW_WEIGHTS = (
    tl.constexpr(v) for v in (OUT, NUMEL, TENSOR, BEGIN, ROW_WEIGHTS)
)


@triton.jit
def decode_codes(
    inp, out, starts, counts, own, tables, codes, errors, first, last,
    L: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr,
    LOW: tl.constexpr, GRID: tl.constexpr, ELEMENT: tl.constexpr, STREAM: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode L / 32 blocks of a tensor from the `first` on, none beyond the `last` full one."""
    N: tl.constexpr = BITS // 8
    numel = tl.load(own + _C_NUMEL)
    lane = tl.arange(0, L) % _LANES
    block = first.to(tl.int64) + tl.arange(0, L) // _LANES
    if not RAGGED:
        # Where blocks are left over, the last is decoded by several warps: all write the same.
        block = tl.minimum(block, last)
    words, whole, escapes, limit, x, p = begin_blocks(inp, starts, counts, own, block, lane, L)
    code_bits, magic, zero, half = load_code_bits(own, limit)
    begin = tl.load(own + _C_BEGIN)

    run = block * (_BLOCK // _RUN) + lane
    lows = low_plane(inp, own, run, LOW)
    out += tl.multiple_of(tl.load(own + _C_OUT), 16)
    elements = out.to(tl.pointer_type(ELEMENT))
    target = out.to(tl.pointer_type(tl.uint64)) + run[:, None] * N + tl.arange(0, 2)[None, :]
    if STREAM:
        shared = to_shared(tables, CODES_WARP_BYTES, L, COMPILED)
        x, p = runs_of_codes(
            x, p, words, limit, tables, codes, shared, inp, own, begin + run * _RUN, target, lows, lane,
            magic, zero, half, GROUP, BITS, M, LOW, GRID, L, COMPILED,
        )  # fmt: skip
    else:
        runs = (
            ((numel - numel // _BLOCK * _BLOCK + _LANES * _RUN - 1) // (_LANES * _RUN)).to(tl.int32)
            if RAGGED
            else _RUNS
        )
        # Weights from this lane's part of run 0 to the end of the tensor, 0 at least.
        left = tl.minimum(numel - run * _RUN, 2 * _BLOCK).to(tl.int32)
        for i in range(runs - 1):
            x, p = _run(
                x, p, words, limit, tables, codes, inp, own, run, i, begin, left, elements, target, lows,
                magic, zero, half, False, RAGGED, GROUP, BITS, M, LOW, GRID, ELEMENT, L, COMPILED,
            )  # fmt: skip
        x, p = _run(
            x, p, words, limit, tables, codes, inp, own, run, runs - 1, begin, left, elements, target, lows,
            magic, zero, half, True, RAGGED, GROUP, BITS, M, LOW, GRID, ELEMENT, L, COMPILED,
        )  # fmt: skip

    tl.debug_barrier()  # an escape is another lane's weight
    bad = (whole == 0) | ((x >> 16) != 1) | (p != limit)
    first = block * _BLOCK
    in_block = tl.minimum(numel - first, _BLOCK).to(tl.int32)
    escapes = tl.where(whole, escapes, 0)
    row_weights = tl.load(own + _C_ROW_WEIGHTS)
    for k in range(0, tl.max(escapes), _LANES):
        mine, where, u, misplaced = load_escapes(words, limit, k + lane, escapes, in_block)
        bad |= misplaced | (mine & ((u >> code_bits) != 0))
        weight = first + where
        row = (begin + weight) // row_weights
        step = step_at(inp, own, row, begin + weight - row * row_weights, mine, GRID)
        code = code_of(u, magic, half)
        if LOW:
            code = with_low(code, one_field(inp, own, weight, mine, LOW).to(tl.uint32), magic, LOW)
        value = code * step
        if BITS == 16:
            bits = rounded(value, value, M, COMPILED) & 0xFFFF
        else:
            bits = value.to(tl.uint32, bitcast=True)
        tl.store(elements + weight, bits.to(ELEMENT), mask=mine)
    tensor = tl.load(own + _C_TENSOR)
    tl.atomic_or(errors + tensor + tl.zeros([L], tl.int32), 1, mask=bad)


@triton.jit
def _run(
    x, p, words, limit, tables, codes, inp, own, run, i, begin, left, elements, target, lows, magic, zero,
    half, LAST: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr,
    LOW: tl.constexpr, GRID: tl.constexpr, ELEMENT: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode run i of every lane, store it if that is no part of what fills up a RAGGED block: states."""
    N: tl.constexpr = BITS // 8
    weight = (run + i * _LANES) * _RUN
    left -= i * _LANES * _RUN
    s0, s1, s2, s3, s4, s5, s6, s7 = steps_of_run(inp, own, begin + weight, left, GRID)
    low = tl.load(lows + i * _LANES, mask=left > 0, other=0) if LOW else p
    x, p, c0, c1, c2, c3, c4, c5, c6, c7 = codes_of_run(
        x, p, words, limit, tables, codes, p, p, magic, zero, half, LAST, GROUP, False, L, COMPILED
    )
    c0, c1, c2, c3, c4, c5, c6, c7 = with_low_bits(c0, c1, c2, c3, c4, c5, c6, c7, low, magic, LOW)
    w0, w1, w2, w3 = words_of_values(
        c0 * s0, c1 * s1, c2 * s2, c3 * s3, c4 * s4, c5 * s5, c6 * s6, c7 * s7, BITS, M, COMPILED
    )
    if RAGGED:
        store_ragged(elements + weight, left, w0, w1, w2, w3, w0, w0, w0, w0, BITS, ELEMENT)
    else:
        store_run(target + i * _LANES * N, w0, w1, w2, w3, w0, w0, w0, w0, BITS)
    return x, p
