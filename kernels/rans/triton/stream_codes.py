"""How full blocks of weights on a grid are decoded: words come by way of shared memory, steps in registers.

    table     4,096 slots of 32 bits, for all warps of the program: 16 KB
    a warp    a ring of 1,024 words, 2 KB

A lane's 8 weights of a run are in one row, so they share its factor, which is loaded a run ahead. The row and
column of a run follow from those of the run before by additions. The factors of 8 columns, a byte each, are
loaded a run ahead as well.

A run takes 256 words at most: the words of a piece are needed three runs after its copy was begun, at the
earliest, and are waited for after two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.coded import COLUMN_FACTORS, COLUMN_FACTORS_AT, ROW_WEIGHTS
from neuzip.kernels.rans.numbers import LANES, RUN, RUNS
from neuzip.kernels.rans.triton.code_values import (
    by_columns,
    codes_of_run,
    factor_of,
    load_rows,
    with_low_bits,
    words_of_values,
)
from neuzip.kernels.rans.triton.decode_planes import store_run
from neuzip.kernels.rans.triton.ring import (
    RING_BYTES,
    copy_words,
    end_group,
    fill_ring,
    own_memory,
    wait,
    wait_all,
)

REGISTERS, COLUMN_REGISTERS = 48, 48
"""Registers of a thread, at most, without and with column factors: for six and for five programs."""

AHEAD = 2
"""Runs after which a piece that was begun to be copied is waited for."""

CODES_WARP_BYTES = tl.constexpr(RING_BYTES)
"""Bytes of shared memory of a warp."""

_RUNS, _RUN_WEIGHTS, _LANES, _PIECES_AHEAD = (tl.constexpr(v) for v in (RUNS, LANES * RUN, LANES, AHEAD))
_COLUMN_FACTORS = tl.constexpr(COLUMN_FACTORS)
_C_COLUMNS, _C_ROW_WEIGHTS = tl.constexpr(COLUMN_FACTORS_AT), tl.constexpr(ROW_WEIGHTS)
_ONE = tl.constexpr(0x80)


@triton.jit
def runs_of_codes(
    x, p, words, limit, tables, codes, shared, inp, own, weight, target, lows, lane, magic, zero,
    half, GROUP: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, GRID: tl.constexpr,
    L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode all runs of full blocks, one a warp, and store them: states in the end, and words taken.

    words: uint16 pointers, of a block whose tensor's words begin at a multiple of 16 bytes; p of them were
    taken, and none is read from `limit` on. weight: number of a lane's first weight, int64. target: where
    that is stored. lows: where the LOW raw bits of its first 8 codes are. `codes_of_run` explains codes,
    magic, zero and half.
    """
    # Words count from a multiple of 16 bytes on, as pieces begin there.
    skipped = (words.to(tl.int64) & 15).to(tl.int32) >> 1
    words -= skipped
    p += skipped
    end = tl.where(limit > 0, limit + skipped, 0)  # 0: no words, wherever they should be
    ring = own_memory(shared, CODES_WARP_BYTES, L)
    piece = fill_ring(p, end, words, ring, lane, COMPILED)
    p = p << 1
    for _ in tl.static_range(_PIECES_AHEAD):
        end_group(ring, COMPILED)

    rows, has_rows, step = load_rows(inp, own)
    row_weights = tl.load(own + _C_ROW_WEIGHTS)
    row = weight // row_weights
    rows += row
    column = (weight - row * row_weights).to(tl.int32)
    run_weights = tl.full([], _RUN_WEIGHTS, tl.int64)
    more_rows = run_weights // row_weights
    more_columns = (run_weights - more_rows * row_weights).to(tl.int32)
    more_rows, row_weights = more_rows.to(tl.int32), row_weights.to(tl.int32)
    columns = inp + tl.load(own + _C_COLUMNS)
    row_factor, column_factors = _load_factors(rows, has_rows, columns, column, GRID)
    low = tl.load(lows) if LOW else lane
    for run in range(_RUNS - 1):
        wait(ring, _PIECES_AHEAD, COMPILED)
        piece = copy_words(p >> 1, piece, end, words, ring, lane, COMPILED)
        end_group(ring, COMPILED)
        scale, factors, low_bits = step * factor_of(row_factor), column_factors, low
        column += more_columns
        crossed = column >= row_weights
        column = tl.where(crossed, column - row_weights, column)
        rows += more_rows + crossed.to(tl.int32)
        row_factor, column_factors = _load_factors(rows, has_rows, columns, column, GRID)
        if LOW:
            low = tl.load(lows + (run + 1) * _LANES)
        x, p, c0, c1, c2, c3, c4, c5, c6, c7 = codes_of_run(
            x,
            p,
            words,
            end,
            tables,
            codes,
            ring,
            shared,
            magic,
            zero,
            half,
            False,
            GROUP,
            True,
            L,
            COMPILED,
        )
        c0, c1, c2, c3, c4, c5, c6, c7 = with_low_bits(c0, c1, c2, c3, c4, c5, c6, c7, low_bits, magic, LOW)
        _store(
            target + run * (_RUN_WEIGHTS * BITS // 64), c0, c1, c2, c3, c4, c5, c6, c7, scale, factors,
            BITS, M, GRID, COMPILED,
        )  # fmt: skip
    wait(ring, _PIECES_AHEAD, COMPILED)
    x, p, c0, c1, c2, c3, c4, c5, c6, c7 = codes_of_run(
        x, p, words, end, tables, codes, ring, shared, magic, zero, half,
        True, GROUP, True, L, COMPILED,
    )  # fmt: skip
    c0, c1, c2, c3, c4, c5, c6, c7 = with_low_bits(c0, c1, c2, c3, c4, c5, c6, c7, low, magic, LOW)
    _store(
        target + (_RUNS - 1) * (_RUN_WEIGHTS * BITS // 64), c0, c1, c2, c3, c4, c5, c6, c7,
        step * factor_of(row_factor), column_factors, BITS, M, GRID, COMPILED,
    )  # fmt: skip
    wait_all(ring, COMPILED)
    return x, (p >> 1) - skipped


@triton.jit
def _load_factors(rows, has_rows, columns, column, GRID: tl.constexpr):
    """The factor byte of a lane's row, and those of its 8 columns: without any, something else."""
    row_factor = tl.load(rows, mask=has_rows, other=_ONE)
    column_factors = column
    if _COLUMN_FACTORS & GRID:
        column_factors = tl.load((columns + column).to(tl.pointer_type(tl.uint64)))
    return row_factor, column_factors


@triton.jit
def _store(
    target, c0, c1, c2, c3, c4, c5, c6, c7, scale, factors,
    BITS: tl.constexpr, M: tl.constexpr, GRID: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Store the values of a lane's 8 codes. scale: the step of its row; factors: of its columns."""
    if _COLUMN_FACTORS & GRID:
        s0, s1, s2, s3, s4, s5, s6, s7 = by_columns(scale, factors)
    else:
        s0, s1, s2, s3, s4, s5, s6, s7 = scale, scale, scale, scale, scale, scale, scale, scale
    w0, w1, w2, w3 = words_of_values(
        c0 * s0, c1 * s1, c2 * s2, c3 * s3, c4 * s4, c5 * s5, c6 * s6, c7 * s7, BITS, M, COMPILED
    )
    store_run(target, w0, w1, w2, w3, w0, w0, w0, w0, BITS)
