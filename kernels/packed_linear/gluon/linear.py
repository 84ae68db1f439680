"""Products of many rows with packed weights, on Hopper: which launch of the kernel in `multiply` they get."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from neuzip.kernels.device.counters import counters
from neuzip.kernels.device.launch import FREE, PreparedLaunch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.device.start import BoxedTensor, TensorBox
from neuzip.kernels.packed_linear.form import TURN, PackedLayout
from neuzip.kernels.packed_linear.gluon.multiply import many_rows
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

GROUP_ROWS = 64
"""Rows of the weights of a warp group."""

GROUPS = 2
"""Warp groups of a program that multiply."""

TILES = (16, 32, 64, 128, 256)
"""Rows of x that a program can multiply at a time."""

SHARES = ((1, 1), *((1, q) for q in range(2, 9)), (2, 3), (2, 5), (3, 4), (3, 5))
"""Parts p / q of a block that programs can have: few starts, so that many read the same columns."""

SWIZZLED, PLAIN = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 3)
"""How x and y, and words, lie in shared memory."""


class TilePlan(NamedTuple):
    """How blocks of y are shared out to programs: whole ones, and parts of those that are cut."""

    tile: int
    """Rows of x of a block."""
    programs: int
    blocks: int
    cut: int
    """The last blocks, which are cut between turns."""
    cutters: int
    """Programs that share these."""


@functools.lru_cache(maxsize=4096)
def plan(rows: int, out: int, turns: int, device: torch.device) -> TilePlan:
    """The plan that probably takes least, for rows of x, rows of the weights, and turns of 128 columns.

    Whole blocks fill waves of programs. Blocks beyond these are cut into parts of the same turns, by times
    from the card's table: of a turn, of a cut, and of each part of which sums are added.
    """
    processors = multiprocessors(device)
    plans = []
    for tile in TILES:
        time = launch_for("packed_linear.many_rows_time", device, tile=tile)
        blocks = -(-out // (GROUPS * GROUP_ROWS)) * -(-rows // tile)
        waves, rest = divmod(blocks, processors)
        for p, q in SHARES if rest else SHARES[:1]:
            cutters, parts = rest // p * q, -(-q // p)
            if rest % p or cutters > processors or q > turns:
                continue
            last = -(-turns * p // q) * time["turn"] if rest else 0.0
            adding = time["cut"] + parts * time["part"] if q > 1 else 0.0
            programs = processors if waves else cutters
            cut = (rest, cutters) if q > 1 else (0, 0)
            plans.append(
                (waves * turns * time["turn"] + last + adding, TilePlan(tile, programs, blocks, *cut))
            )
    return min(plans)[1]


def can_multiply(packed: PackedTensor) -> bool:
    """Whether the kernel takes these weights: rows of whole turns, few escapes, a multiple of 8 rows."""
    return packed.turn_index.numel() > 0 and packed.shape[0] % 8 == 0


def pays(rows: int, packed: PackedTensor) -> bool:
    """Whether the kernel takes x of so many rows, and takes less time than the one for 2 to 64 rows."""
    if not can_multiply(packed):
        return False
    out, columns = packed.shape
    use = launch_for("packed_linear.many_rows_pay", packed.device, rows=rows, weights=out * columns)
    return bool(use["pay"])


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [..., in], bias [out], to [..., out].

    x, bias and the weights have one dtype and are contiguous, and `can_multiply` holds.
    """
    (out, columns), device = packed.shape, x.device
    rows, turns = x.numel() // columns, columns // TURN
    y = x.new_empty(*x.shape[:-1], out)
    if x.data_ptr() % 16:
        x = x.clone()
    tile, programs, blocks, cut, cutters = plan(rows, out, turns, device)
    if cut:
        parts = x.new_empty(GROUPS * programs, GROUP_ROWS, tile, dtype=torch.float32)
        counted = counters(device, GROUPS * programs)
    else:
        parts, counted = nothing(device)
    to_x, to_y = boxes(tile)
    packed.once(f"many rows, {tile}", functools.partial(_prepared, tile))(
        (programs,), BoxedTensor(x, (rows, columns), (columns, 1), to_x),
        BoxedTensor(y, (rows, out), (out, 1), to_y), bias, parts, counted, blocks, cut, cutters,
        -(-rows // tile),
    )  # fmt: skip
    return y


@functools.cache
def nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts and counters of a launch that cuts no block."""
    parts = torch.empty(0, dtype=torch.float32, device=device)  # whatever torch's default dtype is
    return parts, torch.empty(0, dtype=torch.int32, device=device)


@functools.cache
def boxes(tile: int) -> tuple[TensorBox, TensorBox]:
    """What copies of x, and those of y, move."""
    return TensorBox((tile, 64), SWIZZLED), TensorBox((min(tile, 128), 64), SWIZZLED)


def _prepared(tile: int, packed: PackedTensor) -> PreparedLaunch:
    """Launches with a weight: x, y, bias, parts, counters, blocks, cut, cutters and rounds come with each."""
    return prepared_launch(tile, packed, (FREE, FREE, FREE), FREE, (None, None, 0, 1, 1))


def prepared_launch(
    tile: int,
    packed: PackedTensor,
    sharing: tuple[Any, Any, Any],
    rounds: Any,
    grouping: tuple[Any, Any, int, int, int],
    gated: bool = False,
) -> PreparedLaunch:
    """Launches of `many_rows` with a weight. x, y, bias, parts and counters come with each launch.

    `sharing` is blocks, cut and cutters; `grouping` is table, used, expert_tiles, tile_blocks and split. The
    other arguments are those of the kernel.
    """
    tiles, planes, lanes = packed.words.shape[:3]
    if packed.host_bytes and not packed.words.is_pinned():
        raise ValueError("words of packed weights on a GPU are there or in pinned host memory, not elsewhere")
    first, other = planes_of_halves(packed.layout)
    words = packed.words.view(tiles, planes, lanes * 16)
    config = launch_for("packed_linear.many_rows", packed.device, tile=tile, planes=planes)
    box = TensorBox((4 if gated else 4 * GROUPS, 1, 64), PLAIN)
    return PreparedLaunch(
        many_rows, FREE, FREE, BoxedTensor(words, tuple(words.shape), words.stride(), box),
        packed.far_index.view(torch.int64), packed.far_words, packed.turn_index.view(torch.int64),
        packed.turn_escapes, FREE, FREE, FREE, packed.base, 2.0**packed.shift, *sharing,
        packed.shape[1] // TURN, rounds, tiles, packed.shape[0], *grouping,
        LOW=packed.low_bits, HALF=packed.dtype == torch.float16, FIRST_HALF=first, OTHER_HALF=other,
        ROWS=tile, STAGES=config["x_stages"], WORD_STAGES=config["word_stages"],
        FIRST_STAGES=config["first_stages"], REGISTERS=config["registers"], GATED=gated,
        num_warps=4, pdl=True, device=packed.device,
    )  # fmt: skip


@functools.cache
def planes_of_halves(layout: PackedLayout) -> tuple[int, int]:
    """The planes that have something of the first half of the slots, and of the other: a bit each."""
    return _planes_of(layout, range(4)), _planes_of(layout, range(4, 8))


def _planes_of(layout: PackedLayout, groups: range) -> int:
    """The planes that have something of the slots 4 g to 4 g + 3, for the g of `groups`: a bit each."""
    return sum(1 << plane for plane in {p.place(g)[0] for p in layout.groups for g in groups})
