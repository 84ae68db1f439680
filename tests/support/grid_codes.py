"""Weights on a grid, coded as a container codes them, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neuzip.compress.schemes.code_tables import PAIRS, SINGLE, CodeTable, share_bytes
from neuzip.kernels import rans
from neuzip.kernels.dtypes import torch_dtypes
from neuzip.kernels.float_fields import FORMATS, pack_low_bits
from neuzip.kernels.grid import Grid
from neuzip.kernels.rans.coded import ALIGNMENT, PATTERNS, CodedGrid, CodedTensor
from neuzip.kernels.rans.model import PALETTE

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CodedSample:
    """A coded tensor, and the bit patterns of its values as the CPU computes them."""

    coded: CodedTensor
    patterns: torch.Tensor


def gaussian_codes(numel: int, deviation: float, seed: int = 0) -> Codes:
    """Codes of a normal distribution."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.standard_normal(numel) * deviation).astype(np.int64)


def bits_of(codes: Codes) -> int:
    """The fewest bits that hold all codes, 2 at least."""
    return max(2, int(max(codes.max() + 1, -codes.min(), 1) - 1).bit_length() + 1)


def table_of(u: Codes, code_bits: int) -> rans.Table:
    """A table of the scheme `quantized` for stored codes, from 0 on: of pairs where they are few."""
    counts = np.bincount(u, minlength=1 << code_bits)
    seen = np.flatnonzero(counts)
    span = int(seen[-1] - seen[0]) + 1
    form = PAIRS if code_bits <= 8 and span <= PALETTE[2] else SINGLE
    size = max(2, min(span, PALETTE[2 if form == PAIRS else 1]))
    sums = np.convolve(counts, np.ones(size, np.int64), "valid")  # by the first of `size` codes in a row
    lowest = int(np.argmax(sums))
    return CodeTable(form, lowest, share_bytes(counts[lowest : lowest + size])).table


def grid_of(
    shape: tuple[int, ...], step: float, rows: bool, columns: bool, device: torch.device | str, seed: int = 0
) -> Grid:
    """A grid with random factors."""
    generator = torch.Generator().manual_seed(seed)
    factors = [
        torch.randint(40, 200, (n,), dtype=torch.uint8, generator=generator) if has else None
        for n, has in ((int(np.prod(shape[:-1])), rows), (shape[-1], columns))
    ]
    return Grid(step, *factors).to(device)


def code_grid(
    codes: Codes,
    grid: Grid,
    dtype: str,
    device: torch.device | str,
    table: rans.Table | None = None,
    low_bits: int = 0,
) -> CodedSample:
    """Code whole numbers of a tensor's shape, on a grid of that shape; `table` is not the best if given."""
    whole = codes.reshape(-1)
    code_bits = bits_of(codes >> low_bits)
    u = (whole >> low_bits) + (1 << (code_bits - 1))
    table = table_of(u, code_bits) if table is None else table
    encoded = rans.encode(u.astype(np.uint8 if code_bits <= 8 else np.uint16), table)

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.view(np.int16).copy()).to(device)

    held = CodedGrid(grid, codes.shape[-1], code_bits)
    planes = {}
    if low_bits:
        plane = pack_low_bits((whole & (1 << low_bits) - 1).astype(np.uint8), low_bits)
        padded = np.concatenate([plane, np.zeros(-plane.size % ALIGNMENT, np.uint8)])
        planes[low_bits] = torch.from_numpy(padded).to(device)
    coded = CodedTensor(
        FORMATS[dtype], low_bits, u.size, table, on_device(encoded.index), on_device(encoded.words), planes,
        grid=held,
    )  # fmt: skip
    on_cpu = grid.to("cpu")
    values = on_cpu.values(torch.from_numpy(codes.astype(np.int16)), torch_dtypes()[dtype])
    return CodedSample(coded, values.reshape(-1).view(PATTERNS[FORMATS[dtype].bits]))
