"""Codes of weights on a grid and what they stand for, in Triton: entries of a table, steps, and values.

u is a code as it is stored, from 0 on, in uint32. GROUP is that of SPEC.md, GRID the bits of `Kind.grid`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.coded import (
    CODE_BITS,
    COLUMN_FACTORS,
    COLUMN_FACTORS_AT,
    CROSSING_ROWS,
    HAS_ROWS,
    LOWEST,
    PLANES,
    ROW_FACTORS,
    ROW_WEIGHTS,
    STEP,
)
from neuzip.kernels.rans.numbers import SCALE, SCALE_BITS
from neuzip.kernels.rans.triton.ring import joined, next_entry
from neuzip.kernels.rans.triton.states import refill

_SLOTS, _SCALE_BITS = tl.constexpr(SCALE - 1), tl.constexpr(SCALE_BITS)
_COLUMN_FACTORS, _CROSSING = tl.constexpr(COLUMN_FACTORS), tl.constexpr(CROSSING_ROWS)
_C_ROWS, _C_COLUMNS, _C_HAS_ROWS, _C_STEP, _C_ROW_WEIGHTS = (
    tl.constexpr(v) for v in (ROW_FACTORS, COLUMN_FACTORS_AT, HAS_ROWS, STEP, ROW_WEIGHTS)
)
_C_CODE_BITS, _C_LOWEST = tl.constexpr(CODE_BITS), tl.constexpr(LOWEST)
_ONE = tl.constexpr(0x80)


@triton.jit
def factor_of(byte):
    """The number that a factor byte stands for, fp32: a byte has its exponent and 4 bits of its mantissa."""
    return ((byte.to(tl.uint32) << 19) + 0x3B800000).to(tl.float32, bitcast=True)


@triton.jit
def code_of(u, magic, zero):
    """u below 2^16 as a code, fp32. magic: the bits of 2^23. zero: 2^23 + the u of code 0, fp32."""
    return (u | magic).to(tl.float32, bitcast=True) - zero


@triton.jit
def load_code_bits(own, limit):
    """Bits of a code, and what `code_of` takes: magic, zero of entries of the table, and zero of u.

    limit: of a lane, not negative. A compiler that knew magic, or that all lanes have the same, would make
    two instructions of `u & 0xFF | magic`.
    """
    code_bits = tl.load(own + _C_CODE_BITS).to(tl.int32)
    half = (1 << 23) + (1 << (code_bits - 1))
    zero = half - tl.load(own + _C_LOWEST).to(tl.int32)
    magic = ((limit >> 31) | 0x4B000000).to(tl.uint32)
    return code_bits, magic, zero.to(tl.float32), half.to(tl.float32)


@triton.jit
def load_rows(inp, own):
    """Where row factors are, whether there are any, and the step, fp32."""
    rows = inp + tl.load(own + _C_ROWS)
    step = tl.load(own + _C_STEP).to(tl.int32).to(tl.float32, bitcast=True)
    return rows, tl.load(own + _C_HAS_ROWS) != 0, step


@triton.jit
def step_at(inp, own, row, column, mask, GRID: tl.constexpr):
    """The steps of weights, fp32."""
    rows, has_rows, step = load_rows(inp, own)
    step *= factor_of(tl.load(rows + row, mask=mask & has_rows, other=_ONE))
    if _COLUMN_FACTORS & GRID:
        columns = inp + tl.load(own + _C_COLUMNS)
        step *= factor_of(tl.load(columns + column, mask=mask, other=_ONE))
    return step


@triton.jit
def steps_of_run(inp, own, weight, left, GRID: tl.constexpr):
    """The steps of a lane's 8 weights, of which `left` exist; the first has the number `weight` (int64)."""
    row_weights = tl.load(own + _C_ROW_WEIGHTS)
    row = weight // row_weights
    column = weight - row * row_weights
    s0 = step_at(inp, own, row, column, left > 0, GRID)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    if _CROSSING & GRID:
        s1, row, column = _next_step(inp, own, row, column, row_weights, left > 1, GRID)
        s2, row, column = _next_step(inp, own, row, column, row_weights, left > 2, GRID)
        s3, row, column = _next_step(inp, own, row, column, row_weights, left > 3, GRID)
        s4, row, column = _next_step(inp, own, row, column, row_weights, left > 4, GRID)
        s5, row, column = _next_step(inp, own, row, column, row_weights, left > 5, GRID)
        s6, row, column = _next_step(inp, own, row, column, row_weights, left > 6, GRID)
        s7, row, column = _next_step(inp, own, row, column, row_weights, left > 7, GRID)
    elif _COLUMN_FACTORS & GRID:
        rows, has_rows, step = load_rows(inp, own)
        step *= factor_of(tl.load(rows + row, mask=(left > 0) & has_rows, other=_ONE))
        columns = (inp + tl.load(own + _C_COLUMNS) + column).to(tl.pointer_type(tl.uint64))
        s0, s1, s2, s3, s4, s5, s6, s7 = by_columns(step, tl.load(columns, mask=left > 0, other=0))
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _next_step(inp, own, row, column, row_weights, mask, GRID: tl.constexpr):
    """The step of the weight behind one, its row and its column."""
    ends = column + 1 == row_weights
    row, column = tl.where(ends, row + 1, row), tl.where(ends, 0, column + 1)
    return step_at(inp, own, row, column, mask, GRID), row, column


@triton.jit
def by_columns(step, factors):
    """A step times the factors of 8 columns, whose bytes are in a word of 64 bits."""
    low, high = factors.to(tl.uint32), (factors >> 32).to(tl.uint32)
    return (
        step * factor_of(low & 0xFF), step * factor_of((low >> 8) & 0xFF),
        step * factor_of((low >> 16) & 0xFF), step * factor_of(low >> 24),
        step * factor_of(high & 0xFF), step * factor_of((high >> 8) & 0xFF),
        step * factor_of((high >> 16) & 0xFF), step * factor_of(high >> 24),
    )  # fmt: skip


@triton.jit
def codes_of_run(
    x, p, words, end, tables, codes, ring, shared, magic, zero, half,
    LAST: tl.constexpr, GROUP: tl.constexpr, STREAM: tl.constexpr, L: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a run: states, words taken, and a lane's 8 codes, fp32. The LAST two symbols are in the state.

    codes: where the u of every symbol are, in groups of 2 the second in the upper half. magic, zero, half:
    see `load_code_bits`. ring, shared: of `ring.py`, which only STREAM needs.
    """
    if GROUP == 2:
        x, p, c0, c1 = _two(
            x, p, words, end, tables, codes, ring, shared, magic, zero, half,
            False, STREAM, L, COMPILED,
        )  # fmt: skip
        x, p, c2, c3 = _two(
            x, p, words, end, tables, codes, ring, shared, magic, zero, half,
            False, STREAM, L, COMPILED,
        )  # fmt: skip
        x, p, c4, c5 = _two(
            x, p, words, end, tables, codes, ring, shared, magic, zero, half,
            LAST, STREAM, L, COMPILED,
        )  # fmt: skip
        if LAST:
            _x, _p, c6, c7 = _two(
                x >> 8, p, words, end, tables, codes, ring, shared, magic, zero, half,
                True, STREAM, L, COMPILED,
            )  # fmt: skip
        else:
            x, p, c6, c7 = _two(
                x, p, words, end, tables, codes, ring, shared, magic, zero, half,
                False, STREAM, L, COMPILED,
            )  # fmt: skip
    else:
        x, p, c0 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        x, p, c1 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        x, p, c2 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        x, p, c3 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        x, p, c4 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        x, p, c5 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
        if LAST:
            c6 = code_of(tl.load(codes + (x & 0xFF)).to(tl.uint32, bitcast=True), magic, half)
            c7 = code_of(tl.load(codes + ((x >> 8) & 0xFF)).to(tl.uint32, bitcast=True), magic, half)
        else:
            x, p, c6 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
            x, p, c7 = _one(x, p, words, end, tables, ring, shared, magic, zero, STREAM, L, COMPILED)
    return x, p, c0, c1, c2, c3, c4, c5, c6, c7


@triton.constexpr_function
def _plane_column(low):
    return PLANES + (2 if low == 8 else 3 if low == 4 else 4 if low == 2 else 5)


@triton.constexpr_function
def _plane_type(low):
    return tl.uint64 if low == 8 else tl.uint32 if low == 4 else tl.uint16 if low == 2 else tl.uint8


@triton.jit
def low_plane(inp, own, run, LOW: tl.constexpr):
    """Where the LOW raw bits of a lane's 8 codes of a run are; without any something else."""
    if LOW:
        plane = inp + tl.multiple_of(tl.load(own + _plane_column(LOW)), 16)
        lows = plane.to(tl.pointer_type(_plane_type(LOW))) + run
    else:
        lows = run
    return lows


@triton.jit
def with_low_bits(c0, c1, c2, c3, c4, c5, c6, c7, lows, magic, LOW: tl.constexpr):
    """8 codes, fp32, from what is left of them without low bits, and from these: a word for all."""
    if LOW:
        first = lows.to(tl.uint32)
        second = (lows >> 32).to(tl.uint32) if LOW == 8 else first >> (4 * LOW)
        c0, c1 = _with_low(c0, first, 0, magic, LOW), _with_low(c1, first, LOW, magic, LOW)
        c2, c3 = _with_low(c2, first, 2 * LOW, magic, LOW), _with_low(c3, first, 3 * LOW, magic, LOW)
        c4, c5 = _with_low(c4, second, 0, magic, LOW), _with_low(c5, second, LOW, magic, LOW)
        c6, c7 = _with_low(c6, second, 2 * LOW, magic, LOW), _with_low(c7, second, 3 * LOW, magic, LOW)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _with_low(code, word, SHIFT: tl.constexpr, magic, LOW: tl.constexpr):
    return with_low(code, (word >> SHIFT) & ((1 << LOW) - 1), magic, LOW)


@triton.jit
def with_low(code, low, magic, LOW: tl.constexpr):
    """A code, fp32, from what is left of it without its LOW bits, and from these, uint32."""
    return code * (1 << LOW) + code_of(low, magic, 8388608.0)


@triton.jit
def _one(
    x, p, words, end, tables, ring, shared, magic, zero,
    STREAM: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a symbol of every lane that stands for one code."""
    x, p, entry = _entry(x, p, words, end, tables, ring, shared, 8, STREAM, L, COMPILED)
    return x, p, code_of(entry & 0xFF, magic, zero)


@triton.jit
def _two(
    x, p, words, end, tables, codes, ring, shared, magic, zero, half,
    RAW: tl.constexpr, STREAM: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a symbol of every lane that stands for two codes. A RAW one is the lowest byte of the state."""
    if RAW:
        pair = tl.load(codes + (x & 0xFF)).to(tl.uint32, bitcast=True)
        first, second = code_of(pair & 0xFFFF, magic, half), code_of(pair >> 16, magic, half)
    else:
        x, p, entry = _entry(x, p, words, end, tables, ring, shared, 4, STREAM, L, COMPILED)
        first, second = code_of(entry & 15, magic, zero), code_of((entry >> 16) & 15, magic, zero)
    return x, p, first, second


@triton.jit
def _entry(
    x, p, words, end, tables, ring, shared,
    SHIFT: tl.constexpr, STREAM: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """States after a step of every lane, words taken, and entries of the table."""
    if STREAM:
        x, p, entry = next_entry(x, p, words, end, tables, ring, shared, SHIFT, True, L, COMPILED)
    else:
        entry = tl.load(tables + (x & _SLOTS)).to(tl.uint32, bitcast=True)
        x = ((entry >> SHIFT) & 0xFFF) * (x >> _SCALE_BITS) + (entry >> 20)
        x, p = refill(x, p, words, end, L, COMPILED)
    return x, p, entry


@triton.jit
def words_of_values(
    v0, v1, v2, v3, v4, v5, v6, v7, BITS: tl.constexpr, M: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """A lane's 8 values (fp32), rounded to a format of BITS bits with M of mantissa: BITS / 8 words of 64."""
    if BITS == 16:
        w0 = joined(rounded(v0, v1, M, COMPILED), rounded(v2, v3, M, COMPILED))
        w1 = joined(rounded(v4, v5, M, COMPILED), rounded(v6, v7, M, COMPILED))
        w2, w3 = w0, w1
    else:
        w0, w1 = joined(_bits(v0), _bits(v1)), joined(_bits(v2), _bits(v3))
        w2, w3 = joined(_bits(v4), _bits(v5)), joined(_bits(v6), _bits(v7))
    return w0, w1, w2, w3


@triton.jit
def rounded(low, high, M: tl.constexpr, COMPILED: tl.constexpr):
    """Two numbers, fp32, rounded to bf16 or fp16 of M bits of mantissa, to nearest even: in one word."""
    if COMPILED:
        both = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;" if M == 7 else "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f",
            [low, high], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        both = _rounded(low, M) | (_rounded(high, M) << 16)
    return both


@triton.jit
def _rounded(value, M: tl.constexpr):
    if M == 7:
        bits = _bits(value)
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)
