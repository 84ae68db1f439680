"""Queries, and packed codes of keys and values, as operands of m16n8k16, in Triton.

A warp works on arrays [32], an element a thread. Thread (r, q) has a piece of a token's columns: 8 CHUNKS
that follow each other. Words of a piece are a tuple for each plane of its codes, the widest plane first.
All operands are fp16, whatever the dtype of the query: a byte beside a code makes the fp16 1024 + code of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import (
    exchanged,
    float_of,
    halves_together,
    masked_or,
    multiply,
    pair_of,
    side_by_side,
    times_plus,
    twice,
    under,
)
from neuzip.kernels.kv_cache.triton.groups import power_of_two


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
    """EACH elements at `rows`, the first being number `begin` of COUNT; 0 beyond the last, unless FULL."""
    more = tl.arange(0, EACH)[None, :]
    if FULL:
        loaded = tl.load(rows[:, None] + more)
    else:
        loaded = tl.load(rows[:, None] + more, mask=begin[:, None] + more < COUNT, other=0)
    return columns_of(loaded, EACH)


@triton.jit
def plane_rows(
    rows, n, CHUNKS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr
):  # fmt: skip
    """Where in each plane of tokens at `rows` the words of the pieces [32] n are."""
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        planes += (rows + n * (CHUNKS * WIDTHS[p]) // 4,)
        rows += COUNTS[p]
    return planes


@triton.jit
def piece_words(
    rows, offset, n, MORE: tl.constexpr, CHUNKS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Words of the pieces n + MORE, shifted so that the first code is at bit 0.

    `rows` are the `plane_rows` of n, and the token is `offset` words behind. MORE is a multiple of 4. FULL:
    no piece reaches beyond the row.
    """
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        planes += (_plane_words(rows[p], offset, n, MORE, CHUNKS * WIDTHS[p], COUNTS[p], FULL),)
    return planes


@triton.jit
def _plane_words(
    rows, offset, n, MORE: tl.constexpr, EACH: tl.constexpr, COUNT: tl.constexpr, FULL: tl.constexpr
):
    """`piece_words` of one plane: EACH are a code's bits times CHUNKS."""
    MORE_WORDS: tl.constexpr = MORE * EACH // 4
    rows += offset + MORE_WORDS
    begin = n * EACH // 4 + MORE_WORDS
    if EACH >= 4:
        words = load_columns(rows, begin, COUNT, EACH // 4, FULL)
    else:  # several threads have parts of one word
        one = load_columns(rows, begin, COUNT, 1, FULL)
        words = ((one[0] >> (n % (4 // EACH) * (2 * EACH))),)
    return words


@triton.constexpr_function
def _four(byte):
    """A byte four times, as an int32."""
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


@triton.jit
def column_codes(planes, WIDTHS: tl.constexpr, G: tl.constexpr):
    """Codes of columns 4 G to 4 G + 3 of a piece, a byte each."""
    codes = planes[0][0] & 0
    for p in tl.static_range(len(WIDTHS)):
        field = planes[p][G * WIDTHS[p] // 8] >> (G * WIDTHS[p] % 8)
        if WIDTHS[p] < 8:
            field = field & _four((1 << WIDTHS[p]) - 1)
        codes = (codes << WIDTHS[p]) | field
    return codes


@triton.jit
def key_numbers(planes, WIDTHS: tl.constexpr, G: tl.constexpr, COMPILED: tl.constexpr):
    """1024 + code for columns 4 G to 4 G + 3 of a token: pairs of the first two and of the last two."""
    codes = column_codes(planes, WIDTHS, G)
    return side_by_side(codes, tl.full([32], _four(0x64), tl.int32), COMPILED)


@triton.jit
def words_of_two(one, other, COMPILED: tl.constexpr):
    """Words of a piece of two tokens: columns 4 g and 4 g + 1 of both, then 4 g + 2 and 4 g + 3."""
    lower = ()
    upper = ()
    for p in tl.static_range(len(one)):
        low = ()
        high = ()
        for i in tl.static_range(len(one[p])):
            both = halves_together(one[p][i], other[p][i], COMPILED)
            low += (both[0],)
            high += (both[1],)
        lower += (low,)
        upper += (high,)
    return lower, upper


@triton.jit
def value_numbers(
    planes, WIDTHS: tl.constexpr, G: tl.constexpr, CENTRE: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """code - CENTRE, exact, for two columns of two tokens (`words_of_two`): a pair of tokens for each column.

    Codes of one plane stay where they are in their byte, which spares a shift: 1024 + code 2^PLACE.
    """
    PLACE: tl.constexpr = G * WIDTHS[0] % 8 if len(WIDTHS) == 1 else 0
    FIELD: tl.constexpr = ((1 << WIDTHS[0]) - 1) << PLACE if len(WIDTHS) == 1 else 0xFF
    codes = planes[0][G * WIDTHS[0] // 8] if len(WIDTHS) == 1 else column_codes(planes, WIDTHS, G)
    unit = twice(tl.full([32], 2.0**-PLACE, tl.float32), True)
    less = twice(tl.full([32], -(1024 * 2.0**-PLACE + CENTRE), tl.float32), True)
    first = masked_or(codes, FIELD * 0x00010001, 0x64006400, COMPILED)
    second = masked_or(codes >> 8, FIELD * 0x00010001, 0x64006400, COMPILED)
    return times_plus(first, unit, less, True, COMPILED), times_plus(second, unit, less, True, COMPILED)


@triton.jit
def query_numbers(
    rows, there, q, WIDTH: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Queries rotated in blocks of TURN columns, fp32; HALF: they are fp16, else bf16.

    Thread (r, q) has columns 32 j + 8 q to 32 j + 8 q + 7 of query r for each j; `rows` is where it begins.
    """
    numbers = ()
    for j in tl.static_range((WIDTH + 31) // 32):
        column = (32 * j + 8 * q)[:, None] + tl.arange(0, 8)[None, :]
        loaded = tl.load(rows[:, None] + column, mask=there[:, None] & (column < WIDTH), other=0)
        patterns = columns_of(loaded.to(tl.int32), 8)
        for e in tl.static_range(8):
            numbers += (float_of(patterns[e], HALF),)
    return _turned(numbers, q, TURN, COMPILED)


@triton.jit
def query_unit(tiles):
    """The power of two by which queries are multiplied, and its inverse: the largest becomes 2^14 or more.

    fp16 then has 11 bits for all numbers down to 2^-28 of the largest.
    """
    largest = tl.zeros([32], tl.float32)
    for n in tl.static_range(len(tiles)):
        for i in tl.static_range(len(tiles[n])):
            largest = tl.maximum(largest, tl.abs(tiles[n][i]))
    exponent = tl.max(largest.to(tl.int32, bitcast=True) >> 23, 0)
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    unit = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_fragments(numbers, unit, COMPILED: tl.constexpr):
    """`query_numbers` times a unit as B: two pairs for each 16 columns."""
    fragments = ()
    for g in tl.static_range(0, len(numbers), 4):
        first = pair_of(numbers[g] * unit, numbers[g + 1] * unit, True, COMPILED)
        fragments += ((first, pair_of(numbers[g + 2] * unit, numbers[g + 3] * unit, True, COMPILED)),)
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
def group_sums(fragments, GROUPS: tl.constexpr, EACH: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of the columns of each group, EACH times 32, of the queries 2 q and 2 q + 1."""
    one = twice(tl.full([32], 1, tl.float32), True)
    zero = tl.zeros([32], tl.float32)
    sums = ()
    for g in tl.static_range(GROUPS):
        quad = zero, zero, zero, zero
        for n in tl.static_range(2 * EACH):
            if 2 * g * EACH + n < len(fragments):
                quad = multiply((one, one, one, one), fragments[2 * g * EACH + n], quad, 1, True, COMPILED)
        sums += ((quad[0], quad[1]),)
    return sums


@triton.jit
def group_patterns(rows, offset, COUNT: tl.constexpr):
    """The COUNT elements, of one group each or of several, at `offset` behind `rows` [32]: a tuple."""
    EACH: tl.constexpr = power_of_two(COUNT)
    return load_columns(rows + offset, tl.zeros([32], tl.int32), COUNT, EACH, EACH == COUNT)


@triton.jit
def where_counted(patterns, counts):
    """`group_patterns` of the tokens that count, and zeros for the others."""
    counted = ()
    for i in tl.static_range(len(patterns)):
        counted += (tl.where(counts, patterns[i], 0).to(patterns[i].dtype),)
    return counted


@triton.jit
def group_scale(patterns, G: tl.constexpr, GROUPED: tl.constexpr):
    """The scale of group G, fp32: 32 times that of a byte (quantizers.kv_groups), or a bf16 if plain."""
    if not GROUPED:
        number = float_of(patterns[0].to(tl.int32), False)
    else:
        EACH: tl.constexpr = patterns[0].dtype.primitive_bitwidth // 8
        word = patterns[G // EACH].to(tl.int32)
        if G % EACH % 2 == 0:  # two scales at once: a byte << 7 is an fp16
            halves = (word & 0x00FF00FF) << 7
        else:
            halves = (word >> 1) & 0x7F807F80
        number = float_of(halves >> (16 * (G % EACH // 2)), True)
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
