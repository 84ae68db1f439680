"""The table that the coder works with, built from a histogram by integer arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from . import cpu
from .numbers import SCALE

Ints = npt.NDArray[np.int64]

PALETTE = {1: 256, 2: 16}
"""Largest palette by group: a symbol has 8 bits."""

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
        if bool((palette[1:] <= palette[:-1]).any()):
            raise ValueError("the palette does not rise")
        if self.group == 2 and int(palette[-1]) > 255:
            raise ValueError("pairs are for exponents of at most 8 bits")
        if not 1 <= frequencies.size <= 256:
            raise ValueError(f"{frequencies.size} frequencies")
        if int(frequencies.sum()) != SCALE or int(frequencies.max()) == SCALE:
            raise ValueError(f"the frequencies do not add up to {SCALE}, or there is only one")

    @classmethod
    def unchecked(
        cls, group: int, palette: npt.NDArray[np.uint16], frequencies: npt.NDArray[np.uint16]
    ) -> Table:
        """A table of numbers that obey all rules, as those that a GPU made do: the checks take 10 us."""
        table = object.__new__(cls)
        table.__dict__.update(group=group, palette=palette, frequencies=frequencies)
        return table

    def keys(self, exponents: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        """Exponents seen in the groups that a symbol stands for."""
        return exponents.view(np.uint16) if self.group == 2 else exponents

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
    def decoder(self) -> npt.NDArray[np.uint64]:
        """For each of 4,096 slots: frequency | (slot - start of the symbol) << 16 | exponents << 32."""
        f = self.frequencies.astype(np.int64)
        symbol = np.repeat(np.arange(f.size), f)
        offset = np.arange(SCALE) - np.repeat(np.cumsum(f) - f, f)
        return (f[symbol] | offset << 16 | self.exponents.astype(np.int64)[symbol] << 32).astype(np.uint64)

    @cached_property
    def symbol_rows(self) -> npt.NDArray[np.int32]:
        """Frequencies, starts and palette, int32 [3 * 256]: of these a GPU makes its table."""
        rows = np.zeros((3, 256), np.int32)
        rows[0, : self.frequencies.size] = self.frequencies
        rows[1] = np.cumsum(rows[0]) - rows[0]
        rows[2, : self.palette.size] = self.palette
        return rows.reshape(-1)

    @cached_property
    def encoder(self) -> npt.NDArray[np.uint64]:
        """Two numbers for each of 256 symbols: the frequency's reciprocal, and frequency | start << 16."""
        facts = np.zeros(512, np.uint64)
        cpu.fill_encoder(self.frequencies.astype(np.int64), facts)
        return facts

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
        lut = np.empty(1 << 16, np.uint16)
        cpu.fill_symbols(self.group, self.palette.astype(np.int64), f, lut)
        return lut


def build_table(exponents: Ints, pairs: Ints | None) -> Table:
    """Choose group, palette and frequencies for a histogram.

    `exponents[e]` counts exponent e; `pairs[e0 | e1 << 8]` counts neighbours, or is None where exponents have
    more than 8 bits. At least one weight must have been counted. `triton/device_table.py` does the same on a
    GPU.
    """
    total = int(exponents.sum())
    if pairs is not None and total > 1:
        palette = _most_frequent(exponents, PALETTE[2])
        inside = int(exponents[palette].sum())
        if (total - inside) << OUTSIDE_BITS <= total:
            counts = np.zeros((16, 16), np.int64)
            counts[: palette.size, : palette.size] = pairs.reshape(256, 256)[np.ix_(palette, palette)]
            return quantised_table(2, palette, counts.reshape(-1))
    palette = _most_frequent(exponents, PALETTE[1])
    return quantised_table(1, palette, exponents[palette])


def _most_frequent(exponents: Ints, limit: int) -> Ints:
    """At most `limit` exponents, the most frequent, in rising order; of equals the smaller."""
    order = np.argsort(-exponents, kind="stable")[:limit]
    return np.sort(order[exponents[order] > 0]).astype(np.int64)


def quantised_table(group: int, palette: Ints, counts: Ints) -> Table:
    """The table of a palette with the frequencies that follow from how often each symbol occurs."""
    every = np.zeros(256, np.int64)
    every[: counts.size] = counts
    frequencies = cpu.quantise(every)
    frequencies = frequencies[: int(np.flatnonzero(frequencies)[-1]) + 1]
    return Table(group, palette.astype(np.uint16), frequencies.astype(np.uint16))
