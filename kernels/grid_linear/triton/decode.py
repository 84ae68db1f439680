"""Packed weights of a uniform grid to dense ones, in Triton: all rows of a range, or those of a list.

A program has 16 rows, a tile or some of a list, and some turns of each; a thread unpacks one word of every
plane of one row at a time, 32 weights. Behind a barrier the same program writes the escapes of its rows and
columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.grid_linear.form import TILE_ROWS
from neuzip.kernels.grid_linear.tensor import GridTensor
from neuzip.kernels.grid_linear.triton.patches import place_of
from neuzip.kernels.grid_linear.triton.words import load_factors, load_step, weights_of, with_spare
from neuzip.kernels.packed_linear.triton.slots import columns_of_word
from neuzip.kernels.tuning import launch_for


def decode(packed: GridTensor, start: int, dense: torch.Tensor) -> None:
    """Write as many rows as `dense` [rows, in] has, from row `start` on."""
    _decode(packed, start, None, dense)


def rows(packed: GridTensor, ids: torch.Tensor, dense: torch.Tensor) -> None:
    """Write the rows that `ids` [rows] name to `dense` [rows, in]; NaNs where there is no such row."""
    _decode(packed, 0, ids, dense)


def _decode(packed: GridTensor, start: int, ids: torch.Tensor | None, dense: torch.Tensor) -> None:
    count, columns = dense.shape
    if not dense.numel():
        return
    lanes = packed.words.shape[2]
    warps = launch_for("grid_linear.decode", packed.device)["warps"]
    first = start // TILE_ROWS if ids is None else 0
    tiles = triton.cdiv(start + count, TILE_ROWS) - first
    half = packed.dtype == torch.float16
    launch(
        _decode_rows, (tiles, triton.cdiv(lanes, 4 * warps)),
        dense.view(torch.int16), packed.words, packed.row_steps, packed.row_terms, packed.column_factors,
        packed.unit_start, packed.escapes, ids, start, count, packed.shape[0], columns, lanes,
        WIDTH=packed.width, TERMS=packed.has_terms, COLUMNS=packed.has_columns,
        HALF=half, COMPILED=is_compiled(_decode_rows), PAIRS=columns % 2 == 0 and dense.data_ptr() % 4 == 0,
        WARPS=warps, num_warps=warps, device=packed.device,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["start", "count", "N", "K", "C"],
    do_not_specialize_on_alignment=["dense", "unit_start", "escapes", "ids"],
)
def _decode_rows(
    dense, words, row_steps, row_terms, column_factors, unit_start, escapes, ids, start, count, N, K, C,
    WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
    COMPILED: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """A tile of `dense`, or 16 rows of a list, and the columns of WARPS turns."""
    AT_ONCE: tl.constexpr = 2 * WARPS  # words of a row
    t = tl.arange(0, 32 * WARPS)
    own, lane = t % 16, t // 16
    # Neighbouring threads read neighbouring words: those of rows r and r + 8 lie side by side.
    row = own // 2 + own % 2 * 8
    if ids is None:
        tile = start // 16 + tl.program_id(0)
        n = tile * 16 + row
        place = n - start
        here = (place >= 0) & (place < count)
        known = here
        n = tl.where(here, n, start)
    else:
        place = tl.program_id(0) * 16 + row
        here = place < count
        n = tl.load(ids + place, mask=here, other=0)
        known = here & (n >= 0) & (n < N)
        n = tl.where(known, n, 0).to(tl.int32)
    step = load_step(row_steps, row_terms, n, TERMS)
    at = (n // 16).to(tl.int64) * (WIDTH * C * 16) + n % 8 * 2 + n % 16 // 8
    to = dense + place.to(tl.int64) * K
    begin = tl.program_id(1) * (4 * WARPS)
    nothing = tl.zeros([32 * WARPS], tl.int32)  # escapes come behind the barrier
    for word in range(0, 4 * WARPS, AT_ONCE):
        c = begin + word + lane
        inside = c < C
        group = ()
        for p in tl.static_range(WIDTH):
            group += (tl.load(words + at + p * (C * 16) + c * 16, mask=inside & known, other=0),)
        group = with_spare(group, WIDTH)
        factors = load_factors(column_factors, tl.minimum(c, C - 1), COLUMNS)
        column, whole = columns_of_word(c, C)
        for g in tl.static_range(8):
            pairs = weights_of(
                group, step, factors, (nothing, nothing), WIDTH, TERMS, COLUMNS, HALF, g, COMPILED
            )
            for half in tl.static_range(2):
                k = column + tl.where(whole, 16 * g + 8 * half, 4 * g + 2 * half)
                pair = tl.where(known, pairs[half], 0x7E007E00 if HALF else 0x7FC07FC0)
                _store_pair(to, k, K, pair, here & inside, PAIRS)
    tl.debug_barrier()
    units = (C + 3) // 4
    STEP: tl.constexpr = 32 if ids is None else 2
    BATCH: tl.constexpr = 1 if ids is None else 8
    if ids is None:  # a warp has the escapes of a turn, of all rows of the tile
        turn, number = begin // 4 + t // 32, t % 32
        unit = tile * units + turn
    else:  # a thread has those of half a turn, of which few are of its row
        turn, number = begin // 4 + lane // 2, lane % 2
        unit = n // 16 * units + turn
    is_turn = turn < units
    first = tl.load(unit_start + unit, mask=is_turn, other=0) + number
    stop = tl.load(unit_start + unit + 1, mask=is_turn, other=0)
    for _ in range(tl.cdiv(tl.max(tl.maximum(stop - first, 0)), STEP * BATCH)):
        entries = ()
        for i in tl.static_range(BATCH):  # in flight together
            entries += (tl.load(escapes + first + i * STEP, mask=first + i * STEP < stop, other=0),)
        for i in tl.static_range(BATCH):
            row, k = place_of(entries[i], turn, C)
            mine = first + i * STEP < stop
            if ids is None:
                place = tile * 16 + row - start
                mine &= (place >= 0) & (place < count)
            else:
                mine &= (row == n % 16) & known
            weight = tl.cast(entries[i] >> 16, tl.int16)
            tl.store(dense + tl.cast(place, tl.int64) * K + k, weight, mask=mine)
        first += STEP * BATCH


@triton.jit
def _store_pair(to, k, K, pair, inside, PAIRS: tl.constexpr):
    """Columns k and k + 1 of rows that begin at `to`."""
    if PAIRS:
        tl.store((to + k).to(tl.pointer_type(tl.int32)), pair, mask=inside & (k < K))
    else:
        tl.store(to + k, pair.to(tl.int16), mask=inside & (k < K))
        tl.store(to + k + 1, (pair >> 16).to(tl.int16), mask=inside & (k + 1 < K))
