"""Weights of a uniform grid to the packed form, in plain torch, on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.kernels.grid import Grid, factors
from neuzip.kernels.grid_linear.escapes import by_unit, turn_count
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
from neuzip.kernels.grid_linear.tensor import GridTensor, can_have_terms
from neuzip.kernels.grid_linear.terms import LARGEST, LEAST, terms_of

WEIGHTS_AT_ONCE = 1 << 24
"""Weights that are packed at a time, about: each takes some 30 bytes meanwhile."""

WRONG_SHARE = 2.0**-11
"""Weights that may become escapes because terms get them wrong; if more would, fp32 arithmetic makes all."""

FAR = 1 << 14
"""The code of a weight that is an escape in every width."""


@dataclass(frozen=True)
class WrongCodes:
    """Which codes of a window terms get wrong, by step [U, codes] (bool); the step of each row [out]."""

    by_step: Tensor
    step_of_row: Tensor


def pack(weight: Tensor, grid: Grid, width: int | None = None) -> GridTensor:
    """Pack weights [out, in], bf16 or fp16, of a grid, on their device.

    What is not the value of a code in the window, bit for bit, is an escape: so every weight comes back,
    whatever the grid is. `width` is the bits of a code in the words, 4 to 8; without it, the width that takes
    the least bits. The host waits for a GPU. Raises ValueError for other shapes, for more than 65,536 columns
    and for too many escapes, TypeError for other dtypes.
    """
    steps = Grid(grid.step, grid.rows).to(weight.device).steps((weight.shape[0], 1))[:, 0]
    return pack_rows(weight, steps, grid.columns, width)


def pack_rows(
    weight: Tensor, steps: Tensor, column_bytes: Tensor | None = None, width: int | None = None
) -> GridTensor:
    """Pack weights whose rows have the steps `steps`, fp32 [out], as when matrices of several grids are one.

    `column_bytes` are the factors of the columns, as a Grid has them. Otherwise as `pack`.
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
    steps = F.pad(steps.to(device), (0, -out % TILE_ROWS)).contiguous()  # to whole tiles
    by_column = None if column_bytes is None else factors(column_bytes.to(device))
    height = max(1, WEIGHTS_AT_ONCE // (columns * TILE_ROWS)) * TILE_ROWS
    codes = torch.cat([
        _codes(weight[start : start + height], steps[start : start + height], by_column)
        for start in range(0, out, height)
    ])  # fmt: skip
    fields = CodeFields(width or best_width(codes))
    can_be = can_have_terms(weight.dtype, fields.width, by_column is not None)
    row_terms, wrong = _terms(codes, steps, fields, can_be)
    words, counts, escapes = [], [], []
    order = columns_of_slots(columns).to(device)
    for start in range(0, out, height):
        part, of = codes[start : start + height], weight[start : start + height]
        outside = (part < -fields.bias) | (part >= fields.bias)
        if wrong is not None:
            outside |= _is_wrong(part, wrong, start, fields)
        words.append(_words(part.masked_fill(outside, 0), order, fields))
        row, column = outside.nonzero().unbind(1)
        entries, count = by_unit(row, column, of[outside].view(torch.int16), (len(of), columns))
        escapes.append(entries)
        counts.append(count)
    unit_start = F.pad(torch.cat(counts).cumsum(0), (1, 0))
    if int(unit_start[-1]) > MAX_ESCAPES:
        raise ValueError(f"{int(unit_start[-1]):,} escapes are more than the {MAX_ESCAPES:,} of the form")
    packed = GridTensor(
        (out, columns), weight.dtype, fields.width, torch.cat(words), steps, row_terms,
        _column_factors(by_column, columns, device), unit_start.to(torch.int32), torch.cat(escapes),
    )  # fmt: skip
    packed.wait()
    return packed


def _terms(codes: Tensor, steps: Tensor, fields: CodeFields, fit: bool) -> tuple[Tensor, WrongCodes | None]:
    """The terms of the steps of rows, if that is how weights are made, and the codes that they get wrong."""
    nothing = torch.zeros(0, 2, dtype=torch.int32, device=codes.device)
    known, number = torch.unique(steps[: len(codes)], return_inverse=True)
    if not fit or float(known[0]) < LEAST or float(known[-1]) > LARGEST:
        return nothing, None
    window = torch.arange(-fields.bias, fields.bias, device=codes.device)
    counts = torch.bincount(codes.clamp(-fields.bias, fields.bias - 1).flatten() + fields.bias,
                            minlength=len(window))  # fmt: skip
    terms = terms_of(known, window, counts)
    wrong = WrongCodes(terms.wrong, number) if bool(terms.wrong.any()) else None
    if wrong is not None and float((terms.wrong * counts).sum(1).max()) > codes.numel() * WRONG_SHARE:
        return nothing, None
    return F.pad(terms.pairs[number], (0, 0, 0, -len(codes) % TILE_ROWS)).contiguous(), wrong


def _is_wrong(codes: Tensor, wrong: WrongCodes, start: int, fields: CodeFields) -> Tensor:
    """Which weights of rows from `start` on have a code that the terms of their step get wrong."""
    table = wrong.by_step[wrong.step_of_row[start : start + len(codes)]]
    return table.gather(1, codes.to(torch.int64).clamp(-fields.bias, fields.bias - 1) + fields.bias)


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
    count = fields.width + fields.spare_words
    words: list[Tensor] = [torch.zeros_like(u[..., 0]) for _ in range(count)]
    for slot in range(SLOTS):
        word, bit = fields.place(slot)
        words[word].bitwise_or_(u[..., slot] << bit)
    words, spare = words[: fields.width], words[fields.width :]
    for i, plane in enumerate(words if fields.spare else ()):
        of, bit = fields.spare_bits(i)
        ones = ((1 << fields.spare) - 1) * 0x10001
        plane.bitwise_or_((spare[of - fields.width] >> bit & ones) << 16 - fields.spare)
    # row 16 t + 8 h + r at [t, :, :, r, h]
    planes = torch.stack(words, 1).view(-1, 2, 8, fields.width, groups)
    return _signed(planes.permute(0, 3, 4, 2, 1).contiguous())


def _signed(words: Tensor) -> Tensor:
    """Numbers of 32 bits, int64, as int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _column_factors(by_column: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """Factors of columns in the order of the slots of a turn: those that a thread needs lie together."""
    if by_column is None:
        return torch.zeros(0, dtype=torch.float32, device=device)
    turns = turn_count(columns)
    by_column = F.pad(by_column, (0, turns * TURN - columns), value=1.0)
    groups = word_count(columns)
    by_slot = by_column[columns_of_slots(columns).to(device)].view(groups, 8, 4)
    by_slot = F.pad(by_slot, (0, 0, 0, 0, 0, -groups % 4), value=1.0)
    return by_slot.view(turns, 4, 8, 4).transpose(1, 2).flatten().contiguous()  # turn, four slots, word, slot
