"""Codes of a uniform grid to the packed form, in plain torch, on the CPU and on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.kernels.grid import Grid, factors
from neuzip.kernels.grid_linear.form import (
    MAX_COLUMNS,
    MAX_ESCAPES,
    SLOTS,
    TILE_ROWS,
    TURN,
    CodeFields,
    best_width,
    columns_of_slots,
    word_count,
)
from neuzip.kernels.grid_linear.tensor import GridTensor

WEIGHTS_AT_ONCE = 1 << 23
"""Weights that are packed at a time, about: each takes some 30 bytes meanwhile."""


def pack(codes: Tensor, grid: Grid, dtype: torch.dtype, width: int | None = None) -> GridTensor:
    """Pack the codes (int16) of weights [out, in] of a dtype, bf16 or fp16, on the device of the codes.

    `width` is the bits of a code in the words, 4 to 8; without it, the width that takes the least bits. The
    host waits for a GPU. Raises ValueError for other shapes, for more than 65,536 columns and for too many
    escapes, TypeError for other dtypes.
    """
    if dtype not in torch_dtypes_for("packed"):
        raise TypeError(f"packed weights are bfloat16 or float16, not {dtype}")
    if codes.dim() != 2 or not codes.numel() or codes.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"codes to pack are a matrix of up to {MAX_COLUMNS:,} columns, and not empty: not "
            f"{tuple(codes.shape)}"
        )
    out, columns = codes.shape
    grid = grid.to(codes.device)
    fields = CodeFields(width or best_width(codes))
    step = max(1, WEIGHTS_AT_ONCE // (columns * TILE_ROWS)) * TILE_ROWS
    words, counts, escapes = [], [], []
    order = columns_of_slots(columns).to(codes.device)
    for start in range(0, out, step):
        part = codes[start : start + step]
        outside = (part < -fields.bias) | (part >= fields.bias)
        words.append(_words(part.masked_fill(outside, 0), order, fields))
        counts.append(outside.sum(1))
        row, column = outside.nonzero(as_tuple=True)
        values = _values(part[row, column], grid, start + row, column, dtype)
        escapes.append(column.to(torch.int32) | values.view(torch.int16).to(torch.int32) << 16)
    row_start = F.pad(torch.cat(counts).cumsum(0), (1, 0))
    if int(row_start[-1]) > MAX_ESCAPES:
        raise ValueError(f"{int(row_start[-1]):,} escapes are more than the {MAX_ESCAPES:,} of the form")
    packed = GridTensor(
        (out, columns), dtype, fields.width, torch.cat(words), _row_steps(grid, out, codes.device),
        _column_factors(grid, columns, codes.device), row_start.to(torch.int32), torch.cat(escapes),
    )  # fmt: skip
    packed.wait()
    return packed


def _words(codes: Tensor, order: Tensor, fields: CodeFields) -> Tensor:
    """The words [tiles, width, groups, 8, 2] (int32) of codes [rows, in] that all fit into fields."""
    rows, columns = codes.shape
    groups = word_count(columns)
    filling = (0, -columns % TURN, 0, -rows % TILE_ROWS)
    u = F.pad(codes.to(torch.int64) + fields.bias, filling, value=fields.bias)
    u = u[:, order].view(-1, groups, SLOTS)
    words = [torch.zeros_like(u[..., 0]) for _ in range(fields.width + 1)]
    for slot in range(SLOTS):
        word, bit = fields.place(slot)
        words[word] |= u[..., slot] << bit
    spare, count = words.pop(), fields.spare
    for i, word in enumerate(words if count else ()):
        shift = count * (fields.width - 1 - i)
        word |= (spare >> shift & (1 << count) - 1) << 32 - count
    # row 16 t + 8 h + r at [t, :, :, r, h]
    planes = torch.stack(words, 1).view(-1, 2, 8, fields.width, groups)
    return _signed(planes.permute(0, 3, 4, 2, 1).contiguous())


def _signed(words: Tensor) -> Tensor:
    """Numbers of 32 bits, int64, as int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _values(codes: Tensor, grid: Grid, row: Tensor, column: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of codes [n] at rows and columns [n]."""
    chosen = Grid(grid.step, None if grid.rows is None else grid.rows[row], None)
    steps = chosen.steps((codes.numel(), 1))[:, 0].to(codes.device)
    if grid.columns is not None:
        steps = steps * factors(grid.columns[column])
    return (codes.to(torch.float32) * steps).to(dtype)


def _row_steps(grid: Grid, out: int, device: torch.device) -> Tensor:
    """The step times each row's factor, filled up with zeros to whole tiles."""
    steps = Grid(grid.step, grid.rows).steps((out, 1))[:, 0].to(device)
    return F.pad(steps, (0, -out % TILE_ROWS)).contiguous()


def _column_factors(grid: Grid, columns: int, device: torch.device) -> Tensor:
    """Factors of columns in the order of the slots of a turn: those that a thread needs lie together."""
    if grid.columns is None:
        return torch.zeros(0, dtype=torch.float32, device=device)
    turns = -(-columns // TURN)
    by_column = F.pad(factors(grid.columns), (0, turns * TURN - columns), value=1.0)
    groups = word_count(columns)
    by_slot = by_column[columns_of_slots(columns).to(device)].view(groups, 8, 4)
    by_slot = F.pad(by_slot, (0, 0, 0, 0, 0, -groups % 4), value=1.0)
    return by_slot.view(turns, 4, 8, 4).transpose(1, 2).flatten().contiguous()  # turn, four slots, word, slot
