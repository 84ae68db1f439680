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
    y = torch.empty(*x.shape[:-1], out, dtype=x.dtype, device=x.device)
    if x.data_ptr() % 16:
        x = x.clone()
    tile, groups = launch_for("packed_linear.many_rows_tile", x.device, rows=rows).values()
    rounds, turns = -(-rows // tile), columns // TURN
    in_step = packed.words.nbytes + x.nbytes > IN_CACHE
    share = sharing(-(-out // (groups * GROUP_ROWS)) * rounds, turns, multiprocessors(x.device), in_step)
    parts = torch.empty(groups * share.programs if share.cut else 0, GROUP_ROWS, tile, dtype=torch.float32, device=x.device)
    arrays, constants = packed.once(f"many rows, {tile}, {groups}", functools.partial(_of_weights, tile, groups))
    launch(
        many_rows, (share.programs,),
        TensorDescriptor(x, [rows, columns], [columns, 1], [tile, 64], SWIZZLED),
        TensorDescriptor(y, [rows, out], [out, 1], [min(tile, 128), 64], SWIZZLED),
        *arrays, bias, parts, counters(x.device, len(parts)), packed.base, 2.0**packed.shift, share.blocks,
        share.cut, share.cutters, turns, rounds, packed.words.shape[0], out, **constants, pdl=True, device=x.device,
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
