"""Queries, and packed codes of keys and values, as operands of m16n8k16, in Triton.

A warp works on arrays [32], an element a thread. Thread (r, q) has a piece of a token's columns: 8 CHUNKS
that follow each other. Words of a piece are a tuple for each plane of its codes, the widest plane first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import (
    exchanged,
    float_of,
    multiply,
    pair_of,
    side_by_side,
    times_plus,
    twice,
    under,
)
from neuzip.kernels.kv_cache.triton.groups import power_of_two, scale_of_byte


@triton.jit
def columns_of(tile, COUNT: tl.constexpr):
    """The columns of [32, COUNT], 1 to 16 of them."""
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
def load_columns(rows, begin, COUNT: tl.constexpr, EACH: tl.constexpr, FULL: tl.constexpr):
    """EACH elements from `begin` on of rows of COUNT, a power of two; 0 beyond the last, unless FULL."""
    at = begin[:, None] + tl.arange(0, EACH)[None, :]
    if FULL:
        loaded = tl.load(rows[:, None] + at)
    else:
        loaded = tl.load(rows[:, None] + at, mask=at < COUNT, other=0)
    return columns_of(loaded, EACH)


@triton.jit
def piece_words(
    rows, n, CHUNKS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr, FULL: tl.constexpr
):
    """Words of the columns from 8 CHUNKS n on, shifted so that the first code is at bit 0.

    FULL: no piece reaches beyond the row.
    """
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        if CHUNKS * WIDTHS[p] >= 4:
            begin = n * (CHUNKS * WIDTHS[p] // 4)
            planes += (load_columns(rows, begin, COUNTS[p], CHUNKS * WIDTHS[p] // 4, FULL),)
        else:  # several threads have parts of one word
            parts = 4 // (CHUNKS * WIDTHS[p])
            one = load_columns(rows, n // parts, COUNTS[p], 1, FULL)
            planes += ((one[0] >> (n % parts * (2 * CHUNKS * WIDTHS[p])),),)
        rows += COUNTS[p]
    return planes


@triton.jit
def column_codes(planes, WIDTHS: tl.constexpr, G: tl.constexpr):
    """Codes of columns 4 G to 4 G + 3 of a piece, a byte each."""
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
    """The number that `code_numbers` makes of a code, less the code."""
    if half:
        return 1024.0
    return 128.0 if bits < 8 else -128.0


@triton.jit
def code_numbers(codes, BITS: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Four codes, a byte each, as numbers: pairs of the first two and of the last two.

    A byte beside the code makes the fp16 1024 + code of it, or the bf16 128 + code. A bf16 has 8 bits: codes
    of 8 are 128 + their lower 7 bits, from which 256 is subtracted, or 128 if bit 7 is set.
    """
    UPPER: tl.constexpr = 0x64 if HALF else 0x43
    if HALF or BITS < 8:
        numbers = side_by_side(codes, tl.full([32], _four(UPPER), tl.int32), COMPILED)
    else:
        upper = tl.full([32], _four(UPPER), tl.int32)
        low = side_by_side(codes & _four(0x7F), upper, COMPILED)
        less_by = side_by_side((codes & _four(0x80)) ^ _four(0x80), upper | _four(0x80), COMPILED)
        one = twice(tl.full([32], 1, tl.float32), HALF)
        numbers = (
            times_plus(low[0], one, less_by[0], HALF, COMPILED),
            times_plus(low[1], one, less_by[1], HALF, COMPILED),
        )
    return numbers


@triton.jit
def scaled_numbers(
    pairs, scale, middle, BITS: tl.constexpr, CODE_BITS: tl.constexpr, HALF: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Pairs of `code_numbers` for codes of CODE_BITS as the numbers (code - 2^(BITS - 1)) scale + middle.

    `scale` and `middle` are pairs, one number for each of a pair. In fp16 `scale` is 2^(BITS - 1) times as
    large, so that small ones keep their digits.
    """
    SUBTRACTED: tl.constexpr = added_to_codes(CODE_BITS, HALF) + 2 ** (BITS - 1)
    UNIT: tl.constexpr = 2.0 ** (1 - BITS) if HALF else 1.0
    scaled = ()
    for i in tl.static_range(2):
        centred = pairs[i]
        if SUBTRACTED != 0:
            unit = twice(tl.full([32], UNIT, tl.float32), HALF)
            addend = twice(tl.full([32], -SUBTRACTED * UNIT, tl.float32), HALF)
            centred = times_plus(centred, unit, addend, HALF, COMPILED)
        scaled += (times_plus(centred, scale, middle, HALF, COMPILED),)
    return scaled


@triton.jit
def scale_pairs(scales, offsets, BITS: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """What `scaled_numbers` takes for two tokens whose values are (code - 2^(BITS - 1) + offset) scale."""
    UNIT: tl.constexpr = 2.0 ** (BITS - 1) if HALF else 1.0
    scale = pair_of(scales[0] * UNIT, scales[1] * UNIT, HALF, COMPILED)
    return scale, pair_of(offsets[0] * scales[0], offsets[1] * scales[1], HALF, COMPILED)


@triton.jit
def query_fragments(
    rows, there, q, WIDTH: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Queries as B, rotated in blocks of TURN columns: two pairs for each 16 columns.

    Thread (r, q) has columns 32 j + 8 q to 32 j + 8 q + 7 of query r for each j; `rows` is where it begins.
    """
    numbers = ()
    for j in tl.static_range((WIDTH + 31) // 32):
        column = (32 * j + 8 * q)[:, None] + tl.arange(0, 8)[None, :]
        loaded = tl.load(rows[:, None] + column, mask=there[:, None] & (column < WIDTH), other=0)
        patterns = columns_of(loaded.to(tl.int32), 8)
        for e in tl.static_range(8):
            numbers += (float_of(patterns[e], HALF),)
    numbers = _turned(numbers, q, TURN, COMPILED)
    fragments = ()
    for g in tl.static_range(0, len(numbers), 4):
        first = pair_of(numbers[g], numbers[g + 1], HALF, COMPILED)
        fragments += ((first, pair_of(numbers[g + 2], numbers[g + 3], HALF, COMPILED)),)
    return fragments


@triton.constexpr_function
def _distance(level):
    """How far numbers that a level of the transform adds lie apart in a thread's tuple."""
    return 1 << (level if level < 3 else level - 2)


@triton.jit
def _turned(numbers, q, TURN: tl.constexpr, COMPILED: tl.constexpr):
    """The orthonormal Hadamard transform of blocks of TURN columns, as `query_fragments` deals them out."""
    turned = numbers
    for level in tl.static_range(8):
        if 1 << level < TURN:
            before = turned
            turned = ()
            for i in tl.static_range(len(numbers)):
                if level == 3 or level == 4:  # of bits 3 and 4 of a column's number each thread has one
                    sign = tl.where((q & (1 << (level - 3))) == 0, 1.0, -1.0)
                    turned += (exchanged(before[i], 1 << (level - 3), COMPILED) + sign * before[i],)
                elif i & _distance(level):
                    turned += (before[i - _distance(level)] - before[i],)
                else:
                    turned += (before[i] + before[i + _distance(level)],)
    if TURN > 1:
        before = turned
        turned = ()
        for i in tl.static_range(len(numbers)):
            turned += (before[i] * TURN**-0.5,)
    return turned


@triton.jit
def group_sums(
    fragments, GROUPS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr
):
    """Sums of the columns of each group, EACH times 32, of the queries 2 q and 2 q + 1."""
    one = twice(tl.full([32], 1, tl.float32), HALF)
    zero = tl.zeros([32], tl.float32)
    sums = ()
    for g in tl.static_range(GROUPS):
        quad = zero, zero, zero, zero
        for n in tl.static_range(2 * EACH):
            if 2 * g * EACH + n < len(fragments):
                quad = multiply((one, one, one, one), fragments[2 * g * EACH + n], quad, 1, HALF, COMPILED)
        sums += ((quad[0], quad[1]),)
    return sums


@triton.jit
def group_patterns(ptr, token, COUNT: tl.constexpr):
    """The COUNT elements, each of one group or of several, that tokens [32] have in an array: a tuple."""
    EACH: tl.constexpr = power_of_two(COUNT)
    return load_columns(ptr + token * COUNT, token * 0, COUNT, EACH, EACH == COUNT)


@triton.jit
def group_scale(patterns, G: tl.constexpr, GROUPED: tl.constexpr, COMPILED: tl.constexpr):
    """The scale of group G, fp32: that of a byte (quantizers.kv_groups), or a bf16 in the plain form."""
    if not GROUPED:
        number = (patterns[0].to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif patterns[0].dtype == tl.uint8:
        number = scale_of_byte(patterns[G].to(tl.int32))
    else:
        EACH: tl.constexpr = patterns[0].dtype.primitive_bitwidth // 8
        number = scale_of_byte(under(patterns[G // EACH].to(tl.int32), 0, G % EACH, COMPILED))
    return number


@triton.jit
def code_offset(
    patterns, is_first, G: tl.constexpr, MORE: tl.constexpr, GROUPED: tl.constexpr, BITS: tl.constexpr,
    HAS_EXTRA: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """MORE, and what is added to a code of group G before it is multiplied with the scale: fp32, exact.

    That is the zero point, negative. In the plain form it is half of the largest code, and the first token
    may have a larger one (HAS_EXTRA).
    """
    LESS: tl.constexpr = MORE - ((1 << BITS) - 1) / 2
    UNIT: tl.constexpr = 2.0 ** (BITS - 7)
    if not GROUPED:
        offset = tl.full([32], LESS, tl.float32)
        if HAS_EXTRA:
            offset = tl.where(is_first, LESS - (1 << BITS) / 2, offset)
    elif patterns[0].dtype == tl.int8:
        offset = patterns[G].to(tl.float32) * UNIT + LESS
    else:
        EACH: tl.constexpr = patterns[0].dtype.primitive_bitwidth // 8
        word = patterns[G // EACH].to(tl.int32) ^ -2139062144  # 128 added to each byte
        above = under(word, 0x4B000000, G % EACH, COMPILED).to(tl.float32, bitcast=True)  # 2^23 + 128 + zero
        if BITS < 7:
            offset = above * UNIT + (LESS - 8388736.0 * UNIT)
        else:  # that sum of constants is no fp32
            offset = (above - 8388736.0) * UNIT + LESS
    return offset
