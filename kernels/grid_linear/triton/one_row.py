"""Products of one row with packed weights of a uniform grid, in Triton, by matrix instructions.

Words are shared out as in `packed_linear.triton.linear`: a warp takes 4 words of every plane of 16 rows at a
time, thread (r, q) word q of rows r and r + 8, and x for the slots 4 r to 4 r + 3 alone, in column r of the
instruction. Words are read before the previous kernel has ended (PDL), x is not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import FREE, PreparedLaunch, is_compiled
from neuzip.kernels.device.mma_fragments import multiply
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.device.reduce import sum_rows
from neuzip.kernels.grid_linear.tensor import GridTensor
from neuzip.kernels.grid_linear.triton.patches import (
    MOST_WARPS,
    load_entry,
    load_span,
    patches_of,
    reserve_patches,
    write_patches,
)
from neuzip.kernels.grid_linear.triton.words import load_factors, load_step, weights_of, with_spare
from neuzip.kernels.packed_linear.triton.linear import behind, load_pairs
from neuzip.kernels.packed_linear.triton.words import load_words
from neuzip.kernels.tuning import launch_for


class GridRowLaunch(NamedTuple):
    """How a product of one row is launched."""

    warps: int
    """Warps that share a tile."""
    ahead: int = 1
    """Turns by which words and x are prefetched."""
    registers: int = 128
    """Registers of a thread, at most."""


@functools.cache
def one_row_launch(
    tiles: int, lanes: int, width: int, has_columns: bool, device: torch.device
) -> GridRowLaunch:
    """The launch for so many tiles and words of a row of codes of a width, from the table of the card."""
    a_processor = tiles / multiprocessors(device)
    most = launch_for("grid_linear.one_row_warps", device, tiles=a_processor)["warps"]
    warps = min(most, MOST_WARPS, triton.next_power_of_2(triton.cdiv(lanes, 4)))
    config = launch_for("grid_linear.one_row", device, tiles=a_processor, width=width, columns=has_columns)
    return GridRowLaunch(warps, config["ahead"], config["registers"])


def multiply_one_row(
    y: torch.Tensor, x: torch.Tensor, packed: GridTensor, bias: torch.Tensor | None,
    one_row: GridRowLaunch | None = None,
) -> None:  # fmt: skip
    """Write x @ weights.T + bias to y [1, out], for x [1, 32 groups].

    `one_row` replaces the launch of the table.
    """
    if one_row is None:
        prepared = packed.once(
            "one row" if bias is None else "one row and a bias",
            functools.partial(_prepared, one_row=None, has_bias=bias is not None),
        )
    else:
        prepared = _prepared(packed, one_row, has_bias=bias is not None)
    prepared((len(packed.words),), y, x.view(torch.int32), bias)


def _prepared(packed: GridTensor, one_row: GridRowLaunch | None, has_bias: bool) -> PreparedLaunch:
    """The launch for weights and one row. It takes y, x in pairs of columns, and a bias or None."""
    tiles, _, lanes = packed.words.shape[:3]
    warps, ahead, registers = one_row or one_row_launch(
        tiles, lanes, packed.width, packed.has_columns, packed.device
    )
    turns = triton.cdiv(lanes, 4 * warps)
    return PreparedLaunch(
        _one_row, FREE, FREE, packed.words, packed.row_steps, packed.row_terms,
        packed.column_factors, packed.unit_start, packed.escapes, FREE, packed.shape[0],
        W=warps, TURNS=turns, AHEAD=min(ahead, turns), EVEN=lanes % (4 * warps) == 0, BIAS=has_bias, C=lanes,
        WIDTH=packed.width, TERMS=packed.has_terms, COLUMNS=packed.has_columns,
        HALF=packed.dtype == torch.float16, COMPILED=is_compiled(_one_row), num_warps=warps,
        maxnreg=registers, pdl=True, device=packed.device,
    )  # fmt: skip


@triton.jit
def _load_span(unit_start, unit, UNITS: tl.constexpr, W: tl.constexpr):
    """What `load_span` loads of a unit of a tile; beyond the last there are no escapes."""
    return load_span(unit_start, tl.minimum(unit, UNITS), tl.minimum(unit + 1, UNITS), W)


@triton.jit
def _multiply_next(
    coming, factors, patches, pairs, sums, step_a, step_b,
    WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
    W: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add the products of the next words, of rows r and r + 8, with x to the sums of the 8 instructions."""
    a = with_spare(coming[0][0], WIDTH)
    b = with_spare(coming[0][1], WIDTH)
    added = ()
    for g in tl.static_range(8):
        of_a, of_b = patches_of(patches, g, W, COMPILED)
        a0, a2 = weights_of(a, step_a, factors, of_a, WIDTH, TERMS, COLUMNS, HALF, g, COMPILED)
        a1, a3 = weights_of(b, step_b, factors, of_b, WIDTH, TERMS, COLUMNS, HALF, g, COMPILED)
        added += (multiply((a0, a1, a2, a3), pairs[0], sums[g], W, HALF, COMPILED),)
    return added


@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=["y", "unit_start", "escapes", "bias"],
)
def _one_row(
    y, pairs_of_x, words, row_steps, row_terms, column_factors, unit_start, escapes, bias, N,
    C: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
    BIAS: tl.constexpr, COMPILED: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """16 values of y for one row of x: W warps share the columns, 4 words each in turn.

    Words, x and escapes are loaded AHEAD turns before they are multiplied.
    """
    T: tl.constexpr = 32 * W
    U: tl.constexpr = (C + 3) // 4  # units of a tile
    t = tl.arange(0, T)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.program_id(0)
    n = tile * 16 + r + q % 2 * 8  # whose value a thread writes
    words += tile.to(tl.int64) * (WIDTH * C * 16)
    unit_start += tile.to(tl.int64) * U
    c = warp * 4 + q
    step_a = load_step(row_steps, row_terms, tile * 16 + r, TERMS)
    step_b = load_step(row_steps, row_terms, tile * 16 + r + 8, TERMS)

    # Of the turns to come, the next first. Where escapes are is loaded a turn before these.
    spans = ()
    for i in tl.static_range(AHEAD + 1):
        spans += (_load_span(unit_start, i * W + warp, U, W),)
    coming = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        coming += (load_words(words, k * 16 + r * 2, k < C, WIDTH, C, EVEN),)
    entries = ()
    for i in tl.static_range(AHEAD):
        entries += (load_entry(escapes, spans[i]),)
    memory = reserve_patches(W, COMPILED)
    if USE_PDL:
        cuda.gdc_wait()  # for x
    pairs = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        pairs += (load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
    if BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    zero = tl.zeros([T], tl.float32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    for turn in tl.range(TURNS, loop_unroll_factor=AHEAD):
        factors = load_factors(column_factors, tl.minimum(turn * (4 * W) + c, C - 1), COLUMNS)
        k = tl.minimum(turn + AHEAD, TURNS - 1) * (4 * W) + c
        coming += (load_words(words, k * 16 + r * 2, k < C, WIDTH, C, EVEN),)
        pairs += (load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
        entries += (load_entry(escapes, spans[AHEAD]),)
        patches = write_patches(memory, entries, spans, escapes, W, COMPILED)
        sums = _multiply_next(
            coming, factors, patches, pairs, sums, step_a, step_b, WIDTH, TERMS, COLUMNS, HALF, W, COMPILED
        )
        spans += (_load_span(unit_start, (turn + AHEAD + 1) * W + warp, U, W),)
        coming, pairs = behind(coming, 1), behind(pairs, 1)
        entries, spans = behind(entries, 1), behind(spans, 1)
    if USE_PDL:
        cuda.gdc_launch_dependents()  # all words have been asked for

    # Thread q has columns 2 q and 2 q + 1 of all sums; of sums g, column g counts.
    top, bottom = zero, zero
    for i in tl.static_range(4):
        top = tl.where(q == i, sums[2 * i][0] + sums[2 * i + 1][1], top)
        bottom = tl.where(q == i, sums[2 * i][2] + sums[2 * i + 1][3], bottom)
    top, bottom = sum_rows((top, bottom), W, COMPILED)
    result = tl.where(q == 0, top, bottom)
    if BIAS:
        result += added
    tl.store(y + n, result.to(y.dtype.element_ty), mask=(n < N) & (warp == 0) & (q < 2))
