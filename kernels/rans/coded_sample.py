"""Coded weights whose patterns are known, as the decoder on a GPU takes them: what it is checked with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.dtypes import torch_dtypes
from neuzip.kernels.float_fields import Bits, plane_widths
from neuzip.kernels.grid import Grid

from .coded import (
    ALIGNMENT,
    COLUMN_FACTORS,
    CROSSING_ROWS,
    PATTERNS,
    CodedGrid,
    CodedTensor,
    Kind,
)
from .sample import CodedExponents, coded_exponents


def coded_weights(kind: Kind, runs: int, device: torch.device) -> tuple[CodedTensor, Bits]:
    """A block of weights of a kind, coded, on a device; and their patterns. Not for kinds with block sizes.

    64 `runs` make a full block. Signs and mantissas are random bits.
    """
    fmt, kept_bits, group, block_size, grid = kind
    if block_size:
        raise ValueError("weights that share a scale have no sample")
    sample = coded_exponents(group, runs)
    if grid:
        return _coded_codes(kind, sample, device)
    numel, width = sample.exponents.size, 1 + kept_bits
    fields = np.random.default_rng(0).integers(0, 1 << width, numel, np.uint64)
    sign, mantissa = fields >> np.uint64(kept_bits), fields & np.uint64((1 << kept_bits) - 1)
    dropped = np.uint64(fmt.mantissa_bits - kept_bits)
    bits = sign << np.uint64(fmt.bits - 1) | mantissa << dropped
    bits |= sample.exponents.astype(np.uint64) << np.uint64(fmt.mantissa_bits)
    planes, left = {}, width
    for plane in plane_widths(width):
        left -= plane
        values = fields >> np.uint64(left) & np.uint64((1 << plane) - 1)
        planes[plane] = _on(_plane(values, plane), device)
    coded = CodedTensor(fmt, kept_bits, numel, sample.table, *_index_and_words(sample.words, device), planes)
    return coded, bits.astype(fmt.dtype)


def _coded_codes(kind: Kind, sample: CodedExponents, device: torch.device) -> tuple[CodedTensor, Bits]:
    """Weights on a grid whose codes are the exponents of a sample, less half; and their patterns.

    Low bits of codes are random. A row ends within every run, and within a lane's 8 weights where kinds have
    that.
    """
    numel, table = sample.exponents.size, sample.table
    row_weights = 100 if kind.grid & CROSSING_ROWS else 104
    u = np.concatenate([table.palette, np.zeros(16 - table.palette.size, np.uint16)])[sample.exponents]
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.randint(64, 192, (n,), dtype=torch.uint8, generator=generator)
        for n in (-(-numel // row_weights), row_weights)
    )
    own = Grid(0.03, rows, columns if kind.grid & COLUMN_FACTORS else None)
    low = kind.kept_bits
    fields = np.random.default_rng(0).integers(0, 1 << low, numel, np.uint64)
    planes = {low: _on(_plane(fields, low), device)} if low else {}
    coded = CodedTensor(
        kind.fmt, low, numel, table, *_index_and_words(sample.words, device), planes,
        grid=CodedGrid(own.to(device), row_weights, 10),
    )  # fmt: skip
    assert coded.kind == kind
    codes = torch.from_numpy((u.astype(np.int32) - (1 << 9) << low) + fields.astype(np.int32))
    padded = torch.cat([codes, codes.new_zeros(rows.numel() * row_weights - numel)]).view(-1, row_weights)
    values = own.values(padded, torch_dtypes()[kind.fmt.name]).flatten()[:numel]
    return coded, values.view(PATTERNS[kind.fmt.bits]).numpy().view(kind.fmt.dtype)


def _index_and_words(
    words: npt.NDArray[np.uint16], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index and the words of one block on a device."""
    index = _on(np.array([words.size], np.uint16), device, multiple=2).view(torch.int16)
    return index, _on(words, device).view(torch.int16)


def _plane(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.unsignedinteger]:
    """Fields of a width side by side, the first one in the lowest bits."""
    if width >= 8:
        return values.astype(f"<u{width // 8}")
    each = 8 // width
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(width)
    return np.asarray(np.bitwise_or.reduce(values.reshape(-1, each) << shifts, axis=1), np.uint8)


def _on(
    array: npt.NDArray[np.unsignedinteger], device: torch.device, multiple: int = ALIGNMENT
) -> torch.Tensor:
    """The bytes of an array on a device, filled up to a multiple."""
    raw = array.view(np.uint8)
    filled = np.zeros(-(-raw.size // multiple) * multiple, np.uint8)
    filled[: raw.size] = raw
    return torch.from_numpy(filled).to(device)
