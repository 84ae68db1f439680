"""A table as the encoder on a GPU reads it: for each key, what its symbol needs, in 64 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.cpu import fill_symbols
from neuzip.kernels.rans.model import Table
from neuzip.kernels.rans.numbers import SCALE

ROW = 256 + 6
"""Entries from the facts of a pair to those of the pair with the next second exponent. Were it 256, all pairs
with the same first exponent would lie in one bank of the first-level cache, and wait for each other."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncoderTable:
    """A table as the encoder reads it, on the device.

    `facts`, int64, has those of the symbol of every key, with its escapes; `symbols`, int16, the symbols. A
    key is an exponent, or a pair first | second << 8. `addends`: whether any symbol has one.
    """

    table: Table
    facts: torch.Tensor
    symbols: torch.Tensor
    addends: bool

    @property
    def nbytes(self) -> int:
        """Bytes on the device: 0.67 MB for pairs, 7 KB for single exponents of 8 bits."""
        return sum(array.untyped_storage().nbytes() for array in (self.facts, self.symbols))


# What is known of a symbol, its facts, in 64 bits: a multiplier in the lower half; in the upper half its
# start from bit 19 on, a shift from 15, the escapes at 13 and 14, an addend at 12, and below that SCALE less
# its frequency.
_START, _SHIFT, _ESCAPES, _ADDEND = 19, 15, 13, 12


@cache
def division_facts() -> Ints:
    """The facts of every frequency from 0 to SCALE - 1, but for the start.

    x // f is (x + addend) * multiplier >> 32 + shift for every x below f << 20. Let 2^(shift + 1) be the
    least power of two from f on, N = 32 + shift, up = -2^N mod f and down = 2^N mod f. Without an addend the
    multiplier ceil(2^N / f) is exact if f * 2^20 * up <= 2^N; with an addend of 1, floor(2^N / f) is if
    0 < down and f * 2^20 * down <= 2^N. One of the two holds: where neither is 0, they add up to f, one
    is at most f / 2, and f * f / 2 * 2^20 <= 2^N because f <= 2^12.

    For f = 1 there is no such multiplier: 2^32 - 1 gives x - 1. A start larger by SCALE - 1 makes that good.
    """
    f = np.arange(SCALE)
    d = np.maximum(f, 2)
    shift = np.frexp(d - 1)[1].astype(np.int64) - 1
    power = np.int64(1) << 32 + shift
    addend = (-power % d * d << 20 > power) & (f > 1)
    multiplier = np.where(f < 2, (1 << 32) - 1, np.where(addend, power // d, -(-power // d)))
    upper = (
        np.where(f == 1, SCALE - 1, 0) << _START
        | shift << _SHIFT
        | addend.astype(np.int64) << _ADDEND
        | SCALE - f
    )
    return np.asarray(upper << 32 | multiplier)


def symbol_facts(frequencies: Ints) -> tuple[Ints, bool]:
    """The facts of all 256 symbols, and whether any has an addend."""
    known = division_facts()[frequencies]
    start = np.cumsum(frequencies) - frequencies
    return known + (start << _START + 32), bool((known >> _ADDEND + 32 & 1).any())


def encoder_table(table: Table, fmt: FloatFormat, device: torch.device) -> EncoderTable:
    """Bring a table to the device."""
    frequencies = np.zeros(256, np.int64)
    frequencies[: table.frequencies.size] = table.frequencies
    known, addends = symbol_facts(frequencies)
    keys = 1 << 16 if table.group == 2 else 1 << fmt.exponent_bits
    on_host = torch.empty(8 * 256 + 2 * (1 << 16), dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_host.numpy()[: 8 * 256].view(np.int64)[:] = known
    fill_symbols(
        table.group, table.palette.astype(np.int64), frequencies, on_host.numpy()[8 * 256 :].view(np.uint16)
    )
    uploaded = on_host[: 8 * 256 + 2 * keys].to(device, non_blocking=True)
    by_symbol, symbols = uploaded[: 8 * 256].view(torch.int64), uploaded[8 * 256 :].view(torch.int16)
    facts = torch.empty(keys // 256 * ROW + 256, dtype=torch.int64, device=device)
    launch(
        _spread_kernel, (triton.cdiv(keys, 1024),),
        by_symbol, symbols, facts, keys, ESCAPES=_ESCAPES, ROW=ROW, TILE=1024, device=device,
    )  # fmt: skip
    return EncoderTable(table, facts, symbols, addends)


@triton.jit
def _spread_kernel(
    facts_ptr, symbols_ptr, coding_ptr, n, ESCAPES: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The facts of the symbol of every key, with the escapes: one look-up in place of two."""
    offs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    symbol = tl.load(symbols_ptr + offs, mask=offs < n, other=0).to(tl.int64)
    fact = tl.load(facts_ptr + (symbol & 0xFF))
    tl.store(
        coding_ptr + (offs + (offs >> 8) * (ROW - 256)),
        fact | (symbol >> 8 & 3) << (32 + ESCAPES),
        mask=offs < n,
    )
