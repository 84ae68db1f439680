"""Which tiles of logits have gradients, and in which round each is computed: gradient filtering.

Wijmans et al. 2024, section 4.3, leave out tiles in which no |p - [column = target]| reaches `filter_eps`.
The forward pass keeps the largest logit of each token in each tile, so those are known beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import launch

ROWS = 128
COLUMNS = 128
"""Tokens and columns of the vocabulary of a tile, the unit of the filter."""

BOUND_SLACK = 2.0**-10
"""Logits, natural logarithm: one that is computed twice, in another order of sums, differs by less."""


def tiles(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Columns of tiles, and rows of tiles."""
    return -(-vocabulary // COLUMNS), -(-tokens // ROWS)


def candidates(
    maxima: Tensor,
    width: int,
    lse: Tensor,
    position: Tensor,
    vocabulary: int,
    filter_eps: float,
    ignored: Tensor | None = None,
) -> Tensor:
    """Which tiles have to be computed: int8 [columns of tiles, rows of tiles], 1 or 0.

    maxima    [parts, N], not less than the largest logit of each token in each `width` columns
    lse       fp32 [N]
    position  int32 [N], the columns of the targets
    ignored   bool [N], tokens that have no gradients; None where all have

    A tile is left out if exp(maximum - lse) < filter_eps for all its tokens and none has its target in it.
    Where an lse is NaN nothing is left out. Raises ValueError for a width that does not go with `COLUMNS`.
    """
    across, down = tiles(lse.shape[0], vocabulary)
    if max(width, COLUMNS) % min(width, COLUMNS) or maxima.shape != (-(-vocabulary // width), lse.shape[0]):
        raise ValueError(f"maxima {tuple(maxima.shape)} of {width} columns each, for tiles of {COLUMNS}")
    flags = torch.empty(across, down, dtype=torch.int8, device=lse.device)
    launch(
        _find_candidates, (across, down),
        flags, maxima, lse, position, ignored, math.log(filter_eps) - BOUND_SLACK, lse.shape[0],
        maxima.shape[0], down, HAS_IGNORED=ignored is not None, PARTS=max(1, COLUMNS // width),
        SHARED=max(1, width // COLUMNS), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, device=lse.device,
    )  # fmt: skip
    return flags


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """In which round each candidate is computed, and where it lies meanwhile. All int32, on the device.

    entries       candidates by round, row and column: column * rows of tiles + row
    row_start     [rounds * rows + 1], where those of a round and row begin among them
    column_start  [columns + 1], the same for candidates by column
    column_slot   by column: the slot of its round
    column_row    by column: the row
    round_column  [rounds + 1], the first column of each round
    """

    rounds: int
    rounds_a_segment: int
    entries: Tensor
    row_start: Tensor
    column_start: Tensor
    column_slot: Tensor
    column_row: Tensor
    round_column: Tensor


def plan_rounds(flags: Tensor, slots: int, segment: int) -> RoundPlan:
    """Candidates [columns, rows] in rounds of at most `slots`, of whole columns, and within a segment.

    A segment is so many columns of tiles. How many rounds there are follows from the shape alone, as the host
    does not know how many candidates there are: the last ones may be empty. Needs as many slots as rows.
    """
    across, down = flags.shape
    device, count = flags.device, across * down
    most = slots - down + 1  # a round begins with a column while so many slots are taken, or fewer
    rounds_a_segment = (min(segment, across) - 1) * down // most + 1
    rounds = -(-across // segment) * rounds_a_segment
    flags = flags.int()

    rank = flags.view(-1).cumsum(0, dtype=torch.int32) - flags.view(-1)
    column_start = _with_zero(flags.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    number = torch.arange(across, device=device) // segment
    before = column_start[:-1] - column_start[number * segment]
    round_of = number * rounds_a_segment + before // most
    round_column = torch.searchsorted(round_of, torch.arange(rounds + 1, device=device))

    left = _with_zero(flags.T.cumsum(1, dtype=torch.int32))  # [rows, columns + 1], candidates further left
    at_round = left[:, round_column]
    row_start = _with_zero(at_round.diff(dim=1).T.reshape(-1).cumsum(0, dtype=torch.int32))
    round_rows = (round_of[:, None] * down + torch.arange(down, device=device)).view(-1)
    place = row_start[round_rows] + (left[:, :-1] - at_round[:, round_of]).T.reshape(-1)
    slot = place - row_start[round_of * down].repeat_interleave(down)

    # What is no candidate goes to one place behind all others, which nobody reads.
    where, ranked = (torch.where(flags.view(-1) > 0, index, count).long() for index in (place, rank))
    every = torch.arange(count, dtype=torch.int32, device=device)
    entries, column_slot, column_row = torch.empty(3, count + 1, dtype=torch.int32, device=device)
    entries.scatter_(0, where, every)
    column_slot.scatter_(0, ranked, slot)
    column_row.scatter_(0, ranked, every % down)
    return RoundPlan(
        rounds, rounds_a_segment, entries, row_start, column_start, column_slot, column_row,
        round_column.int(),
    )  # fmt: skip


def _with_zero(sums: Tensor) -> Tensor:
    """Inclusive sums along the last dimension, with a zero before them."""
    return torch.nn.functional.pad(sums, (1, 0))


@triton.jit
def _find_candidates(
    flags, maxima, lse, position, ignored, bound, N, parts, down,
    HAS_IGNORED: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One flag. A tile has PARTS maxima of each token, or shares one with SHARED - 1 others."""
    column, row = tl.program_id(0), tl.program_id(1)
    i = row * ROWS + tl.arange(0, ROWS)
    counts = i < N
    if HAS_IGNORED:
        counts = counts & (tl.load(ignored + i, mask=counts, other=1) == 0)
    total = tl.load(lse + i, mask=counts, other=0.0)
    own = tl.load(position + i, mask=counts, other=-1) - column * COLUMNS
    matters = (own >= 0) & (own < COLUMNS) & counts
    for k in tl.static_range(PARTS):
        part = column // SHARED * PARTS + k
        largest = tl.load(
            maxima + part.to(tl.int64) * N + i, mask=counts & (part < parts), other=float("-inf")
        )
        matters = matters | (counts & (part < parts) & ~(largest.to(tl.float32) - total < bound))
    tl.store(flags + column * down + row, tl.max(matters.to(tl.int32), 0).to(tl.int8))
