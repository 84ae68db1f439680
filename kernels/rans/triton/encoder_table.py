"""The tables of a batch as the encoder on a GPU reads them: what the symbol of each key needs, in 64 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.memory_part import MemoryPart, allocate
from neuzip.kernels.rans.model import Table
from neuzip.kernels.rans.numbers import SCALE
from neuzip.kernels.rans.triton import device_table
from neuzip.kernels.rans.triton.batch import ELEMENTS, Batch
from neuzip.kernels.rans.triton.device_table import (
    ADDEND,
    ADDENDS,
    FREQUENCIES_AT,
    GROUP,
    HEAD,
    KEPT,
    PALETTE_AT,
    SHIFT,
    SIZE,
    START,
    TABLE,
    WORDS,
    WORDS_UNIT,
)
from neuzip.kernels.rans.triton.lists import ENTRIES
from neuzip.kernels.tuning import launch_for

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncoderTables:
    """The tables of some tensors on the device, a row for each.

    `tables`, int32, are explained in device_table.py. `facts`, int64, has those of the symbol of every key,
    with its escapes, `coding` for a tensor; `symbols`, int16, the symbols, `keys` for a tensor. A key is an
    exponent, or a pair first | second << 8.
    """

    tables: torch.Tensor
    facts: MemoryPart
    symbols: MemoryPart
    coding: int
    keys: int

    def row(self, row: int) -> EncoderTables:
        """The table of a tensor by itself."""
        rows = row, row + 1
        facts, symbols = self.facts.rows(*rows, self.coding), self.symbols.rows(*rows, self.keys)
        return EncoderTables(self.tables[row : row + 1], facts, symbols, self.coding, self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, of all tensors that share the memory.

        0.68 MB for each, and 52 KB if exponents have more than 8 bits.
        """
        return self.tables.nbytes + self.facts.memory.nbytes


class HostTables:
    """What the host knows of the tables that a device made: `words`, int32 [tensors, TABLE].

    By tensor: `groups`, weights of a symbol; `kept_bits`, mantissa bits that any weight uses; `addends`,
    whether a symbol is divided with an addend; `rooms`, words that are enough in all likelihood.
    """

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self._words = words
        head = words[:, :HEAD].tolist()
        self.groups: list[int] = [row[GROUP] for row in head]
        self.kept_bits: list[int] = [row[KEPT] for row in head]
        self.addends: list[bool] = [row[ADDENDS] != 0 for row in head]
        self.rooms: list[int] = [row[WORDS] * WORDS_UNIT for row in head]

    def tables(self) -> list[Table]:
        """Palette and frequencies of each tensor."""
        palettes = self._words[:, PALETTE_AT:FREQUENCIES_AT].astype(np.uint16)
        frequencies = self._words[:, FREQUENCIES_AT:TABLE].astype(np.uint16)
        sizes = self._words[:, SIZE].tolist()
        # Up to the last symbol that occurs.
        symbols = (256 - (frequencies[:, ::-1] != 0).argmax(1)).tolist()
        return [
            Table.unchecked(group, palette[:size], own[:count])
            for group, palette, size, own, count in zip(
                self.groups, palettes, sizes, frequencies, symbols, strict=True
            )
        ]


@cache
def division_facts() -> Ints:
    """The facts of every frequency from 0 to SCALE - 1, but for the start.

    x // f is (x + addend) * multiplier >> 32 + shift for every x below f << 20. Let 2^(shift + 1) be the
    least power of two from f on, N = 32 + shift, up = -2^N mod f and down = 2^N mod f. Without an addend the
    multiplier ceil(2^N / f) is exact if f * 2^20 * up <= 2^N; with an addend of 1, floor(2^N / f) is if
    0 < down and f * 2^20 * down <= 2^N. One of the two holds: where neither is 0, they add up to f, one
    is at most f / 2, and f * f / 2 * 2^20 <= 2^N because f <= 2^12.

    For f = 1 there is no such multiplier: 2^32 - 1 gives x - 1. A start larger by SCALE - 1 makes that good.
    Nothing is divided by f = 0. Only frequencies above 2,048 have an addend.
    """
    f = np.arange(SCALE)
    d = np.maximum(f, 2)
    shift = np.frexp(d - 1)[1].astype(np.int64) - 1
    power = np.int64(1) << 32 + shift
    addend = (-power % d * d << 20 > power) & (f > 1)
    multiplier = np.where(f < 2, (1 << 32) - 1, np.where(addend, power // d, -(-power // d)))
    upper = (
        np.where(f == 1, SCALE - 1, 0) << START
        | shift << SHIFT
        | addend.astype(np.int64) << ADDEND
        | np.where(f > 0, SCALE - f, 0)
    )
    return np.asarray(upper << 32 | multiplier)


@cache
def _divisions_on(device: torch.device) -> torch.Tensor:
    """`division_facts` on a device, for ever: 32 KB."""
    with torch.inference_mode(False):
        return torch.from_numpy(division_facts()).to(device)


def make_tables(batch: Batch, counters: MemoryPart, elsewhere: MemoryPart) -> EncoderTables:
    """Make the tables of a batch of what its census counted, on the device."""
    fmt, n, device = batch.fmt, len(batch.bits), batch.device
    length = max(256, 1 << fmt.exponent_bits)
    keys = 1 << 16 if fmt.exponent_bits <= 8 else length
    coding = keys // 256 * device_table.ROW + 256
    tables = torch.empty(n, TABLE, dtype=torch.int32, device=device)
    facts, symbols, by_symbol, counts, places = allocate(
        device, (torch.int64, n * coding), (torch.int16, n * keys), (torch.int64, n * 256),
        (torch.int64, n * length), (torch.int32, n * (length + 32)),
    )  # fmt: skip
    launch(
        device_table.table_kernel, (n,),
        batch.base, batch.columns, counters, elsewhere, _divisions_on(device),
        tables, places, counts, by_symbol,
        EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, ELEMENT=ELEMENTS[fmt.bits], LENGTH=length,
        ENTRIES=ENTRIES, **launch_for("rans.table", device, exponents=1 << fmt.exponent_bits), device=device,
    )  # fmt: skip
    launch(
        device_table.spread_kernel, (n, keys // 1024),
        tables, places, by_symbol, facts, symbols,
        EXPONENT=fmt.exponent_bits, LENGTH=length, KEYS=keys, CODING=coding, TILE=1024, num_warps=4,
        device=device,
    )  # fmt: skip
    return EncoderTables(tables, facts, symbols, coding, keys)
