"""Products of 2 to 64 rows with packed weights, in Triton, by the instruction of a warp group.

2 to 64 rows are too many bytes for every warp to load. Warps with tiles of their own go through the same
columns together, which lie in shared memory; what they have unpacked stays where the warp group's instruction
wants it. Several programs share the columns. Another kernel adds the parts up, in an order that never
changes; the escapes it has done by then.

How much work a program has depends on the shape of the weights. Those numbers are arguments of the kernels,
not constants: the matrices of a model share what was compiled for their words of a row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch, uses_pdl
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton.operands import in_order, load_columns, load_tile, unpacked
from neuzip.kernels.packed_linear.triton.words import (
    escapes_of_row,
    gather_x,
    load_escape,
    load_far,
    load_record,
)
from neuzip.kernels.tuning import launch_for

TILES = 4
"""Warps, and tiles of weights, of a program for 2 or more rows: what a warp group's instruction takes."""


_PARTS_AT_ONCE = tl.constexpr(8)
"""Parts that are loaded together, before their sum goes on."""


def multiply_some_rows(
    y: torch.Tensor, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None
) -> None:
    rows, out, device = x.shape[0], packed.shape[0], x.device
    tiles, _, lanes = packed.words.shape[:3]
    scale, half = 2.0**packed.shift, packed.dtype == torch.float16
    wide = max(16, triton.next_power_of_2(rows))
    blocks, turns = triton.cdiv(tiles, TILES), triton.cdiv(lanes, 4)
    resident = launch_for("packed_linear.some_rows", device, rows=wide)["programs"]
    programs, each = programs_of(blocks * turns, resident, device)
    own_blocks = 1 + triton.cdiv(each - 1, turns)
    spread = {"turns": turns, "each": each, "own_blocks": own_blocks}
    parts = torch.empty(programs, own_blocks, wide, 16 * TILES, dtype=torch.float32, device=device)
    # It waits for its predecessor to end, so its own successor, which has PDL, may start early.
    launch(
        _some_rows, (programs,),
        parts, x.view(torch.int32), packed.words, packed.far_index, packed.far_words, packed.base, scale,
        blocks * turns, out, rows, **spread, BM=wide, W=TILES, EVEN=lanes % 4 == 0, C=lanes,
        LOW=packed.low_bits, HALF=half, COMPILED=is_compiled(_some_rows),
        USE_PDL=uses_pdl(_some_rows, device), num_warps=TILES, device=device,
    )  # fmt: skip
    launch(
        add_parts, (blocks, wide // 8),
        y, parts, x, packed.row_start, packed.escapes, bias, packed.base, packed.shift, scale, out, rows,
        lanes, wide, **spread, HALF=half, BIAS=bias is not None, W=TILES, num_warps=TILES,
        pdl=True, device=device,
    )  # fmt: skip


@functools.cache
def programs_of(units: int, resident: int, device: torch.device) -> tuple[int, int]:
    """How many programs share so many units of work evenly, and how many each has: 4 or more if there are.

    All run at once, `resident` on a multiprocessor.
    """
    wanted = max(1, min(resident * multiprocessors(device), units // 4))
    each = triton.cdiv(units, wanted)
    return triton.cdiv(units, each), each


@triton.jit(
    do_not_specialize=["base", "scale", "units", "N", "M", "turns", "each", "own_blocks"],
    do_not_specialize_on_alignment=["far"],
)
def _some_rows(
    parts, pairs_of_x, words, index, far, base, scale, units, N, M, turns, each, own_blocks,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr, BM: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A share of the products of blocks of W tiles with up to BM rows of x: `each` of all `units`.

    A unit is a block and 128 columns, a turn. What they add to a block goes to parts [programs, own_blocks,
    BM, 16 W]. Words and x of the next unit are under way meanwhile. The loop is not left to the compiler to
    overlap: it would cut the instruction in eight that wait for each other.
    """
    if USE_PDL:
        cuda.gdc_launch_dependents()
    t = tl.arange(0, 32 * W)
    warp, lane = t // 32, t % 32
    r, q = lane // 4, lane % 4
    base4 = base * 0x01010101
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
    tile, c = tile_and_word(block, turn, warp, q, tiles, W)
    record = load_record(index + tile * ((C + 1) // 2 * 2), c, c < C, EVEN)
    a, b = load_tile(words, tile, c, r, LOW, HALF, C, EVEN)
    block, next_turn = next_unit(block, turn, turns)
    next_tile, behind = tile_and_word(block, next_turn, warp, q, tiles, W)
    next_record = load_record(index + next_tile * ((C + 1) // 2 * 2), behind, behind < C, EVEN)
    far_a, far_b = load_far(far, record, c, r, COMPILED)
    at_hand = load_columns(pairs_of_x, turn, M, C, BM, EVEN)
    sums = tl.zeros([16 * W, BM], tl.float32)
    for following in tl.range(unit + 1, stop + 1, num_stages=1):
        weights = unpacked(a, b, far_a, far_b, base4, LOW, HALF, W, COMPILED)
        now = in_order(at_hand, turn, C, HALF, BM)
        ends = (following == stop) | (next_turn == 0)
        turn = next_turn
        tile, c = next_tile, behind
        block, next_turn = next_unit(block, turn, turns)
        next_tile, behind = tile_and_word(block, next_turn, warp, q, tiles, W)
        a, b = load_tile(words, tile, c, r, LOW, HALF, C, EVEN)
        far_a, far_b = load_far(far, next_record, c, r, COMPILED)
        next_record = load_record(index + next_tile * ((C + 1) // 2 * 2), behind, behind < C, EVEN)
        at_hand = load_columns(pairs_of_x, turn, M, C, BM, EVEN)
        if COMPILED:
            sums = tl.dot(weights, now, sums)
        else:
            sums = tl.dot(weights.to(tl.float32), now.to(tl.float32), sums, input_precision="ieee")
        if ends:
            tl.store(parts + part, sums * scale)
            parts += BM * 16 * W
            sums = tl.zeros([16 * W, BM], tl.float32)


@triton.jit
def next_unit(block, turn, turns):
    """Block and turn of the unit behind one: the first turn of the next block after the last turn."""
    turn += 1
    return tl.where(turn == turns, block + 1, block), tl.where(turn == turns, 0, turn)


@triton.jit
def tile_and_word(block, turn, warp, q, tiles, W: tl.constexpr):
    """What a thread has of a unit; beyond the last tile that one again."""
    return tl.minimum(block * W + warp, tiles - 1).to(tl.int64), turn * 4 + q


@triton.jit(
    do_not_specialize=[
        "base", "shift", "scale", "N", "M", "lanes", "rows_of_part", "turns", "each", "own_blocks",
    ],
    do_not_specialize_on_alignment=["y", "parts", "x", "row_start", "escapes", "bias"],
)  # fmt: skip
def add_parts(
    y, parts, x, row_start, escapes, bias, base, shift, scale, N, M, lanes, rows_of_part, turns, each,
    own_blocks, HALF: tl.constexpr, BIAS: tl.constexpr, W: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Columns of a block of 16 W, for 8 rows of y: the escapes' share, then the parts in order of programs.

    Without `escapes` the parts are all there is.
    """
    t = tl.arange(0, 32 * W)
    block, octet = tl.program_id(0), tl.program_id(1) * 8
    begin = block * (16 * W)
    if escapes is None:
        result = tl.zeros([8, 16 * W], tl.float32)
    else:
        first, stop = escapes_of_row(row_start, tl.minimum(begin + t // 2, N - 1), t % 2)
        x += octet * (32 * lanes)
        fix = tl.zeros([32 * W, 8], tl.float32)
        for step in range(tl.cdiv(tl.max(stop - first, 0), 2)):
            off, column, there = load_escape(escapes, first + step * 2, stop, base, shift, scale, HALF)
            fix += off[:, None] * gather_x(x, column, there, M - octet, lanes, 8).to(tl.float32)
        result = tl.trans(tl.sum(tl.reshape(fix, [16 * W, 2, 8]), 1))
    n, m = tl.arange(0, 16 * W)[None, :], octet + tl.arange(0, 8)[:, None]
    inside = (begin + n < N) & (m < M)
    if BIAS:
        result += tl.load(bias + begin + n, mask=begin + n < N, other=0.0).to(tl.float32)
    program = block * turns // each
    beyond = ((block + 1) * turns - 1) // each + 1
    part_size = rows_of_part * (16 * W)
    of_program = (own_blocks * part_size).to(tl.int64)
    # The first program may have begun with blocks before this one; the others begin with this one.
    parts += program * of_program + (block - program * each // turns) * part_size
    before = (block - program * each // turns) * part_size
    at = m * (16 * W) + n
    if USE_PDL:
        cuda.gdc_wait()
    for _ in tl.range(tl.cdiv(beyond - program, _PARTS_AT_ONCE), num_stages=1):
        for _ in tl.static_range(_PARTS_AT_ONCE):  # in flight together
            result += tl.load(parts + at, mask=inside & (program < beyond), other=0.0)
            parts += of_program - before
            program += 1
            before = 0
    tl.store(y + m.to(tl.int64) * N + begin + n, result.to(y.dtype.element_ty), mask=inside)
