"""Products of a few rows with packed weights, in Triton, by matrix instructions.

A warp takes tiles of 16 rows of the weights, 4 words of every plane at a time. Its thread (r, q) loads the
words of rows r and r + 8 in word q: unpacked, they are what it has to give to m16n8k16, with no thread asking
another:

    instruction g of a word takes the slots 4 g to 4 g + 3 of 4 words: k = 2 q, 2 q + 1, 2 q + 8, 2 q + 9

One row of x (`_one_row`) is one column of the 8 that an instruction multiplies with. So thread (r, q) loads x
only for the slots 4 r to 4 r + 3, and keeps to itself that they stand in column r: instruction g leaves in
its own sums, column g, what is asked for, and nonsense in the others. Several warps share the columns of a
tile and add their sums in the end. Words are read before the previous kernel has ended (PDL), x is not.
`some_rows` has the kernels for 2 to 64 rows.

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

from neuzip.kernels.device.launch import FREE, PreparedLaunch, is_compiled
from neuzip.kernels.device.mma_fragments import multiply
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.device.reduce import sum_rows
from neuzip.kernels.packed_linear.form import SLOTS
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.packed_linear.triton.some_rows import multiply_some_rows
from neuzip.kernels.packed_linear.triton.words import (
    HIGH_PLANES_BF16,
    HIGH_PLANES_F16,
    escapes_of_row,
    load_escape,
    load_far,
    load_record,
    load_words,
    weights_of,
)
from neuzip.kernels.tuning import launch_for


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
        multiply_some_rows(y, x, packed, bias)
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


@triton.jit
def load_pairs(x, c, r, inside, C: tl.constexpr, EVEN: tl.constexpr):
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
        a0, a2 = weights_of(a, far_a, base4, LOW, HALF, g, COMPILED)
        a1, a3 = weights_of(b, far_b, base4, LOW, HALF, g, COMPILED)
        added += (multiply((a0, a1, a2, a3), pairs[0], sums[g], W, HALF, COMPILED),)
    return added


@triton.jit
def behind(queue, COUNT: tl.constexpr):
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
    P: tl.constexpr = LOW + (HIGH_PLANES_F16 if HALF else HIGH_PLANES_BF16)
    t = tl.arange(0, T)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    tile = tl.program_id(0)
    n = tile * 16 + r + q % 2 * 8  # whose escapes a thread has
    words += tile.to(tl.int64) * (P * C * 16)
    index += tile.to(tl.int64) * ((C + 1) // 2 * 2)
    c = warp * 4 + q
    base4 = base * 0x01010101
    first, stop = escapes_of_row(row_start, tl.minimum(n, N - 1), warp * 2 + q // 2)

    # Of the turns to come, the next first.
    coming = ()
    records = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        records += (load_record(index, k, k < C, EVEN),)
        coming += (load_words(words, k * 16 + r * 2, k < C, P, C, EVEN),)
    for i in tl.static_range(AHEAD, 2 * AHEAD):
        k = tl.minimum(i, TURNS - 1) * (4 * W) + c
        records += (load_record(index, k, k < C, EVEN),)
    if USE_PDL:
        cuda.gdc_wait()  # for x
    pairs = ()
    fars = ()
    for i in tl.static_range(AHEAD):
        k = i * (4 * W) + c
        pairs += (load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
        fars += (load_far(far, records[i], k, r, COMPILED),)
    records = behind(records, AHEAD)
    off, column, there = load_escape(escapes, first, stop, base, shift, scale, HALF)
    fix = off * tl.load(x + column, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    zero = tl.zeros([T], tl.float32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    for turn in tl.range(TURNS, loop_unroll_factor=UNROLLED):
        k = tl.minimum(turn + AHEAD, TURNS - 1) * (4 * W) + c
        coming += (load_words(words, k * 16 + r * 2, k < C, P, C, EVEN),)
        pairs += (load_pairs(pairs_of_x, k, r, k < C, C, EVEN),)
        sums = _multiply_next(coming, fars, pairs, sums, base4, LOW, HALF, W, COMPILED)
        # Last, or the compiler lets what is multiplied wait for far words that are not needed yet.
        fars += (load_far(far, records[0], k, r, COMPILED),)
        k = tl.minimum(turn + 2 * AHEAD, TURNS - 1) * (4 * W) + c
        records += (load_record(index, k, k < C, EVEN),)
        coming, pairs = behind(coming, 1), behind(pairs, 1)
        fars, records = behind(fars, 1), behind(records, 1)
    if USE_PDL:
        cuda.gdc_launch_dependents()  # all words have been asked for
    for step in range(1, tl.cdiv(tl.max(stop - first, 0), EL)):
        off, column, there = load_escape(escapes, first + step * EL, stop, base, shift, scale, HALF)
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
