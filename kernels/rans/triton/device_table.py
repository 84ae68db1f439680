"""The coder's table made on a GPU from what the census counted: the numbers of `model.build_table`.

A program makes the table of a tensor, by the same integer arithmetic as the CPU, step by step:

1. How often each exponent occurs, from the counters of pairs.
2. The rank of each exponent: how many occur more often, or as often and are smaller. The palette are the
   first 16, if nearly all weights have one of these, or else the first 256.
3. How often each symbol occurs, and its frequency: its share of SCALE rounded down, and at least 1. What is
   missing then goes, one by one, to the symbol that is furthest below its share.
4. What the encoder needs of each symbol. Another kernel spreads that over all keys.

    tables  int32 [tensors, TABLE]: a head of HEAD numbers, 256 of a palette, 256 frequencies
    places  int32 [tensors, ...]: each exponent's place in the palette, or -1; then, for pairs, the symbols
            that code an escape beside an exponent that is first, and beside one that is second, or -1
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.model import OUTSIDE_BITS, PALETTE
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, RARE_BITS, SCALE, SCALE_BITS
from neuzip.kernels.rans.triton.batch import numel_of, weights_of
from neuzip.kernels.rans.triton.census import COUNTERS, WINDOW, slot_of

HEAD = 8
GROUP, SIZE, KEPT, ADDENDS, FILLER, BEST, WORDS = range(7)
"""Numbers of the head: weights of a symbol, exponents of the palette, mantissa bits that any weight uses,
whether a symbol is divided with an addend, the exponent that fills up a last run, the most frequent one of
all symbols, words that will be enough in all likelihood, in units of WORDS_UNIT."""

WORDS_UNIT = 64

PALETTE_AT, FREQUENCIES_AT, TABLE = HEAD, HEAD + 256, HEAD + 512

# What is known of a symbol, its facts, in 64 bits: a multiplier in the lower half; in the upper half its
# start from bit 19 on, a shift from 15, the escapes at 13 and 14, an addend at 12, and below that SCALE less
# its frequency.
START, SHIFT, ESCAPES, ADDEND = 19, 15, 13, 12

ROW = 256 + 6
"""Entries from the facts of a pair to those of the pair with the next second exponent. Were it 256, all pairs
with the same first exponent would lie in one bank of the first-level cache, and wait for each other."""

_GROUP, _SIZE, _KEPT, _ADDENDS, _FILLER, _BEST, _WORDS = (
    tl.constexpr(v) for v in (GROUP, SIZE, KEPT, ADDENDS, FILLER, BEST, WORDS)
)
_WORDS_UNIT, _BLOCK, _HEADER_WORDS, _SCALE_BITS = (
    tl.constexpr(v) for v in (WORDS_UNIT, BLOCK, HEADER_WORDS, SCALE_BITS)
)
_PALETTE_AT, _FREQUENCIES_AT, _TABLE = (tl.constexpr(v) for v in (PALETTE_AT, FREQUENCIES_AT, TABLE))
_COUNTERS, _WINDOW, _SCALE = tl.constexpr(COUNTERS), tl.constexpr(WINDOW), tl.constexpr(SCALE)
_RARE_BITS, _OUTSIDE_BITS = tl.constexpr(RARE_BITS), tl.constexpr(OUTSIDE_BITS)
_PAIRS, _SINGLES = tl.constexpr(PALETTE[2]), tl.constexpr(PALETTE[1])
_START, _ESCAPES, _ADDEND, _ROW = (tl.constexpr(v) for v in (START, ESCAPES, ADDEND, ROW))


@triton.jit
def _members(square_ptr, number, known, SIDE: tl.constexpr):
    """How often each number is the first or the second of a pair, by counters [second, first] of a side."""
    counts = tl.zeros(number.shape, tl.int64)
    for at in range(0, SIDE, 16):
        other = at + tl.arange(0, 16)[:, None]
        first = tl.load(square_ptr + (other * SIDE + number[None, :]), mask=known[None, :], other=0)
        second = tl.load(square_ptr + (number[None, :] * SIDE + other), mask=known[None, :], other=0)
        counts += tl.sum(first + second, 0)
    return counts


@triton.jit
def _exponent_counts(
    counters_ptr, elsewhere_ptr, base, last, numel, e, EXPONENT: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """How often each exponent `e` occurs. last: the exponent of the last weight."""
    if EXPONENT > 8:
        return tl.load(counters_ptr + e)
    slot = e - base
    inside = (slot >= 0) & (slot < WINDOW)
    counts = _members(counters_ptr, slot, inside, WINDOW)
    after_zero = tl.load(counters_ptr + WINDOW * WINDOW + slot, mask=inside, other=0)
    before_zero = tl.load(counters_ptr + WINDOW * (WINDOW + 1) + slot, mask=inside, other=0)
    of_both = after_zero + before_zero
    zeros = tl.sum(of_both) + 2 * tl.load(counters_ptr + WINDOW * (WINDOW + 2))
    counts += of_both + tl.where(e == 0, zeros, 0)
    if EXPONENT == 8:  # noqa: SIM102  (the compiler decides the first, the GPU the second)
        if tl.sum(counts) < numel // 2 * 2:
            counts += _members(elsewhere_ptr, e, e >= 0, 256)
    # The last weight of an odd number has no neighbour.
    return counts + ((e == last) & (numel % 2 == 1)).to(tl.int64)


@triton.jit
def _ranks(counts_ptr, counts, e, LENGTH: tl.constexpr):
    """The number of exponents that occur more often than each, or as often and are smaller."""
    key = counts * LENGTH + (LENGTH - 1 - e)  # one comparison in place of three
    rank = tl.zeros([LENGTH], tl.int32)
    for at in range(0, LENGTH, 16):
        other = at + tl.arange(0, 16)
        others = tl.load(counts_ptr + other) * LENGTH + (LENGTH - 1 - other)
        rank += tl.sum((others[:, None] > key[None, :]).to(tl.int32), 0)
    return rank


@triton.jit
def _symbol_counts(
    counters_ptr, elsewhere_ptr, counts_ptr, palette_ptr, base, size, is_pairs, symbol,
    EXPONENT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """How often each of 256 symbols occurs."""
    is_single = symbol < size
    exponent = tl.load(palette_ptr + symbol, mask=is_single, other=0)
    counts = tl.load(counts_ptr + exponent, mask=is_single, other=0)
    if EXPONENT <= 8:
        first, second = symbol & 15, symbol >> 4
        is_pair = (first < size) & (second < size)
        e0 = tl.load(palette_ptr + first, mask=is_pair, other=0)
        e1 = tl.load(palette_ptr + second, mask=is_pair, other=0)
        if EXPONENT == 8:
            slot = slot_of(e0, e1, base, WINDOW)
        else:
            slot = e0 | e1 * WINDOW
        of_pairs = tl.load(counters_ptr + slot, mask=is_pair & (slot >= 0), other=0)
        if EXPONENT == 8:
            of_pairs += tl.load(elsewhere_ptr + (e0 | e1 << 8), mask=is_pair & (slot < 0), other=0)
        counts = tl.where(is_pairs, of_pairs, counts)
    return counts


@triton.jit
def _quantised(counts, symbol, SCALE: tl.constexpr, RARE_BITS: tl.constexpr):
    """Frequencies that add up to SCALE, int64 [256]: see `cpu.quantise`."""
    frequent = tl.where((counts << RARE_BITS) >= tl.sum(counts), counts, 0)
    total = tl.sum(frequent)
    share = frequent * SCALE
    f = tl.where(frequent > 0, tl.maximum(share // total, 1), 0)
    below = share - f * total
    missing = SCALE - tl.sum(f).to(tl.int32)
    for _ in range(missing):
        chosen = (symbol == tl.argmax(below, 0)).to(tl.int64)
        f += chosen
        below -= chosen * total
    for _ in range(-missing):
        above = tl.where(f > 1, -below, -(1 << 62))
        chosen = (symbol == tl.argmax(above, 0)).to(tl.int64)
        f -= chosen
        below += chosen * total
    best = tl.argmax(f, 0)
    if tl.max(f) == SCALE:
        # A second symbol, which may have no meaning: it never occurs.
        other = tl.where(best == 0, 1, 0)
        f += (symbol == other).to(tl.int64) - (symbol == best).to(tl.int64)
    return f, best


@triton.jit
def _store_partners(f, size, partners_ptr):
    """Store the most frequent symbol that has each place of the palette first, and second, or -1."""
    i = tl.arange(0, 16)
    square = tl.reshape(f, [16, 16])  # [second, first]
    square = tl.where((i[:, None] < size) & (i[None, :] < size), square, 0)
    by_first = tl.where(tl.max(square, 0) > 0, tl.argmax(square, 0) * 16 + i, -1)
    by_second = tl.where(tl.max(square, 1) > 0, tl.argmax(square, 1) + i * 16, -1)
    tl.store(partners_ptr + i, by_first)
    tl.store(partners_ptr + 16 + i, by_second)


@triton.jit
def _estimated_words(f, counts, numel, is_pairs):
    """1 to 2 % more words, in units, than symbols that occur so often take by frequencies `f`.

    What the symbols are worth, the header of each block in full although the states there hold something, and
    as much as the codes of escapes may take.
    """
    is_coded = f > 0
    bits = _SCALE_BITS - tl.log2(tl.maximum(f, 1).to(tl.float32))
    words = tl.sum(tl.where(is_coded, counts.to(tl.float32) * bits, 0.0)) / 16
    escaped = tl.where(is_pairs, numel // 2, numel) - tl.sum(tl.where(is_coded, counts, 0))
    headers = (numel + _BLOCK - 1) // _BLOCK * _HEADER_WORDS
    words += (headers + escaped * tl.where(is_pairs, 5, 3)).to(tl.float32)
    return (words / _WORDS_UNIT).to(tl.int32) + 3


@triton.jit
def table_kernel(
    base_ptr, columns_ptr, counters_ptr, elsewhere_ptr, divisions_ptr,
    tables_ptr, places_ptr, counts_ptr, facts_ptr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, ELEMENT: tl.constexpr, LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Make the table of a tensor, and the facts of its symbols, int64 [256]. LENGTH: of `counts`, scratch.

    counters, elsewhere: what the census counted. divisions: `encoder_table.division_facts`.
    """
    row = tl.program_id(0)
    counters_ptr += row * (_COUNTERS + 2)
    elsewhere_ptr += row * (1 << 16)
    tables_ptr += row * _TABLE
    places_ptr += row * (LENGTH + 32)
    counts_ptr += row * LENGTH
    palette_ptr = tables_ptr + _PALETTE_AT
    numel = numel_of(columns_ptr, row, ENTRIES)
    weight = tl.load(weights_of(base_ptr, columns_ptr, row, ELEMENT, ENTRIES) + (numel - 1)).to(tl.int64)
    union = tl.load(counters_ptr + _COUNTERS)
    base = tl.load(counters_ptr + _COUNTERS + 1).to(tl.int32)
    last = (weight >> MANTISSA).to(tl.int32) & ((1 << EXPONENT) - 1)

    e = tl.arange(0, LENGTH)
    counts = _exponent_counts(counters_ptr, elsewhere_ptr, base, last, numel, e, EXPONENT, _WINDOW)
    tl.store(counts_ptr + e, counts)
    tl.debug_barrier()
    rank = _ranks(counts_ptr, counts, e, LENGTH)
    is_pairs = numel < 0
    if EXPONENT <= 8:
        outside = numel - tl.sum(tl.where(rank < _PAIRS, counts, 0))
        is_pairs = (numel > 1) & ((outside << _OUTSIDE_BITS) <= numel)
    member = (rank < tl.where(is_pairs, _PAIRS, _SINGLES)) & (counts > 0)
    place = tl.cumsum(member.to(tl.int32), 0) - 1
    size = tl.sum(member.to(tl.int32))
    tl.store(places_ptr + e, tl.where(member, place, -1))
    tl.store(palette_ptr + place, e, mask=member)
    tl.debug_barrier()

    symbol = tl.arange(0, 256)
    occurring = _symbol_counts(
        counters_ptr, elsewhere_ptr, counts_ptr, palette_ptr, base, size, is_pairs, symbol, EXPONENT, _WINDOW
    )
    f, best = _quantised(occurring, symbol, _SCALE, _RARE_BITS)
    tl.store(tables_ptr + _FREQUENCIES_AT + symbol, f.to(tl.int32))
    _store_partners(f.to(tl.int32), size, places_ptr + LENGTH)
    division = tl.load(divisions_ptr + f)
    start = tl.cumsum(f, 0) - f
    tl.store(facts_ptr + row * 256 + symbol, division + (start << (_START + 32)))

    if EXPONENT <= 8:
        union |= tl.where(numel % 2 == 1, weight & ((1 << MANTISSA) - 1), 0)
    bit = tl.arange(0, 64)
    used = (bit < MANTISSA) & ((union & ((2 << bit.to(tl.int64)) - 1)) != 0)
    tl.store(tables_ptr + _GROUP, 1 + is_pairs.to(tl.int32))
    tl.store(tables_ptr + _SIZE, size)
    tl.store(tables_ptr + _KEPT, tl.sum(used.to(tl.int32)))
    tl.store(tables_ptr + _ADDENDS, tl.max((division >> (_ADDEND + 32)).to(tl.int32) & 1))
    tl.store(tables_ptr + _FILLER, tl.load(palette_ptr + tl.where(is_pairs, best & 15, best)))
    tl.store(tables_ptr + _BEST, best)
    tl.store(tables_ptr + _WORDS, _estimated_words(f, occurring, numel, is_pairs))


@triton.jit
def spread_kernel(
    tables_ptr, places_ptr, facts_ptr, coding_ptr, symbols_ptr,
    EXPONENT: tl.constexpr, LENGTH: tl.constexpr, KEYS: tl.constexpr, CODING: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """For each key, an exponent or a pair first | second << 8, its symbol with its escapes, as in
    `Table.symbols`, and the facts of that symbol: one look-up in place of two."""
    row = tl.program_id(0)
    key = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tables_ptr += row * _TABLE
    places_ptr += row * (LENGTH + 32)
    frequencies_ptr, partners_ptr = tables_ptr + _FREQUENCIES_AT, places_ptr + LENGTH
    best, is_pairs = tl.load(tables_ptr + _BEST), tl.load(tables_ptr + _GROUP) == 2
    keys = tl.where(is_pairs, 1 << 16, 1 << EXPONENT)
    if tl.program_id(1) * TILE < keys:
        is_key = key < keys
        if is_pairs:
            # Each layer over the one before: nothing in common with the table, one exponent, the whole pair.
            i, j = tl.load(places_ptr + (key & 0xFF)), tl.load(places_ptr + (key >> 8), mask=is_key, other=-1)
            by_first = tl.load(partners_ptr + i, mask=i >= 0, other=-1)
            by_second = tl.load(partners_ptr + 16 + j, mask=j >= 0, other=-1)
            pair = j * 16 + i
            is_known = tl.load(frequencies_ptr + pair, mask=(i >= 0) & (j >= 0), other=0) > 0
            symbol = tl.where(by_first >= 0, by_first | 0x200, best | 0x300)
            symbol = tl.where(by_second >= 0, by_second | 0x100, symbol)
            symbol = tl.where(is_known, pair, symbol)
        else:
            i = tl.load(places_ptr + key, mask=is_key, other=-1)
            is_known = tl.load(frequencies_ptr + i, mask=i >= 0, other=0) > 0
            symbol = tl.where(is_known, i, best | 0x100)
        fact = tl.load(facts_ptr + row * 256 + (symbol & 0xFF))
        tl.store(symbols_ptr + row.to(tl.int64) * KEYS + key, symbol.to(tl.int16), mask=is_key)
        tl.store(
            coding_ptr + row.to(tl.int64) * CODING + (key + (key >> 8) * (_ROW - 256)),
            fact | (symbol >> 8).to(tl.int64) << (32 + _ESCAPES),
            mask=is_key,
        )
