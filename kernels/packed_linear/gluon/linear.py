"""Products of many rows with packed weights, on Hopper: which launch of the kernel in `multiply` they get."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

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

LEAST_TURNS = 2
"""Turns of 128 columns that a program has, at least: with fewer, adding sums takes longer than multiplying."""

IN_CACHE = 40 << 20
"""Bytes of x and of words that stay in the L2 cache."""

SWIZZLED, PLAIN = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 3)
"""How x and y, and words, lie in shared memory."""


class Sharing(NamedTuple):
    """How blocks of y are shared out to programs: as many whole ones to each, and parts of those that are cut."""

    programs: int
    blocks: int
    cut: int = 0
    """The last blocks, which are cut between turns."""
    cutters: int = 0
    """Programs that share these."""


@functools.cache
def sharing(blocks: int, turns: int, processors: int, in_step: bool) -> Sharing:
    """Programs that are done at about the same time.

    Where the L2 cache holds everything, the blocks beyond whole waves, and those of the last wave, are cut anywhere. With
    `in_step` programs should read the same columns at the same time: blocks of the last wave alone are cut,
    each in the same number of parts.

    >>> sharing(320, 40, 132, False), sharing(320, 40, 132, True)
    (Sharing(programs=132, blocks=320, cut=188, cutters=132), Sharing(programs=132, blocks=320, cut=56, cutters=112))
    >>> sharing(264, 32, 132, False), sharing(2, 1, 132, False)
    (Sharing(programs=132, blocks=264, cut=0, cutters=0), Sharing(programs=2, blocks=2, cut=0, cutters=0))
    """
    waves, rest = divmod(blocks, processors)
    most = min(processors, blocks * turns // LEAST_TURNS)
    if rest == 0 or (waves == 0 and most <= blocks):
        return Sharing(min(blocks, processors), blocks)
    if waves == 0:
        return Sharing(most, blocks, blocks, most)
    if in_step:
        return Sharing(processors, blocks, rest, processors // rest * rest)
    return Sharing(processors, blocks, rest + processors, processors)


def can_multiply(packed: PackedTensor) -> bool:
    """Whether the kernel takes these weights: rows of whole turns, few escapes, rows of y of 16-byte multiples."""
    return packed.turn_index.numel() > 0 and packed.shape[0] % 8 == 0


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [..., in], bias [out], to [..., out].

    x, bias and the weights have one dtype and are contiguous, and `can_multiply` holds.
    """
    out, columns = packed.shape
    rows = x.numel() // columns
    y = x.new_empty(*x.shape[:-1], out)
    if x.data_ptr() % 16:
        x = x.clone()
    plan = _plan(rows, out, columns, packed.words.nbytes, x.device)
    share = plan.share
    if share.cut:
        groups = plan.groups * share.programs
        parts = x.new_empty(groups, GROUP_ROWS, plan.tile, dtype=torch.float32)
        counted = counters(x.device, groups)
    else:
        parts, counted = _nothing(x.device)
    packed.once(plan.name, plan.prepare)(
        (share.programs,),
        BoxedTensor(x, (rows, columns), (columns, 1), plan.x_box),
        BoxedTensor(y, (rows, out), (out, 1), plan.y_box),
        bias, parts, counted, share.blocks, share.cut, share.cutters, plan.rounds,
    )  # fmt: skip
    return y


class Plan(NamedTuple):
    """What products of one shape have in common."""

    tile: int
    groups: int
    rounds: int
    share: Sharing
    x_box: TensorBox
    y_box: TensorBox
    name: str
    prepare: Callable[[PackedTensor], PreparedLaunch]


@functools.lru_cache(maxsize=4096)
def _plan(rows: int, out: int, columns: int, word_bytes: int, device: torch.device) -> Plan:
    tile, groups = launch_for("packed_linear.many_rows_tile", device, rows=rows).values()
    rounds = -(-rows // tile)
    in_step = word_bytes + 2 * rows * columns > IN_CACHE
    blocks = -(-out // (groups * GROUP_ROWS)) * rounds
    share = sharing(blocks, columns // TURN, multiprocessors(device), in_step)
    x_box, y_box = TensorBox((tile, 64), SWIZZLED), TensorBox((min(tile, 128), 64), SWIZZLED)
    prepare = functools.partial(_prepared, tile, groups)
    return Plan(tile, groups, rounds, share, x_box, y_box, f"many rows, {tile}, {groups}", prepare)


@functools.cache
def _nothing(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts and counters of a launch that cuts no block."""
    return torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)


def _prepared(tile: int, groups: int, packed: PackedTensor) -> PreparedLaunch:
    """The launch for weights. It takes x, y, bias, parts, counters, and how blocks are shared out."""
    words, out = packed.words.flatten(2), packed.shape[0]
    first, other = planes_of_halves(packed.layout)
    config = launch_for(
        "packed_linear.many_rows", packed.device, tile=tile, groups=groups, planes=words.shape[1]
    )
    words_box = TensorBox((4 if groups == 3 else 4 * groups, 1, 64), PLAIN)
    return PreparedLaunch(
        many_rows, FREE, FREE, BoxedTensor(words, words.shape, words.stride(), words_box),
        packed.far_index.view(torch.int64), packed.far_words, packed.turn_index.view(torch.int64),
        packed.turn_escapes, FREE, FREE, FREE, packed.base, 2.0**packed.shift, FREE, FREE, FREE,
        packed.shape[1] // TURN, FREE, len(words), out,
        LOW=packed.low_bits, HALF=packed.dtype == torch.float16, FIRST_HALF=first, OTHER_HALF=other,
        ROWS=tile, GROUPS=groups, STAGES=config["x_stages"], WORD_STAGES=config["word_stages"],
        REGISTERS=config["registers"], num_warps=4, pdl=True, device=packed.device,
    )  # fmt: skip


@functools.cache
def planes_of_halves(layout: PackedLayout) -> tuple[int, int]:
    """The planes that have something of the first half of the slots, and of the other: a bit each."""
    return _planes_of(layout, range(4)), _planes_of(layout, range(4, 8))


def _planes_of(layout: PackedLayout, groups: range) -> int:
    """The planes that have something of the slots 4 g to 4 g + 3, for the g of `groups`: a bit each."""
    return sum(1 << plane for plane in {p.place(g)[0] for p in layout.groups for g in groups})
