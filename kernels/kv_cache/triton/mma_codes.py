"""Queries, and packed codes of keys and values, as operands of m16n8k16, in Triton.

A warp works on arrays [32], an element a thread. Words of a thread are those of the planes of a token's
codes, the widest plane first, a tuple each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import float_of, less, side_by_side
from neuzip.kernels.kv_cache.ops import EXTRA_BIT

_EXTRA_BIT = tl.constexpr(EXTRA_BIT)


@triton.jit
def columns_of(tile, COUNT: tl.constexpr):
    """The columns of [32, COUNT], 1 to 8 of them."""
    if COUNT == 1:
        columns = (tl.reshape(tile, [32]),)
    elif COUNT == 2:
        columns = tl.split(tile)
    else:
        even, odd = tl.split(tl.reshape(tile, [32, COUNT // 2, 2]))
        evens = columns_of(even, COUNT // 2)
        odds = columns_of(odd, COUNT // 2)
        columns = ()
        for i in tl.static_range(COUNT // 2):
            columns += (evens[i], odds[i])
    return columns


@triton.jit
def load_words(rows, first, COUNT: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr):
    """EACH words from `first` on of the plane of COUNT words that begins at `rows`; 0 beyond its last."""
    at = first[:, None] + tl.arange(0, EACH)[None, :]
    if COUNT == EACH * THREADS:
        loaded = tl.load(rows[:, None] + at)
    else:
        loaded = tl.load(rows[:, None] + at, mask=at < COUNT, other=0)
    return columns_of(loaded, EACH)


@triton.jit
def key_words(rows, q, WIDTHS: tl.constexpr, COUNTS: tl.constexpr):
    """Words of a token's columns 32 q to 32 q + 31."""
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        planes += (load_words(rows, q * WIDTHS[p], COUNTS[p], WIDTHS[p], 4),)
        rows += COUNTS[p]
    return planes


@triton.jit
def value_words(rows, r, WIDTHS: tl.constexpr, COUNTS: tl.constexpr):
    """Words of a token's columns 16 r to 16 r + 15."""
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        if WIDTHS[p] == 1:
            two = load_words(rows, r // 2, COUNTS[p], 1, 4)  # of two threads
            planes += ((two[0] >> (r % 2 * 4),),)
        else:
            planes += (load_words(rows, r * (WIDTHS[p] // 2), COUNTS[p], WIDTHS[p] // 2, 8),)
        rows += COUNTS[p]
    return planes


@triton.jit
def column_codes(planes, WIDTHS: tl.constexpr, G: tl.constexpr):
    """Codes of columns 4 G to 4 G + 3, a byte each."""
    codes = planes[0][0] & 0
    for p in tl.static_range(len(WIDTHS)):
        field = planes[p][G * WIDTHS[p] // 8] >> (G * WIDTHS[p] % 8)
        if WIDTHS[p] < 8:
            field = field & (((1 << WIDTHS[p]) - 1) * 0x01010101)
        codes = (codes << WIDTHS[p]) | field
    return codes


@triton.constexpr_function
def _four(byte):
    """A byte four times, as an int32."""
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


@triton.constexpr_function
def added_to_codes(bits, half):
    """What the numbers of a code add up to, less the code."""
    if half:
        return 1024.0
    return 128.0 if bits < 8 else 64.0


@triton.jit
def code_numbers(codes, BITS: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Four codes, a byte each, as numbers: pairs of the first two and of the last two."""
    if HALF:
        numbers = (side_by_side(codes, tl.full([32], _four(0x64), tl.int32), COMPILED),)
    elif BITS < 8:
        numbers = (side_by_side(codes, tl.full([32], _four(0x43), tl.int32), COMPILED),)
    else:
        highest = (codes & _four(0x80)) ^ _four(0xC2)  # 64 is the bf16 42 80, and -64 is C2 80
        numbers = (
            side_by_side(codes & _four(0x7F), tl.full([32], _four(0x43), tl.int32), COMPILED),
            side_by_side(tl.full([32], _four(0x80), tl.int32), highest, COMPILED),
        )
    return numbers


@triton.jit
def centred_numbers(pairs, BITS: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """The first pairs of `code_numbers` less what makes them all add up to code - 2^(BITS - 1)."""
    SUBTRACTED: tl.constexpr = added_to_codes(BITS, HALF) + 2 ** (BITS - 1)
    return less(pairs[0], SUBTRACTED, HALF, COMPILED), less(pairs[1], SUBTRACTED, HALF, COMPILED)


@triton.jit
def extra_bits(word, there, G: tl.constexpr):
    """Bits of columns 4 G to 4 G + 3 that a token has more than others, a byte each; 0 for other tokens."""
    return tl.where(there, word >> G, 0) & 0x01010101


@triton.jit
def extra_numbers(bits, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Extra bits as numbers: 2**EXTRA_BIT, whose lower byte is 0, or 0."""
    UPPER: tl.constexpr = (15 + _EXTRA_BIT) << 2 if HALF else (127 + _EXTRA_BIT) >> 1
    return side_by_side(bits * 0, bits * UPPER, COMPILED)


@triton.jit
def query_fragments(
    query_ptr, stride, r, q, GROUP: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """A of the 8 instructions of S, and the sums of queries r and r + 8."""
    fragments = ()
    upper_sum, lower_sum = tl.zeros([32], tl.float32), tl.zeros([32], tl.float32)
    for g in tl.static_range(8):
        a0, a2 = _query_pairs(query_ptr + r * stride, r < GROUP, q, g, WIDTH)
        a1, a3 = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
        upper_sum += _sum_of_pairs(a0, a2, HALF)
        if GROUP > 8:
            a1, a3 = _query_pairs(query_ptr + (r + 8) * stride, r + 8 < GROUP, q, g, WIDTH)
            lower_sum += _sum_of_pairs(a1, a3, HALF)
        fragments += ((a0, a1, a2, a3),)
    return fragments, (of_quad(upper_sum, False), of_quad(lower_sum, False))


@triton.jit
def _query_pairs(rows, there, q, G: tl.constexpr, WIDTH: tl.constexpr):
    """Columns 32 q + 4 G to 32 q + 4 G + 3 of a query: two pairs."""
    column = (32 * q + 4 * G)[:, None] + tl.arange(0, 4)[None, :]
    loaded = tl.load(rows[:, None] + column, mask=there[:, None] & (column < WIDTH), other=0)
    c0, c1, c2, c3 = columns_of(loaded.to(tl.int32) & 0xFFFF, 4)
    return c0 | (c1 << 16), c2 | (c3 << 16)


@triton.jit
def _sum_of_pairs(first, second, HALF: tl.constexpr):
    """Sum of the four numbers of two pairs, fp32."""
    return (float_of(first, HALF) + float_of(first >> 16, HALF)) + (
        float_of(second, HALF) + float_of(second >> 16, HALF)
    )


@triton.jit
def of_quad(value, LARGEST: tl.constexpr):
    """The sum over the four threads of a row, or the largest, for each of them."""
    parts = tl.reshape(value, [8, 4])
    of_row = tl.max(parts, 1, keep_dims=True) if LARGEST else tl.sum(parts, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(of_row, [8, 4]), [32])
