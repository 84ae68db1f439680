"""Escapes of packed codes: entries of 32 bits, by unit, which is a tile of 16 rows and a turn of 128 columns.

The lower 16 bits of an entry are where its weight belongs among the weights of the unit, as the threads of a
warp have them: a byte offset. The upper 16 bits are the weight itself.

    offset    512 g + 16 lane + 8 h + 4 (row // 8) + 2 e, where lane = 4 (row % 8) + q

Names of slots are those of the package: slot 4 g + 2 h + e of word q of the turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.grid_linear.form import SLOTS, TILE_ROWS, TURN, word_count


def turn_count(columns: int) -> int:
    """Turns that a row of so many columns takes; the last may have fewer than 128."""
    return -(-columns // TURN)


def by_unit(row: Tensor, column: Tensor, pattern: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Entries (int32) sorted by unit, and how many each unit has (int64), for weights of a shape.

    row, column    int64, in any order
    pattern        the 16 bits of each weight, int16
    """
    out, columns = shape
    turns = turn_count(columns)
    within = column % TURN
    whole = column // TURN < word_count(columns) // 4
    g = torch.where(whole, within // 16, within % SLOTS // 4)
    q = torch.where(whole, within // 2 % 4, within // SLOTS)
    h = torch.where(whole, within // 8, within // 2) % 2
    lane = row % 8 * 4 + q
    offset = 512 * g + 16 * lane + 8 * h + 4 * (row % TILE_ROWS // 8) + 2 * (column % 2)
    unit = row // TILE_ROWS * turns + column // TURN
    order = torch.argsort(unit, stable=True)
    entries = offset.to(torch.int32) | pattern.to(torch.int32) << 16
    return entries[order], torch.bincount(unit, minlength=-(-out // TILE_ROWS) * turns)


def places(entries: Tensor, unit: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The rows and columns (int64) of entries, each of a unit, in weights of so many columns."""
    turns, offset = turn_count(columns), entries.to(torch.int64) & 0xFFFF
    g, lane, h, e = offset // 512, offset // 16 % 32, offset // 8 % 2, offset // 2 % 2
    q, turn = lane % 4, unit % turns
    within = torch.where(
        turn < word_count(columns) // 4, 16 * g + 8 * h + 2 * q + e, SLOTS * q + 4 * g + 2 * h + e
    )
    return unit // turns * TILE_ROWS + offset // 4 % 2 * 8 + lane // 4, turn * TURN + within
