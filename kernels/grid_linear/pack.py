"""Weights of a uniform grid to the packed form, in plain torch, on the CPU and on a GPU."""

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

WEIGHTS_AT_ONCE = 1 << 24
"""Weights that are packed at a time, about: each takes some 30 bytes meanwhile."""

FAR = 1 << 14
"""The code of a weight that is an escape in every width."""


def pack(weight: Tensor, grid: Grid, width: int | None = None) -> GridTensor:
    """Pack weights [out, in], bf16 or fp16, of a grid, on their device.

    What is not the value of a code in the window, bit for bit, is an escape: so every weight comes back,
    whatever the grid is. `width` is the bits of a code in the words, 4 to 8; without it, the width that takes
    the least bits. The host waits for a GPU. Raises ValueError for other shapes, for more than 65,536 columns
    and for too many escapes, TypeError for other dtypes.
    """
    if weight.dtype not in torch_dtypes_for("packed"):
        raise TypeError(f"packed weights are bfloat16 or float16, not {weight.dtype}")
    if weight.dim() != 2 or not weight.numel() or weight.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"weights to pack are a matrix of up to {MAX_COLUMNS:,} columns, and not empty: not "
            f"{tuple(weight.shape)}"
        )
    out, columns = weight.shape
    weight, device = weight.detach(), weight.device
    grid = grid.to(device)
    steps = _row_steps(grid, out, device)
    by_column = None if grid.columns is None else factors(grid.columns)
    height = max(1, WEIGHTS_AT_ONCE // (columns * TILE_ROWS)) * TILE_ROWS
    codes = torch.cat([
        _codes(weight[start : start + height], steps[start : start + height], by_column)
        for start in range(0, out, height)
    ])  # fmt: skip
    fields = CodeFields(width or best_width(codes))
    words, counts, escapes = [], [], []
    order = columns_of_slots(columns).to(device)
    for start in range(0, out, height):
        part, of = codes[start : start + height], weight[start : start + height]
        outside = (part < -fields.bias) | (part >= fields.bias)
        words.append(_words(part.masked_fill(outside, 0), order, fields))
        counts.append(outside.sum(1))
        column = outside.nonzero()[:, 1]
        escapes.append(column.to(torch.int32) | of[outside].view(torch.int16).to(torch.int32) << 16)
    row_start = F.pad(torch.cat(counts).cumsum(0), (1, 0))
    if int(row_start[-1]) > MAX_ESCAPES:
        raise ValueError(f"{int(row_start[-1]):,} escapes are more than the {MAX_ESCAPES:,} of the form")
    packed = GridTensor(
        (out, columns), weight.dtype, fields.width, torch.cat(words), steps,
        _column_factors(grid, columns, device), row_start.to(torch.int32), torch.cat(escapes),
    )  # fmt: skip
    packed.wait()
    return packed


def _codes(weight: Tensor, row_steps: Tensor, by_column: Tensor | None) -> Tensor:
    """The codes (int16) of weights [rows, in] that have one of up to 8 bits; FAR for all others."""
    steps = row_steps[: len(weight), None]
    if by_column is not None:
        steps = steps * by_column
    codes = (weight.to(torch.float32) / steps).round_().add_(0.0)  # which makes 0 of -0
    restored = (codes * steps).to(weight.dtype)
    known = (restored.view(torch.int16) == weight.view(torch.int16)) & (codes.abs() <= FAR)
    return torch.where(known, codes, FAR).to(torch.int16)


def _words(codes: Tensor, order: Tensor, fields: CodeFields) -> Tensor:
    """The words [tiles, width, groups, 8, 2] (int32) of codes [rows, in] that all fit into fields."""
    rows, columns = codes.shape
    groups = word_count(columns)
    filling = (0, -columns % TURN, 0, -rows % TILE_ROWS)
    u = F.pad(codes.to(torch.int64) + fields.bias, filling, value=fields.bias)
    u = u[:, order].view(-1, groups, SLOTS)
    words: list[Tensor] = [torch.zeros_like(u[..., 0]) for _ in range(fields.width + 1)]
    for slot in range(SLOTS):
        word, bit = fields.place(slot)
        words[word].bitwise_or_(u[..., slot] << bit)
    spare, count = words.pop(), fields.spare
    for i, plane in enumerate(words if count else ()):
        shift = count * (fields.width - 1 - i)
        plane.bitwise_or_((spare >> shift & (1 << count) - 1) << 32 - count)
    # row 16 t + 8 h + r at [t, :, :, r, h]
    planes = torch.stack(words, 1).view(-1, 2, 8, fields.width, groups)
    return _signed(planes.permute(0, 3, 4, 2, 1).contiguous())


def _signed(words: Tensor) -> Tensor:
    """Numbers of 32 bits, int64, as int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


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
