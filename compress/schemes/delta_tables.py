"""Choices of the coder of deltas: how many bits stay raw, which tables the digits have, and tables as words.

They are made in integers, as the bytes must not depend on a machine's logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from neuzip.compress.pieces import Map, padded, pieces
from neuzip.errors import NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.delta import Digits, sums
from neuzip.kernels.float_fields import Bits
from neuzip.kernels.rans.numbers import HEADER_WORDS

from .coded_blocks import TABLE_HEAD

Words = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int64]

MOST_LISTED = (HEADER_WORDS - 1) // 2
"""Digits of a block that are listed: each takes two words, and a coded block takes HEADER_WORDS at least."""

SYMBOL_BITS = 16
"""Bits of a digit."""

MOST_TABLES = 255
"""Tables of a digit that a reader takes."""


def choose_low(counts: Sequence[int]) -> int:
    """How many bits to leave raw. `counts[n]` are the differences of n bits.

    The least estimate, in integers, as the bytes must not depend on a machine's logarithms: the entropy of
    the lengths, and the bits below the leading one. What is longer than a palette can hold is an escape.
    """
    numel, longest = sum(counts), max(length for length, n in enumerate(counts) if n)

    def estimate(low: int) -> int:
        cost = numel * low << 8
        shorter = [sum(counts[: low + 1]), *counts[low + 1 : longest + 1]]
        for length, n in enumerate(shorter):
            if n:
                below = length - 1 if length <= 8 else 32 * -(-length // SYMBOL_BITS)
                cost += n * (_log2(numel) - _log2(n) + (max(below, 0) << 8))
        return cost

    return min(range(longest), key=estimate)


def _log2(n: int) -> int:
    """The logarithm in 1/256, straight between powers of two."""
    whole = n.bit_length() - 1
    return (whole << 8) + (n << 8 >> whole) - 256


@dataclass(frozen=True)
class DeltaTables:
    """The tables of a digit, and by the bucket of a block which is its."""

    tables: list[rans.Table]
    by_bucket: dict[int, int]


def choose_tables(differences: Bits, cut: Digits, digit: int, parallel: Map) -> DeltaTables:
    """Tables for those blocks of a digit that are coded: one for blocks whose digits have as many bits.

    Buckets that are next to each other share one where that takes less.
    """

    def count(piece: tuple[int, int]) -> dict[int, Ints]:
        symbols = cut.take(differences[slice(*piece)], digit)
        buckets, counted = buckets_of(symbols), {}
        for bucket in set(buckets) - {None}:
            own = [part for part, its in zip(blocks_of(symbols), buckets, strict=True) if its == bucket]
            counted[bucket] = np.bincount(np.concatenate(own))
        return counted  # type: ignore[return-value]

    counts: dict[int, Ints] = {}
    for counted in parallel(count, pieces(differences.size)):
        for bucket, own in counted.items():
            counts[bucket] = _added(counts[bucket], own) if bucket in counts else own
    groups = [([bucket], counts[bucket]) for bucket in sorted(counts)]
    costs = [_cost(own) for _, own in groups]
    while len(groups) > 1:
        merged = [_added(a, b) for (_, a), (_, b) in pairwise(groups)]
        after = [_cost(own) for own in merged]
        saved = [a + b - both for (a, b), both in zip(pairwise(costs), after, strict=True)]
        best = max(range(len(saved)), key=saved.__getitem__)
        if saved[best] <= 0:
            break
        groups[best : best + 2] = [(groups[best][0] + groups[best + 1][0], merged[best])]
        costs[best : best + 2] = [after[best]]
    tables = [rans.build_table(_added(own, np.zeros(1 << SYMBOL_BITS, np.int64)), None) for _, own in groups]
    return DeltaTables(tables, {b: number for number, (buckets, _) in enumerate(groups) for b in buckets})


def _added(a: Ints, b: Ints) -> Ints:
    """The sum of two histograms, of which one may be shorter."""
    longer, shorter = (a, b) if a.size >= b.size else (b, a)
    total = longer.astype(np.int64)
    total[: shorter.size] += shorter
    return total


def _cost(counts: Ints) -> int:
    """About how many 1/256 bits digits take that occur so often, their table included."""
    counts = np.sort(counts[counts > 0])
    total, escaped = int(counts.sum()), counts[:-256].sum() if counts.size > 256 else 0
    palette = counts[-256:]
    coded = int((palette * (_log2(total) - _log2s(palette))).sum()) + 40 * 256 * int(escaped)
    return coded + 256 * 16 * (TABLE_HEAD + palette.size + min(256, 2 * palette.size))


def _log2s(n: Ints) -> Ints:
    """`_log2` of many."""
    whole = np.frexp(n.astype(np.float64))[1].astype(np.int64) - 1
    return np.asarray((whole << 8) + (n << 8 >> whole) - 256)


def blocks_of(symbols: Words) -> list[Words]:
    return [symbols[at : at + rans.BLOCK] for at in range(0, symbols.size, rans.BLOCK)]


def buckets_of(symbols: Words) -> list[int | None]:
    """For every block how many bits its digits have, in half octaves; None for one that is listed."""
    buckets: list[int | None] = []
    for part, (changed, bits) in zip(blocks_of(symbols), sums(symbols, rans.BLOCK).tolist(), strict=True):
        of_full = bits * rans.BLOCK // part.size
        whole = of_full.bit_length() - 1
        buckets.append(2 * whole + (of_full >> whole - 1 & 1) if changed > MOST_LISTED else None)
    return buckets


def table_words(table: rans.Table) -> Words:
    head = [table.group, table.palette.size, table.frequencies.size]
    return np.concatenate([np.array(head, np.uint16), table.palette, table.frequencies])


def parse_tables(words: Words, cut: Digits, digits: int) -> list[list[rans.Table]]:
    """The tables of all digits; raises NeuzipError when one breaks a rule."""
    tables: list[list[rans.Table]] = []
    at = 0
    for digit in range(digits):
        if at >= words.size or words[at] > MOST_TABLES:
            raise NeuzipError(
                f"the stream 'table' does not say how many tables digit {digit} has, or too many"
            )
        tables.append([])
        count, at = int(words[at]), at + 1
        for _ in range(count):
            table, at = _parse_table(words, at, cut.width(digit))
            tables[-1].append(table)
    if words.size * 2 != padded(2 * at):
        raise NeuzipError("the stream 'table' does not have the length that it states")
    return tables


def _parse_table(words: Words, at: int, width: int) -> tuple[rans.Table, int]:
    """The table at a word, for digits of `width` bits, and where it ends."""
    head = [int(w) for w in words[at : at + TABLE_HEAD]]
    palette_at = at + TABLE_HEAD
    end = palette_at + sum(head[1:])
    if len(head) < TABLE_HEAD or end > words.size:
        raise NeuzipError("the stream 'table' ends before its last table")
    palette, frequencies = words[palette_at : palette_at + head[1]], words[palette_at + head[1] : end]
    if head[0] != 1:
        raise NeuzipError(f"the stream 'table' has the group {head[0]}; a delta's is 1")
    try:
        table = rans.Table(head[0], palette, frequencies)
    except ValueError as error:
        raise NeuzipError(f"the stream 'table' is not valid: {error}") from error
    if int(palette[-1]) >> width:
        raise NeuzipError(f"the stream 'table' has digits of more than {width} bits")
    return table, end
