"""Products of many rows with packed weights, on Hopper: which launch of the kernel in `multiply` they get."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from neuzip.kernels.device.counters import counters
from neuzip.kernels.device.launch import launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.packed_linear.form import TURN, PackedLayout
from neuzip.kernels.packed_linear.gluon.multiply import many_rows
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

GROUP_ROWS = 64
"""Rows of the weights of a warp group."""

SWIZZLED, PLAIN = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 3)
"""How x and y, and words, lie in shared memory."""


class Plan(NamedTuple):
    """How blocks of y are shared out to programs: as many whole ones to each, and parts of those that are cut."""

    tile: int
    """Rows of x of a block."""
    groups: int
    """Warp groups of a program, which have 64 rows of the weights each."""
    programs: int
    blocks: int
    cut: int
    """The last blocks, which are cut between turns."""
    cutters: int
    """Programs that share these, as many for each of them."""


@functools.cache
def plan(rows: int, out: int, turns: int, device: torch.device) -> Plan:
    """The plan for x of so many rows, and so many rows and turns of 128 columns of the weights, that takes least.

    Whole blocks fill waves. Those beyond are cut into as many parts each, all of the same turns, so that programs
    read the same columns of x at the same time: the L2 cache then reads them once for several.
    """
    processors = multiprocessors(device)
    plans = []
    for config in launch_for("packed_linear.many_rows_time", device)["tiles"]:
        tile, groups = config["tile"], config["groups"]
        blocks = -(-out // (groups * GROUP_ROWS)) * -(-rows // tile)
        waves, rest = divmod(blocks, processors)
        for parts in range(1, (min(processors // rest, turns) if rest else 1) + 1):
            cut = rest if parts > 1 else 0
            programs = processors if waves else max(1, rest * parts)
            last = -(-turns // parts) * config["turn"] if rest else 0.0
            adding = config["cut"] + parts * config["part"] if cut else 0.0
            seconds = waves * turns * config["turn"] + last + adding
            plans.append((seconds, Plan(tile, groups, programs, blocks, cut, cut * parts)))
    return min(plans)[1]


def can_multiply(packed: PackedTensor) -> bool:
    """Whether the kernel takes these weights: rows of whole turns, few escapes, rows of y of 16-byte multiples."""
    return packed.turn_index.numel() > 0 and packed.shape[0] % 8 == 0


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [..., in], bias [out], to [..., out].

    x, bias and the weights have one dtype and are contiguous, and `can_multiply` holds.
    """
    out, columns = packed.shape
    rows = x.numel() // columns
    y = torch.empty(*x.shape[:-1], out, dtype=x.dtype, device=x.device)
    if x.data_ptr() % 16:
        x = x.clone()
    turns = columns // TURN
    tile, groups, programs, blocks, cut, cutters = plan(rows, out, turns, x.device)
    parts = torch.empty(groups * programs if cut else 0, GROUP_ROWS, tile, dtype=torch.float32, device=x.device)
    arrays, constants = packed.once(f"many rows, {tile}, {groups}", functools.partial(_of_weights, tile, groups))
    launch(
        many_rows, (programs,),
        TensorDescriptor(x, [rows, columns], [columns, 1], [tile, 64], SWIZZLED),
        TensorDescriptor(y, [rows, out], [out, 1], [min(tile, 128), 64], SWIZZLED),
        *arrays, bias, parts, counters(x.device, len(parts)), packed.base, 2.0**packed.shift, blocks, cut, cutters,
        turns, -(-rows // tile), packed.words.shape[0], out, **constants, pdl=True, device=x.device,
    )  # fmt: skip
    return y


def _of_weights(tile: int, groups: int, packed: PackedTensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a launch is given of weights, and what it is compiled for."""
    tiles, planes, lanes = packed.words.shape[:3]
    first, other = planes_of_halves(packed.layout)
    arrays = (
        TensorDescriptor.from_tensor(packed.words.view(tiles, planes, lanes * 16), [4 if groups == 3 else 4 * groups, 1, 64], PLAIN),
        packed.far_index.view(torch.int64), packed.far_words, packed.turn_index.view(torch.int64),
        packed.turn_escapes,
    )  # fmt: skip
    config = launch_for("packed_linear.many_rows", packed.device, tile=tile, groups=groups, planes=planes)
    constants = {
        "LOW": packed.low_bits, "HALF": packed.dtype == torch.float16, "FIRST_HALF": first,
        "OTHER_HALF": other, "ROWS": tile, "GROUPS": groups, "STAGES": config["x_stages"],
        "WORD_STAGES": config["word_stages"], "REGISTERS": config["registers"], "num_warps": 4,
    }  # fmt: skip
    return arrays, constants


@functools.cache
def planes_of_halves(layout: PackedLayout) -> tuple[int, int]:
    """The planes that have something of the first half of the slots, and of the other: a bit each."""
    return _planes_of(layout, range(4)), _planes_of(layout, range(4, 8))


def _planes_of(layout: PackedLayout, groups: range) -> int:
    """The planes that have something of the slots 4 g to 4 g + 3, for the g of `groups`: a bit each."""
    return sum(1 << plane for plane in {p.place(g)[0] for p in layout.groups for g in groups})
