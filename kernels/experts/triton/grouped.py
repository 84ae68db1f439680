"""Products of tiles of rows with the packed weights of their expert, in Triton: any NVIDIA GPU, any width.

A program has some rows of a tile and 64 rows of the weights: a tile of 16 for each of four warps. It goes
through the columns, 128 at a time, as products of 2 to 64 rows do (packed_linear's `some_rows`), and writes
its results at once. Words and rows of the next columns are loaded before those at hand are multiplied.
Programs of tiles that are not in use end at once.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import FREE, PreparedLaunch, is_compiled
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.packed_linear.form import SLOTS, TILE_ROWS
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton.operands import in_order, load_columns, load_tile, unpacked
from neuzip.kernels.packed_linear.triton.words import (
    escapes_of_row,
    gather_x,
    load_escape,
    load_far,
    load_record,
)

WARPS = 4
"""Warps of a program, and its tiles of weights: what a warp group's instruction takes."""

WIDEST = 64
"""Rows that a program multiplies, at most: a larger tile is shared by several."""


def grouped_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None = None
) -> Tensor:
    """rows @ weights.T + bias of the expert of each tile, with fp32 sums: [rows, in] to [rows, out].

    packed [experts * out, in], bias [experts, out], contiguous. Rows that no pair fills stay undefined.
    """
    out, columns = packed.shape[0] // experts, packed.shape[1]
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    dtype = rows.dtype if is_compiled(_grouped) else torch.float32
    y = torch.empty(len(rows), out, dtype=dtype, device=rows.device)
    if y.numel() == 0:
        return y.to(rows.dtype)
    filled = SLOTS * packed.words.shape[2]
    if columns != filled:
        rows = F.pad(rows, (0, filled - columns))
    elif rows.data_ptr() % 16:
        rows = rows.clone()
    wide = min(routing.tile, WIDEST)
    straddled = 0 if out % TILE_ROWS == 0 else TILE_ROWS - 1  # rows of other experts in the first tile
    grid = len(routing.tiles) * (routing.tile // wide), triton.cdiv(out + straddled, WARPS * TILE_ROWS)
    make = functools.partial(_prepared, experts, routing.tile // wide, wide, bias is not None)
    packed.once(f"experts on any GPU, {experts}, {routing.tile}, {bias is None}", make)(
        grid, y, rows.view(torch.int32), rows, bias, routing.tiles, routing.count
    )
    return y.to(rows.dtype)


def _prepared(experts: int, parts: int, wide: int, has_bias: bool, packed: PackedTensor) -> PreparedLaunch:
    """Launches with weights of experts: y, pairs of rows, rows, bias, tiles and count come with each."""
    return PreparedLaunch(
        _grouped, FREE, FREE, FREE, packed.words, packed.far_index, packed.far_words, packed.row_start,
        packed.escapes, FREE, FREE, FREE, packed.base, packed.shift, 2.0**packed.shift,
        packed.shape[0] // experts, packed.shape[0], parts,
        C=packed.words.shape[2], LOW=packed.low_bits, HALF=packed.dtype == torch.float16, BIAS=has_bias,
        BM=wide, W=WARPS, COMPILED=is_compiled(_grouped), num_warps=WARPS, pdl=True, device=packed.device,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["base", "shift", "scale", "N", "parts"],
    do_not_specialize_on_alignment=["far", "row_start", "escapes", "bias"],
)
def _grouped(
    y, pairs_of_x, x, words, index, far, row_start, escapes, bias, tiles, count, base, shift, scale, out, N,
    parts,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
    W: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """16 W columns of y for BM rows of a tile."""
    EL: tl.constexpr = 2  # escapes of a row of the weights at a time
    TURNS: tl.constexpr = (C + 3) // 4
    own, block = tl.program_id(0), tl.program_id(1)
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    number = own // parts
    if number >= tl.load(count):
        return
    M = tl.load(tiles + number * 4 + 3) - own % parts * BM
    if M <= 0:
        return
    first_row = tl.load(tiles + number * 4) * out
    row = own.to(tl.int64) * BM
    pairs_of_x += row * (16 * C)
    x += row * (32 * C)
    y += row * out
    t = tl.arange(0, 32 * W)
    warp, lane = t // 32, t % 32
    r, q = lane // 4, lane % 4
    base4 = base * 0x01010101
    first_tile = first_row // 16 + block * W
    begin = first_tile * 16 - first_row  # of the columns of y; below 0 where the tile has rows of others
    tile = tl.minimum(first_tile + warp, (first_row + out - 1) // 16).to(tl.int64)
    index += tile * ((C + 1) // 2 * 2)

    first, stop = escapes_of_row(row_start, tl.minimum(first_tile * 16 + t // EL, N - 1), t % EL)
    record = load_record(index, q, q < C, False)
    a, b = load_tile(words, tile, q, r, LOW, HALF, C, False)
    far_a, far_b = load_far(far, record, q, r, COMPILED)
    record = load_record(index, q + 4, q + 4 < C, False)
    at_hand = load_columns(pairs_of_x, 0, M, C, BM, False)
    off, column, there = load_escape(escapes, first, stop, base, shift, scale, HALF)
    sums = tl.zeros([16 * W, BM], tl.float32)
    for turn in tl.range(1, TURNS + 1, num_stages=1):
        weights = unpacked(a, b, far_a, far_b, base4, LOW, HALF, W, COMPILED)
        now = in_order(at_hand, turn - 1, C, HALF, BM)
        # Behind the last word nothing is loaded.
        c = turn * 4 + q
        a, b = load_tile(words, tile, c, r, LOW, HALF, C, False)
        far_a, far_b = load_far(far, record, c, r, COMPILED)
        record = load_record(index, c + 4, c + 4 < C, False)
        at_hand = load_columns(pairs_of_x, turn, M, C, BM, False)
        if COMPILED:
            sums = tl.dot(weights, now, sums)
        else:
            sums = tl.dot(weights.to(tl.float32), now.to(tl.float32), sums, input_precision="ieee")

    fix = off[:, None] * gather_x(x, column, there, M, C, BM).to(tl.float32)
    for step in range(1, tl.cdiv(tl.max(stop - first, 0), EL)):
        off, column, there = load_escape(escapes, first + step * EL, stop, base, shift, scale, HALF)
        fix += off[:, None] * gather_x(x, column, there, M, C, BM).to(tl.float32)
    n, m = begin + tl.arange(0, 16 * W)[:, None], tl.arange(0, BM)[None, :]
    inside = (n >= 0) & (n < out)
    result = sums * scale + tl.sum(tl.reshape(fix, [16 * W, EL, BM]), 1)
    if BIAS:
        result += tl.load(bias + first_row + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + (m * out + n), result.to(y.dtype.element_ty), mask=inside & (m < M))
