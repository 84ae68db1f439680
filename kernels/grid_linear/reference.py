"""Packed weights of a uniform grid, decoded and multiplied in plain torch: slow, and easy to check."""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.grid_linear.escapes import places, turn_count
from neuzip.kernels.grid_linear.form import SLOTS, TILE_ROWS, TURN, columns_of_slots, word_count
from neuzip.kernels.grid_linear.tensor import GridTensor


def codes(packed: GridTensor, rows: Tensor) -> Tensor:
    """The codes (int64) of some rows, [rows, in], with 0 for escapes."""
    columns, fields = packed.shape[1], packed.fields
    words = packed.words[rows // TILE_ROWS, :, :, rows % 8, rows % TILE_ROWS // 8].to(torch.int64)
    words &= (1 << 32) - 1  # [rows, width, groups]
    all_words = [*words.unbind(1)] + [torch.zeros_like(words[:, 0])] * fields.spare_words
    for i, word in enumerate(words.unbind(1) if fields.spare else ()):
        to, bit = fields.spare_bits(i)
        ones = ((1 << fields.spare) - 1) * 0x10001
        all_words[to] = all_words[to] | (word >> 16 - fields.spare & ones) << bit
    places = [fields.place(slot) for slot in range(SLOTS)]
    by_slot = torch.stack([all_words[word] >> bit for word, bit in places], -1) & (1 << packed.width) - 1
    order = columns_of_slots(columns).to(words.device)
    by_column = torch.empty(len(rows), -(-columns // TURN) * TURN, dtype=torch.int64, device=words.device)
    by_column[:, order] = by_slot.flatten(1) - fields.bias
    return by_column[:, :columns]


def decode(packed: GridTensor, rows: slice | Tensor | None = None) -> Tensor:
    """The weights that were packed, bit for bit: all rows, those of a slice, or those of a list (int64)."""
    if not isinstance(rows, Tensor):
        rows = torch.arange(packed.shape[0], device=packed.device)[rows or slice(None)]
    steps = packed.row_steps[rows][:, None]
    if packed.has_columns:
        steps = steps * _factors_by_column(packed)
    dense = (codes(packed, rows).to(torch.float32) * steps).to(packed.dtype)
    row, column, pattern = _escapes_by_row(packed, rows)
    begin = torch.searchsorted(row, rows)
    counts = torch.searchsorted(row, rows, right=True) - begin
    own = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
    at = torch.arange(len(own), device=rows.device) + (begin - counts.cumsum(0) + counts)[own]
    dense.view(torch.int16)[own, column[at]] = pattern[at]
    return dense


def matmul(x: Tensor, packed: GridTensor) -> Tensor:
    """x @ weights.T in fp64, [rows, in] to [rows, out]."""
    return x.double() @ decode(packed).double().T


def _escapes_by_row(packed: GridTensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ascending, columns and the 16 bits of the escapes of all tiles that have some of `rows`."""
    turns = turn_count(packed.shape[1])
    units = (
        torch.unique(rows // TILE_ROWS)[:, None] * turns + torch.arange(turns, device=rows.device)
    ).flatten()
    starts = packed.unit_start.to(torch.int64)
    counts = starts[units + 1] - starts[units]
    before = counts.cumsum(0) - counts
    own = torch.repeat_interleave(torch.arange(len(units), device=rows.device), counts)
    entries = packed.escapes[torch.arange(len(own), device=rows.device) + (starts[units] - before)[own]]
    row, column = places(entries, units[own], packed.shape[1])
    order = torch.argsort(row, stable=True)
    return row[order], column[order], (entries >> 16).to(torch.int16)[order]


def _factors_by_column(packed: GridTensor) -> Tensor:
    """Factors of columns, [in]."""
    columns = packed.shape[1]
    groups = word_count(columns)
    by_slot = packed.column_factors.view(-1, 8, 4, 4).transpose(1, 2).reshape(-1, SLOTS)[:groups].flatten()
    by_column = torch.ones(-(-columns // TURN) * TURN, device=packed.device)
    by_column[columns_of_slots(columns).to(packed.device)] = by_slot
    return by_column[:columns]
