"""Escapes by tile and turn, for products of many rows: torch, on any device, with the same bytes on each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .form import SLOTS, TILE_ROWS, TURN, ExponentWindow

FEW = 512
"""Weights for each escape, at least: with more escapes, decoding first is faster."""

OTHERS = 16
"""Escapes that all threads of a turn look through, at most: those behind the first ones. Rows of zeros have
hundreds, each of which all of these threads wait for."""


def by_turn(
    escapes: Tensor, row_start: Tensor, columns: int, window: ExponentWindow
) -> tuple[Tensor, Tensor]:
    """turn_index int32 [tiles, turns, 2] and turn_escapes int32 [escapes]: see the package's docstring.

    Both are empty, [0, 0, 2] and [0], where rows do not consist of turns, escapes are not few or crowd in one
    turn, or one of them is no number 2**shift times smaller. `escapes` and `row_start` are a PackedTensor's.
    """
    out = row_start.numel() - 1
    if columns == 0 or columns % TURN or FEW * escapes.numel() > out * columns:
        return _nothing(escapes)
    starts = row_start.long() & 0xFFFF if row_start.dtype == torch.int16 else row_start.long()
    row = torch.repeat_interleave(torch.arange(out, device=escapes.device), starts.diff())
    column, pattern = escapes.long() & 0xFFFF, escapes.long() >> 16 & 0xFFFF
    settled, exact = _settled(pattern, window)
    if not bool(exact.all()):
        return _nothing(escapes)
    tiles, turns = -(-out // TILE_ROWS), columns // TURN
    # Column 16 g + 8 h + 2 q + e of a turn is slot 4 g + 2 h + e of its word q.
    g, h, q, e = column % TURN // 16, column % 16 // 8, column % 8 // 2, column % 2
    lane = row % 8 * 4 + q
    unit = row // TILE_ROWS * turns + column // TURN
    turned = (settled & window.coded ^ window.farthest) >> 8
    entry = turned | 2 * h + e << 7 | 2 * g + row % TILE_ROWS // 8 << 9 | lane << 16

    order = torch.argsort(unit * SLOTS + lane, stable=True)
    unit, lane, entry = unit[order], lane[order], entry[order]
    again = torch.zeros_like(unit)  # whether a thread has had one of this turn
    again[1:] = ((unit[1:] == unit[:-1]) & (lane[1:] == lane[:-1])).long()
    order = torch.argsort(2 * unit + again, stable=True)
    unit, lane, entry, again = unit[order], lane[order], entry[order], again[order]
    counts = torch.bincount(unit, minlength=tiles * turns)
    others = torch.zeros_like(counts).index_add_(0, unit, again)
    is_last = torch.ones_like(unit)
    is_last[:-1] = (unit[1:] != unit[:-1]).long()
    if others.numel() and int(others.max()) > OTHERS:
        return _nothing(escapes)
    followed = torch.where(again == 1, 1 - is_last, (others[unit] > 0).long())
    masks = torch.zeros_like(counts).index_add_(0, unit, (1 - again) << lane)
    index = torch.stack([masks, counts.cumsum(0) - counts], 1).to(torch.int32)  # modulo 2**32
    return index.view(tiles, turns, 2), (entry | followed << 15).to(torch.int32)


def _settled(pattern: Tensor, window: ExponentWindow) -> tuple[Tensor, Tensor]:
    """Settled patterns, and whether each is the number 2**shift times smaller, as zeros, infinities are."""
    infinite = (1 << window.fmt.exponent_bits) - 1
    exponent = pattern >> window.fmt.mantissa_bits & infinite
    taken = torch.from_numpy(window.settling.astype(np.int64)).to(pattern.device)[exponent]
    exact = (taken == window.shifted) | (exponent == infinite) | (pattern & 0x7FFF == 0)
    return pattern - taken, exact


def _nothing(escapes: Tensor) -> tuple[Tensor, Tensor]:
    return escapes.new_zeros(0, 0, 2), escapes.new_zeros(0)
