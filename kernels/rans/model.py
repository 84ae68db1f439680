"""The table that the coder works with, built from a histogram by integer arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .numbers import RECIPROCAL_BITS, SCALE

Ints = npt.NDArray[np.int64]

PALETTE = {1: 256, 2: 16}
"""Largest palette by group: a symbol has 8 bits."""

RARE_BITS = 16
"""A symbol below 2^-16 of all is an escape. The least frequency, 1 of 4,096, costs every other symbol
3.5e-4 bits; an escape costs about 40 bits. They break even at 2^-17, and a smaller table is the simpler."""

OUTSIDE_BITS = 9
"""Pairs are coded when less than 2^-9 of the weights are outside their 16 exponents."""


@dataclass(frozen=True)
class Table:
    """Palette and frequencies: all that a decoder has to know.

    A symbol of group 1 is an index into `palette`; of group 2, two: first | second << 4.
    `palette` holds exponents in rising order; `frequencies[s]` belongs to symbol s, adds up to 4,096, and is
    never 4,096 itself, so that it fits in 12 bits.
    """

    group: int
    palette: npt.NDArray[np.uint16]
    frequencies: npt.NDArray[np.uint16]

    def __post_init__(self) -> None:
        palette, frequencies = self.palette.astype(np.int64), self.frequencies.astype(np.int64)
        if self.group not in PALETTE:
            raise ValueError(f"group is 1 or 2, not {self.group}")
        if not 1 <= palette.size <= PALETTE[self.group]:
            raise ValueError(f"a palette of {palette.size} exponents")
        if bool((np.diff(palette) <= 0).any()):
            raise ValueError("the palette does not rise")
        if self.group == 2 and int(palette[-1]) > 255:
            raise ValueError("pairs are for exponents of at most 8 bits")
        if not 1 <= frequencies.size <= 256:
            raise ValueError(f"{frequencies.size} frequencies")
        if int(frequencies.sum()) != SCALE or int(frequencies.max()) == SCALE:
            raise ValueError(f"the frequencies do not add up to {SCALE}, or there is only one")

    @cached_property
    def exponents(self) -> npt.NDArray[np.uint16]:
        """The exponents of every symbol: one, or two as first | second << 8. 0 where it has no meaning."""
        wide = np.zeros(256, np.uint16)
        wide[: self.palette.size] = self.palette
        if self.group == 1:
            return wide
        s = np.arange(256)
        return np.asarray(wide[s & 15] | wide[s >> 4] << 8, np.uint16)

    @cached_property
    def decoder(self) -> npt.NDArray[np.uint32]:
        """For each of 4,096 slots: symbol | frequency << 8 | (slot - start of the symbol) << 20."""
        f = self.frequencies.astype(np.int64)
        symbol = np.repeat(np.arange(f.size), f)
        offset = np.arange(SCALE) - np.repeat(np.cumsum(f) - f, f)
        return (symbol | f[symbol] << 8 | offset << 20).astype(np.uint32)

    @cached_property
    def encoder(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Frequency, start and reciprocal of every symbol, as uint64[256]."""
        f = np.zeros(256, np.int64)
        f[: self.frequencies.size] = self.frequencies
        reciprocal = np.where(f > 0, -(-(1 << RECIPROCAL_BITS) // np.maximum(f, 1)), 0)
        return f.astype(np.uint64), (np.cumsum(f) - f).astype(np.uint64), reciprocal.astype(np.uint64)

    @cached_property
    def filler(self) -> int:
        """The exponent that fills up a last run: of the most frequent symbol."""
        return int(self.exponents[int(self.frequencies.argmax())]) & (0xFF if self.group == 2 else 0xFFFF)

    @cached_property
    def symbols(self) -> npt.NDArray[np.uint16]:
        """How the encoder codes an exponent, or a pair first | second << 8, as

            symbol | first is an escape << 8 | second is an escape << 9

        An escaped symbol is replaced by one that shares an exponent with it, or else by the most frequent.
        """
        f = np.zeros(256, np.int64)
        f[: self.frequencies.size] = self.frequencies
        best = int(f.argmax())
        size = self.palette.size
        s = np.flatnonzero(f)
        if self.group == 1:
            present = s[s < size]
            lut = np.full(1 << 16, best | 0x100, np.uint16)
            lut[self.palette[present]] = present
            return lut
        present = s[((s & 15) < size) & ((s >> 4) < size)]
        # Three layers, each over the one before: nothing in common, one exponent in common, in the table.
        lut = np.full((256, 256), best | 0x300, np.uint16)  # [second, first]
        by_frequency = present[np.argsort(f[present], kind="stable")]
        for s in by_frequency:
            lut[self.palette[s >> 4], :] = s | 0x100
        for s in by_frequency:
            column = lut[:, self.palette[s & 15]]
            column[column & 0x300 == 0x300] = s | 0x200
            lut[:, self.palette[s & 15]] = column
        exact = self.exponents[present]
        lut[exact >> 8, exact & 0xFF] = present
        return lut.reshape(-1)


def build_table(exponents: Ints, pairs: Ints | None) -> Table:
    """Choose group, palette and frequencies for a histogram.

    `exponents[e]` counts exponent e; `pairs[e0 | e1 << 8]` counts neighbours, or is None where exponents have
    more than 8 bits. At least one weight must have been counted.
    """
    if pairs is not None and int(pairs.sum()) > 0:
        palette = _most_frequent(exponents, PALETTE[2])
        inside = int(exponents[palette].sum())
        total = int(exponents.sum())
        if (total - inside) << OUTSIDE_BITS <= total:
            grid = pairs.reshape(256, 256)  # [second, first]
            counts = np.zeros((16, 16), np.int64)
            counts[: palette.size, : palette.size] = grid[np.ix_(palette, palette)]
            return _table(2, palette, counts.reshape(-1))
    palette = _most_frequent(exponents, PALETTE[1])
    return _table(1, palette, exponents[palette])


def _most_frequent(exponents: Ints, limit: int) -> Ints:
    """At most `limit` exponents, the most frequent, in rising order; of equals the smaller."""
    order = np.argsort(-exponents, kind="stable")[:limit]
    return np.sort(order[exponents[order] > 0]).astype(np.int64)


def _table(group: int, palette: Ints, counts: Ints) -> Table:
    frequencies = _quantise(np.pad(counts, (0, 256 - counts.size)))
    frequencies = frequencies[: int(np.flatnonzero(frequencies)[-1]) + 1]
    return Table(group, palette.astype(np.uint16), frequencies.astype(np.uint16))


def _quantise(counts: Ints) -> Ints:
    """Frequencies that add up to SCALE, in proportion to `counts`, at least 1 for all but the rare."""
    kept = np.where(counts << RARE_BITS >= counts.sum(), counts, 0)
    total = kept.sum()
    share = kept * SCALE  # of frequency, times total
    frequencies: Ints = np.where(kept > 0, np.maximum(share // total, 1), 0)
    while frequencies.sum() < SCALE:
        frequencies[np.argmax(share - frequencies * total)] += 1
    while frequencies.sum() > SCALE:
        surplus = frequencies * total - share
        frequencies[np.argmax(np.where(frequencies > 1, surplus, np.iinfo(np.int64).min))] -= 1
    if frequencies.max() == SCALE:
        # A second symbol, which may have no meaning: it never occurs.
        only = int(frequencies.argmax())
        frequencies[only] -= 1
        frequencies[1 if only == 0 else 0] += 1
    return frequencies
