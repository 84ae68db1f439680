"""Products of 2 to 64 rows with packed weights of a uniform grid, in Triton, by instructions of a warp group.

The sharing of work and words, and the kernel that adds the parts up, are those of
`packed_linear.triton.some_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch, uses_pdl
from neuzip.kernels.grid_linear.tensor import GridTensor
from neuzip.kernels.grid_linear.triton.patches import (
    load_entry,
    load_span,
    patches_of,
    reserve_patches,
    write_patches,
)
from neuzip.kernels.grid_linear.triton.words import load_factors, load_step, weights_of, with_spare
from neuzip.kernels.packed_linear.triton.linear import behind
from neuzip.kernels.packed_linear.triton.operands import fragment, in_order, load_columns, tile_of
from neuzip.kernels.packed_linear.triton.some_rows import (
    add_parts,
    next_unit,
    programs_of,
    tile_and_word,
)
from neuzip.kernels.packed_linear.triton.words import load_words
from neuzip.kernels.tuning import launch_for


class GridRowsLaunch(NamedTuple):
    """How a product of 2 to 64 rows is launched."""

    tiles: int
    """Tiles of weights, and warps, of a program: 4, or 8, which load x half as often."""
    programs: int
    """Programs of a multiprocessor."""
    ahead: int
    """Units by which words are prefetched."""


def multiply_some_rows(
    y: torch.Tensor, x: torch.Tensor, packed: GridTensor, bias: torch.Tensor | None,
    some_rows: GridRowsLaunch | None = None,
) -> None:  # fmt: skip
    """Write x @ weights.T + bias to y [rows, out], for x [rows, 32 groups], 2 to 64 rows.

    `some_rows` replaces the launch of the table.
    """
    rows, out, device = x.shape[0], packed.shape[0], x.device
    tiles, _, lanes = packed.words.shape[:3]
    half = packed.dtype == torch.float16
    wide = max(16, triton.next_power_of_2(rows))
    warps, resident, ahead = some_rows or GridRowsLaunch(
        **launch_for("grid_linear.some_rows", device, rows=wide)
    )
    blocks, turns = triton.cdiv(tiles, warps), triton.cdiv(lanes, 4)
    programs, each = programs_of(blocks * turns, resident, device)
    own_blocks = 1 + triton.cdiv(each - 1, turns)
    spread = {"turns": turns, "each": each, "own_blocks": own_blocks}
    parts = torch.empty(programs, own_blocks, wide, 16 * warps, dtype=torch.float32, device=device)
    launch(
        _some_rows, (programs,),
        parts, x.view(torch.int32), packed.words, packed.row_steps, packed.row_terms, packed.column_factors,
        packed.unit_start, packed.escapes, blocks * turns, out, rows, **spread, BM=wide, W=warps, AHEAD=ahead,
        EVEN=lanes % 4 == 0, C=lanes, WIDTH=packed.width, TERMS=packed.has_terms, COLUMNS=packed.has_columns,
        HALF=half, COMPILED=is_compiled(_some_rows), USE_PDL=uses_pdl(_some_rows, device), num_warps=warps,
        device=device,
    )  # fmt: skip
    launch(
        add_parts, (blocks, wide // 8),
        y, parts, x, None, None, bias, 0, 0, 1.0, out, rows, lanes, wide, **spread,
        HALF=half, BIAS=bias is not None, W=warps, num_warps=warps, pdl=True, device=device,
    )  # fmt: skip


@triton.jit
def _steps_of(row_steps, row_terms, tile, r, TERMS: tl.constexpr):
    """The steps of rows r and r + 8 of a tile."""
    n = tile * 16 + r
    return load_step(row_steps, row_terms, n, TERMS), load_step(row_steps, row_terms, n + 8, TERMS)


@triton.jit
def _unpacked(
    coming, step_a, step_b, factors, patches, WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
    HALF: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The weights of W tiles, [16 W, 128], from the next words of rows r and r + 8, and escapes."""
    a = with_spare(coming[0][0], WIDTH)
    b = with_spare(coming[0][1], WIDTH)
    fragments = ()
    for g in tl.static_range(8):
        of_a, of_b = patches_of(patches, g, W, COMPILED)
        a0, a2 = weights_of(a, step_a, factors, of_a, WIDTH, TERMS, COLUMNS, HALF, g, COMPILED)
        a1, a3 = weights_of(b, step_b, factors, of_b, WIDTH, TERMS, COLUMNS, HALF, g, COMPILED)
        fragments += (fragment(a0, a1, a2, a3, HALF),)
    return tile_of(fragments, W)


@triton.jit(
    do_not_specialize=["units", "N", "M", "turns", "each", "own_blocks"],
    do_not_specialize_on_alignment=["unit_start", "escapes"],
)
def _some_rows(
    parts, pairs_of_x, words, row_steps, row_terms, column_factors, unit_start, escapes, units, N, M, turns,
    each, own_blocks, C: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
    HALF: tl.constexpr, COMPILED: tl.constexpr, BM: tl.constexpr, W: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A share of the products of blocks of W tiles with up to BM rows of x: `each` of all `units`.

    A unit is a block and 128 columns, a turn. What they add to a block goes to parts [programs, own_blocks,
    BM, 16 W]. Words and escapes of the next AHEAD units are in flight meanwhile, and x of the next one.
    """
    if USE_PDL:
        cuda.gdc_launch_dependents()
    t = tl.arange(0, 32 * W)
    warp, lane = t // 32, t % 32
    r, q = lane // 4, lane % 4
    program = tl.program_id(0)
    unit = program * each
    stop = tl.minimum(unit + each, units)
    tiles = (N + 15) // 16
    parts += program.to(tl.int64) * own_blocks * (BM * 16 * W)
    n, m = tl.arange(0, 16 * W)[:, None], tl.arange(0, BM)[None, :]
    part = m * (16 * W) + n
    # Block and turn are counted: to divide by a number that is no constant takes 20 instructions.
    block = unit // turns
    turn = unit - block * turns
    coming = ()
    spans = ()
    far_block, far_turn = block, turn  # of what is loaded next
    for _ in tl.static_range(AHEAD):
        tile, c = tile_and_word(far_block, far_turn, warp, q, tiles, W)
        spans += (_load_span(unit_start, tile, far_turn, turns, W),)
        coming += (load_words(words, tile * (WIDTH * C * 16) + c * 16 + r * 2, c < C, WIDTH, C, EVEN),)
        far_block, far_turn = next_unit(far_block, far_turn, turns)
    far_tile, far_c = tile_and_word(far_block, far_turn, warp, q, tiles, W)
    spans += (_load_span(unit_start, far_tile, far_turn, turns, W),)
    entries = ()
    for i in tl.static_range(AHEAD):
        entries += (load_entry(escapes, spans[i]),)
    tile, c = tile_and_word(block, turn, warp, q, tiles, W)
    step_a, step_b = _steps_of(row_steps, row_terms, tile, r, TERMS)
    at_hand = load_columns(pairs_of_x, turn, M, C, BM, EVEN)
    memory = reserve_patches(W, COMPILED)
    sums = tl.zeros([16 * W, BM], tl.float32)
    for following in tl.range(unit + 1, stop + 1, num_stages=1):
        entries += (load_entry(escapes, spans[AHEAD]),)
        patches = write_patches(memory, entries, spans, escapes, W, COMPILED)
        factors = load_factors(column_factors, tl.minimum(c, C - 1), COLUMNS)
        weights = _unpacked(
            coming, step_a, step_b, factors, patches, WIDTH, TERMS, COLUMNS, HALF, W, COMPILED
        )
        now = in_order(at_hand, turn, C, HALF, BM)
        at = far_tile * (WIDTH * C * 16) + far_c * 16 + r * 2
        coming += (load_words(words, at, far_c < C, WIDTH, C, EVEN),)
        far_block, far_turn = next_unit(far_block, far_turn, turns)
        far_tile, far_c = tile_and_word(far_block, far_turn, warp, q, tiles, W)
        spans += (_load_span(unit_start, far_tile, far_turn, turns, W),)
        block, next_turn = next_unit(block, turn, turns)
        ends = (following == stop) | (next_turn == 0)
        turn = next_turn
        tile, c = tile_and_word(block, turn, warp, q, tiles, W)
        step_a, step_b = _steps_of(row_steps, row_terms, tile, r, TERMS)
        at_hand = load_columns(pairs_of_x, turn, M, C, BM, EVEN)
        coming, entries, spans = behind(coming, 1), behind(entries, 1), behind(spans, 1)
        if COMPILED:
            sums = tl.dot(weights, now, sums)
        else:
            sums = tl.dot(weights.to(tl.float32), now.to(tl.float32), sums, input_precision="ieee")
        if ends:
            tl.store(parts + part, sums)
            parts += BM * 16 * W
            sums = tl.zeros([16 * W, BM], tl.float32)


@triton.jit
def _load_span(unit_start, tile, turn, turns, W: tl.constexpr):
    """What `load_span` loads of a turn of each warp's tile."""
    unit = tile * turns + turn
    return load_span(unit_start, unit, unit + 1, W)
