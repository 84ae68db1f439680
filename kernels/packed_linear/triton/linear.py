"""Products of a few rows with packed weights, in Triton, by matrix instructions.

A warp takes tiles of 16 rows of the weights, 4 words of every plane at a time. Its thread (r, q) loads the
words of rows r and r + 8 in word q: unpacked, they are what it has to give to m16n8k16, with no thread asking
another:

    instruction g of a word takes the slots 4 g to 4 g + 3 of 4 words: k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9

One row of x (`_one_row`) is one column of the 8 that an instruction multiplies with. So thread (r, q) loads x
only for the slots 4 r to 4 r + 3, and keeps to itself that they stand in column r: instruction g leaves in
its own sums, column g, what is asked for, and nonsense in the others. Several warps share the columns of a
tile and add their sums in the end. Words are read before the
previous kernel has ended (PDL), x is not.

2 to 64 rows (`_some_rows`) are too many bytes for every warp to load. Warps with tiles of their own go
through the same columns together, which lie in shared memory; what they have unpacked stays where the warp
group's instruction wants it. Several programs share the columns. Another kernel adds the parts up, in an
order that never changes; the escapes it has done by then.

Where a far word is, its record in the index says, which is loaded turns before it. Escapes are so few that a
thread mostly has none: theirs are loaded first, and added last.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import FREE, PreparedLaunch, is_compiled, launch, uses_pdl
from neuzip.kernels.device.mma_fragments import float_of, multiply, side_by_side
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.device.reduce import sum_rows
from neuzip.kernels.packed_linear.form import SLOTS, PackedLayout
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.kernels.packed_linear.triton.slots import (
    as_start,
    count_below,
    high_bytes,
    low_bytes,
    slot_of_escape,
)
from neuzip.kernels.tuning import launch_for

TILES = 4
"""Warps, and tiles of weights, of a program for 2 or more rows: what a warp group's instruction takes."""


def linear(
    x: torch.Tensor,
    packed: PackedTensor,
    bias: torch.Tensor | None = None,
    one_row: OneRowLaunch | None = None,
) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [rows, in], 1 to 64 rows, bias [out], to [rows, out].

    x, bias and the weights have one dtype and are contiguous. `one_row` replaces the launch of the table.
    """
    rows, columns = x.shape
    out = packed.shape[0]
    compiled = is_compiled(_one_row)
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    y = torch.empty(rows, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    lanes = packed.words.shape[2]
    if columns != SLOTS * lanes:
        x = F.pad(x, (0, SLOTS * lanes - columns))
    elif x.data_ptr() % 16:
        x = x.clone()
    if rows == 1:
        _multiply_one_row(y, x, packed, bias, one_row)
    else:
        _multiply_some_rows(y, x, packed, bias)
    return y.to(x.dtype)


def _multiply_one_row(
    y: torch.Tensor, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None,
    one_row: OneRowLaunch | None,
) -> None:  # fmt: skip
    if one_row is None:
        prepared = packed.once(
            "one row" if bias is None else "one row and a bias",
            functools.partial(_prepared, one_row=None, has_bias=bias is not None),
        )
    else:
        prepared = _prepared(packed, one_row, has_bias=bias is not None)
    prepared((len(packed.words),), y, x.view(torch.int32), x, bias)


def _prepared(packed: PackedTensor, one_row: OneRowLaunch | None, has_bias: bool) -> PreparedLaunch:
    """The launch for weights and one row. It takes y, x in pairs of columns, x, and a bias or None."""
    tiles, planes, lanes = packed.words.shape[:3]
    warps, ahead, unrolled, registers = one_row or one_row_launch(tiles, planes, lanes, packed.device)
    turns = triton.cdiv(lanes, 4 * warps)
    return PreparedLaunch(
        _one_row, FREE, FREE, FREE, packed.words, packed.far_index, packed.far_words, packed.row_start,
        packed.escapes, FREE, packed.base, packed.shift, 2.0**packed.shift, packed.shape[0],
        W=warps, TURNS=turns, AHEAD=min(ahead, turns), UNROLLED=min(unrolled, turns),
        EVEN=lanes % (4 * warps) == 0, BIAS=has_bias, C=lanes, LOW=packed.low_bits,
        HALF=packed.dtype == torch.float16, COMPILED=is_compiled(_one_row),
        num_warps=warps, maxnreg=registers, pdl=True, device=packed.device,
    )  # fmt: skip


def _multiply_some_rows(
    y: torch.Tensor, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None
) -> None:
    rows, out, device = x.shape[0], packed.shape[0], x.device
    tiles, _, lanes = packed.words.shape[:3]
    scale, half = 2.0**packed.shift, packed.dtype == torch.float16
    wide = max(16, triton.next_power_of_2(rows))
    blocks, turns = triton.cdiv(tiles, TILES), triton.cdiv(lanes, 4)
    resident = launch_for("packed_linear.some_rows", device, rows=wide)["programs"]
    programs, each = _programs(blocks * turns, resident, device)
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
        _add_parts, (blocks, wide // 8),
        y, parts, x, packed.row_start, packed.escapes, bias, packed.base, packed.shift, scale, out, rows,
        lanes, wide, **spread, HALF=half, BIAS=bias is not None, W=TILES,
        num_warps=TILES, pdl=True, device=device,
    )  # fmt: skip


class OneRowLaunch(NamedTuple):
    """How a product of one row is launched."""

    warps: int
    """Warps that share a tile."""
    ahead: int = 1
    """Turns by which words, x and far words are prefetched."""
    unrolled: int = 1
    """Turns that the loop is written out for."""
    registers: int = 128
    """Registers of a thread, at most."""


@functools.cache
def one_row_launch(tiles: int, planes: int, lanes: int, device: torch.device) -> OneRowLaunch:
    """The launch for so many tiles, planes and words of a row, from the table of the card.

    It depends on how many tiles a multiprocessor has, and on how many warps that makes.
    """
    a_processor = tiles / multiprocessors(device)
    most = launch_for("packed_linear.one_row_warps", device, planes=planes, tiles=a_processor)["warps"]
    warps = min(most, triton.next_power_of_2(triton.cdiv(lanes, 4)))
    config = launch_for("packed_linear.one_row", device, planes=planes, warps=a_processor * warps)
    return OneRowLaunch(warps, config["ahead"], config["unrolled"], config["registers"])


@functools.cache
def _programs(units: int, resident: int, device: torch.device) -> tuple[int, int]:
    """How many programs share so many units of work evenly, and how many each has: 4 or more if there are.

    All run at once, `resident` on a multiprocessor.
    """
    wanted = max(1, min(resident * multiprocessors(device), units // 4))
    each = triton.cdiv(units, wanted)
    return triton.cdiv(units, each), each


_PARTS_AT_ONCE = tl.constexpr(8)
"""Parts that are loaded together, before their sum goes on."""

_F16 = PackedLayout(format_of(torch.float16), 8)
_BF16 = PackedLayout(format_of(torch.bfloat16), 8)
_HIGH_PLANES_F16 = tl.constexpr(_F16.planes - 8)
_HIGH_PLANES_BF16 = tl.constexpr(_BF16.planes - 8)


@triton.jit
def _plane(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of rows r and r + 8."""
    two = words + (at + P * C * 16)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(two) if EVEN else tl.load(two, mask=inside[:, None], other=0))


@triton.jit
def _load_words(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of each of P planes: those of row r, and those of row r + 8."""
    a = ()
    b = ()
    for p in tl.static_range(P):
        one, other = _plane(words, at, inside, p, C, EVEN)
        a += (one,)
        b += (other,)
    return a, b


@triton.jit
def _record(index, c, inside, EVEN: tl.constexpr):
    """Which rows of a word's pair have a far word, as bits, and where their far words begin."""
    two = (index + c // 2 * 2)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(two) if EVEN else tl.load(two, mask=inside[:, None], other=0))


@triton.jit
def _load_far(far, record, c, r, COMPILED: tl.constexpr):
    """The far words of rows r and r + 8, 0 where there is none."""
    mask, start = record
    bit = c % 2 * 16 + 2 * r
    at = far + start + count_below(mask, bit, COMPILED)
    own, next_own = (mask >> bit) & 1, (mask >> (bit + 1)) & 1
    return tl.load(at, mask=own != 0, other=0), tl.load(at + own, mask=next_own != 0, other=0)


@triton.jit
def _weights(
    words, far, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, COMPILED: tl.constexpr
):
    """Slots 4 G and 4 G + 1, and the next two, of a row."""
    low = low_bytes(words, LOW, G)
    high = high_bytes(words, far, base4, LOW, HALF, G)
    return side_by_side(low, high, COMPILED)


@triton.jit
def _escape(escapes, at, stop, base, shift, scale, HALF: tl.constexpr):
    """How far a weight is from what stands in its slot, its position, and whether there is one."""
    there = at < stop
    entry = tl.load(escapes + at, mask=there, other=0)
    slot = float_of(slot_of_escape((entry >> 16) & 0xFFFF, base, shift, HALF), HALF) * scale
    return tl.where(there, float_of(entry >> 16, HALF) - slot, 0.0), entry & 0xFFFF, there


@triton.jit
def _escapes_of_row(row_start, row, own):
    """Which escapes of a row a thread begins with, and where they end."""
    return as_start(tl.load(row_start + row)) + own, as_start(tl.load(row_start + row + 1))


@triton.jit
def _gather(x, column, there, M, C, BM: tl.constexpr):
    """x of the escape of each thread: [T, BM]."""
    m = tl.arange(0, BM)[None, :]
    return tl.load(x + (m * (32 * C) + column[:, None]), mask=there[:, None] & (m < M), other=0.0)


@triton.jit
def _load_pairs(x, c, r, inside, C: tl.constexpr, EVEN: tl.constexpr):
    """x for the slots 4 r to 4 r + 3 of one word: two pairs."""
    first = c // 4 * 64 + c % 4 + 8 * r
    second = first + 4
    if C % 4 != 0:
        whole = c < C // 4 * 4
        first = tl.where(whole, first, 16 * c + 2 * r)
        second = tl.where(whole, second, first + 1)
    if EVEN:
        return tl.load(x + first), tl.load(x + second)
    return tl.load(x + first, mask=inside, other=0), tl.load(x + second, mask=inside, other=0)


@triton.jit
def _multiply_next(
    coming, fars, pairs, sums, base4,
    LOW: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add the products of the next words, of rows r and r + 8, with x to the sums of the 8 instructions."""
    a, b = coming[0]
    far_a, far_b = fars[0]
    added = ()
    for g in tl.static_range(8):
        a0, a2 = _weights(a, far_a, base4, LOW, HALF, g, COMPILED)
        a1, a3 = _weights(b, far_b, base4, LOW, HALF, g, COMPILED)
        added += (multiply((a0, a1, a2, a3), pairs[0], sums[g], W, HALF, COMPILED),)
    return added


@triton.jit
def _behind(queue, COUNT: tl.constexpr):
    """A tuple without the first COUNT."""
    left = ()
    for i in tl.static_range(COUNT, len(queue)):
        left += (queue[i],)
    return left


@triton.jit(
    do_not_specialize=["base", "shift", "scale", "N"],
    do_not_specialize_on_alignment=["y", "x", "far", "row_start", "escapes", "bias"],
)
def _one_row(
    y, pairs_of_x, x, words, index, far, row_start, escapes, bias, base, shift, scale, N,
    C: tl.constexpr, LOW: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, COMPILED: tl.constexpr,
    W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, UNROLLED: tl.constexpr, EVEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """16 values of y for one row of x: W warps share the columns, 4 words each in turn.

    What is multiplied is loaded AHEAD turns before, and the records that say where far words are, as many
    before these.
    """
    T: tl.constexpr = 32 * W
    EL: tl.constexpr = 2 * W  # escapes of a row at a time
    P: tl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    t = tl.arange(0, T)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.program_id(0)
    n = tile * 16 + r + q % 2 * 8  # whose escapes a thread has
    words += tile.to(tl.int64) * (P * C * 16)
    index += tile.to(tl.int64) * ((C + 1) // 2 * 2)
    c = warp * 4 + q
    base4 = base * 0x01010101
    first, stop = _escapes_of_row(row_start, tl.minimum(n, N - 1), warp * 2 + q // 2)

    # Of the turns to come, the next first.
    coming = ()
    records = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        records += (_record(index, k, k < C, EVEN),)
        coming += (_load_words(words, k * 16 + r * 2, k < C, P, C, EVEN),)
    for i in tl.static_range(AHEAD, 2 * AHEAD):
        k = tl.minimum(i, TURNS - 1) * (4 * W) + c
        records += (_record(index, k, k < C, EVEN),)
    if USE_PDL:
        cuda.gdc_wait()  # for x
    pairs = ()
    fars = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        pairs += (_load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
        fars += (_load_far(far, records[i], k, r, COMPILED),)
    records = _behind(records, AHEAD)
    off, column, there = _escape(escapes, first, stop, base, shift, scale, HALF)
    fix = off * tl.load(x + column, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    zero = tl.zeros([T], tl.float32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        k = tl.minimum(turn + AHEAD, TURNS - 1) * (4 * W) + c
        coming += (_load_words(words, k * 16 + r * 2, k < C, P, C, EVEN),)
        pairs += (_load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
        sums = _multiply_next(coming, fars, pairs, sums, base4, LOW, HALF, W, COMPILED)
        # Last, or the compiler lets what is multiplied wait for far words that are not needed yet.
        fars += (_load_far(far, records[0], k, r, COMPILED),)
        k = tl.minimum(turn + 2 * AHEAD, TURNS - 1) * (4 * W) + c
        records += (_record(index, k, k < C, EVEN),)
        coming, pairs = _behind(coming, 1), _behind(pairs, 1)
        fars, records = _behind(fars, 1), _behind(records, 1)
    if USE_PDL:
        cuda.gdc_launch_dependents()  # all words have been asked for
    for step in range(1, tl.cdiv(tl.max(stop - first, 0), EL)):
        off, column, there = _escape(escapes, first + step * EL, stop, base, shift, scale, HALF)
        fix += off * tl.load(x + column, mask=there, other=0.0).to(tl.float32)

    # Thread q has columns 2 q and 2 q + 1 of all sums; of sums g, column g counts.
    top, bottom = zero, zero
    for i in tl.static_range(4):
        top = tl.where(q == i, sums[2 * i][0] + sums[2 * i + 1][1], top)
        bottom = tl.where(q == i, sums[2 * i][2] + sums[2 * i + 1][3], bottom)
    top = top * scale + tl.where(q % 2 == 0, fix, 0.0)
    bottom = bottom * scale + tl.where(q % 2 == 0, 0.0, fix)
    top, bottom = sum_rows((top, bottom), W, COMPILED)
    result = tl.where(q == 0, top, bottom)
    if BIAS:
        result += added
    tl.store(y + n, result.to(y.dtype.element_ty), mask=(n < N) & (warp == 0) & (q < 2))


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
    tile, c = _tile_and_word(block, turn, warp, q, tiles, W)
    record = _record(index + tile * ((C + 1) // 2 * 2), c, c < C, EVEN)
    a, b = _tile_words(words, tile, c, r, LOW, HALF, C, EVEN)
    block, next_turn = _next_unit(block, turn, turns)
    next_tile, behind = _tile_and_word(block, next_turn, warp, q, tiles, W)
    next_record = _record(index + next_tile * ((C + 1) // 2 * 2), behind, behind < C, EVEN)
    far_a, far_b = _load_far(far, record, c, r, COMPILED)
    at_hand = _columns(pairs_of_x, turn, M, C, BM, EVEN)
    sums = tl.zeros([16 * W, BM], tl.float32)
    for following in tl.range(unit + 1, stop + 1, num_stages=1):
        weights = _unpacked(a, b, far_a, far_b, base4, LOW, HALF, W, COMPILED)
        now = _in_order(at_hand, turn, C, HALF, BM)
        ends = (following == stop) | (next_turn == 0)
        turn = next_turn
        tile, c = next_tile, behind
        block, next_turn = _next_unit(block, turn, turns)
        next_tile, behind = _tile_and_word(block, next_turn, warp, q, tiles, W)
        a, b = _tile_words(words, tile, c, r, LOW, HALF, C, EVEN)
        far_a, far_b = _load_far(far, next_record, c, r, COMPILED)
        next_record = _record(index + next_tile * ((C + 1) // 2 * 2), behind, behind < C, EVEN)
        at_hand = _columns(pairs_of_x, turn, M, C, BM, EVEN)
        if COMPILED:
            sums = tl.dot(weights, now, sums)
        else:
            sums = tl.dot(weights.to(tl.float32), now.to(tl.float32), sums, input_precision="ieee")
        if ends:
            tl.store(parts + part, sums * scale)
            parts += BM * 16 * W
            sums = tl.zeros([16 * W, BM], tl.float32)


@triton.jit
def _next_unit(block, turn, turns):
    """Block and turn of the unit behind one: the first turn of the next block after the last turn."""
    turn += 1
    return tl.where(turn == turns, block + 1, block), tl.where(turn == turns, 0, turn)


@triton.jit
def _tile_and_word(block, turn, warp, q, tiles, W: tl.constexpr):
    """What a thread has of a unit; beyond the last tile that one again."""
    return tl.minimum(block * W + warp, tiles - 1).to(tl.int64), turn * 4 + q


@triton.jit
def _tile_words(
    words, tile, c, r, LOW: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr
):
    """A word of each plane of rows r and r + 8 of a tile."""
    P: tl.constexpr = LOW + (_HIGH_PLANES_F16 if HALF else _HIGH_PLANES_BF16)
    return _load_words(words, tile * (P * C * 16) + c * 16 + r * 2, c < C, P, C, EVEN)


@triton.jit(
    do_not_specialize=[
        "base", "shift", "scale", "N", "M", "lanes", "rows_of_part", "turns", "each", "own_blocks",
    ],
    do_not_specialize_on_alignment=["y", "parts", "x", "row_start", "escapes", "bias"],
)  # fmt: skip
def _add_parts(
    y, parts, x, row_start, escapes, bias, base, shift, scale, N, M, lanes, rows_of_part, turns, each,
    own_blocks, HALF: tl.constexpr, BIAS: tl.constexpr, W: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """16 W columns of 8 rows of y: meanwhile the escapes' share, then the parts in the order of programs."""
    EL: tl.constexpr = 2  # escapes of a row at a time
    t = tl.arange(0, 32 * W)
    block, octet = tl.program_id(0), tl.program_id(1) * 8
    begin = block * (16 * W)
    first, stop = _escapes_of_row(row_start, tl.minimum(begin + t // EL, N - 1), t % EL)
    x += octet * (32 * lanes)
    fix = tl.zeros([32 * W, 8], tl.float32)
    for step in range(tl.cdiv(tl.max(stop - first, 0), EL)):
        off, column, there = _escape(escapes, first + step * EL, stop, base, shift, scale, HALF)
        fix += off[:, None] * _gather(x, column, there, M - octet, lanes, 8).to(tl.float32)
    result = tl.trans(tl.sum(tl.reshape(fix, [16 * W, EL, 8]), 1))
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


@triton.jit
def _columns(pairs_of_x, turn, M, C: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr):
    """The 128 columns of x of a turn, as they lie: pairs [BM, 64]."""
    m, k = tl.arange(0, BM)[:, None], turn * 64 + tl.arange(0, 64)[None, :]
    inside = (m < M) if EVEN else (m < M) & (k < 16 * C)
    return tl.load(pairs_of_x + (m * (16 * C) + k), mask=inside, other=0)


@triton.jit
def _in_order(pairs, turn, C: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr):
    """Columns of x in the order of the instructions: [128, BM]. Words that are no turn hold 32 neighbours."""
    if C % 4 != 0:
        # q, g, half of an instruction
        parts = tl.permute(tl.reshape(pairs, [BM, 4, 8, 2]), (0, 2, 3, 1))
        pairs = tl.where(turn == C // 4, tl.reshape(parts, [BM, 64]), pairs)
    return tl.trans(tl.reshape(_pair(pairs, HALF), [BM, 128]))


@triton.jit
def _unpacked(
    a, b, far_a, far_b, base4, LOW: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr
):
    """The weights of W tiles, [16 W, 128], from the words of rows r and r + 8.

    Each thread has what the instruction wants of it, so nothing moves between threads.
    """
    groups = ()
    for g in tl.static_range(8):
        a0, a2 = _weights(a, far_a, base4, LOW, HALF, g, COMPILED)
        a1, a3 = _weights(b, far_b, base4, LOW, HALF, g, COMPILED)
        first = tl.join(_pair(a0, HALF), _pair(a1, HALF))
        groups += (tl.join(first, tl.join(_pair(a2, HALF), _pair(a3, HALF))),)
    # warp, r, q, of a pair, row r or r + 8, half of an instruction, g
    tile = tl.reshape(_all_eight(groups), [W, 8, 4, 2, 2, 2, 8])
    return tl.reshape(tl.permute(tile, (0, 4, 1, 6, 5, 2, 3)), [16 * W, 128])


@triton.jit
def _all_eight(groups):
    """Eight arrays as one, with three last axes of 2: the bits of their numbers."""
    even = tl.join(tl.join(groups[0], groups[4]), tl.join(groups[2], groups[6]))
    odd = tl.join(tl.join(groups[1], groups[5]), tl.join(groups[3], groups[7]))
    return tl.join(even, odd)


@triton.jit
def _pair(pattern, HALF: tl.constexpr):
    """The two weights in an int32: [T, 2]."""
    low, high = (pattern & 0xFFFF).to(tl.uint16), ((pattern >> 16) & 0xFFFF).to(tl.uint16)
    both = tl.join(low, high)
    return both.to(tl.float16, bitcast=True) if HALF else both.to(tl.bfloat16, bitcast=True)
