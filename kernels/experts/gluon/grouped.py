"""Products of tiles of rows, each with the packed weights of its expert, on Hopper: launches of `many_rows`.

The kernel reads on the device which expert each tile has. So the host launches the same for any routing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from neuzip.kernels.device.counters import counters
from neuzip.kernels.device.launch import FREE, PreparedLaunch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.device.start import BoxedTensor
from neuzip.kernels.packed_linear.form import TILE_ROWS
from neuzip.kernels.packed_linear.gluon.linear import (
    GROUP_ROWS,
    GROUPS,
    boxes,
    nothing,
    prepared_launch,
)
from neuzip.kernels.packed_linear.gluon.linear import (
    can_multiply as can_multiply_whole,
)
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

if TYPE_CHECKING:
    from neuzip.kernels.experts.routing import Routing


def can_multiply(packed: PackedTensor, experts: int) -> bool:
    """Whether the kernel takes the weights of experts: gates, and what follows them, of whole tiles."""
    return can_multiply_whole(packed) and packed.shape[0] // experts % (2 * TILE_ROWS) == 0


def grouped_linear(
    rows: torch.Tensor,
    packed: PackedTensor,
    experts: int,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows @ weights of their tile's expert + bias, with fp32 sums: [rows, in] to [rows, out].

    packed  [experts * out, in], for which `can_multiply` holds
    bias    [experts, out], or None

    Rows of tiles that are not in use are left as they are in memory.
    """
    return _multiply(rows, packed, experts, routing, bias, gated=False)


def gated_linear(rows: torch.Tensor, packed: PackedTensor, experts: int, routing: Routing) -> torch.Tensor:
    """silu(gate) * up of rows [rows, in], to [rows, inner]: `packed` is [experts * 2 inner, in], gates first.

    `grouped_linear` explains the other arguments.
    """
    return _multiply(rows, packed, experts, routing, None, gated=True)


def _multiply(
    rows: torch.Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:  # fmt: skip
    tile, device = routing.tile, rows.device
    out = packed.shape[0] // experts // (2 if gated else 1)
    y = rows.new_empty(rows.shape[0], out)
    programs, split = multiprocessors(device), launch_for("experts.split", device, tile=tile)["parts"]
    if split > 1:
        parts = rows.new_empty(GROUPS * programs, GROUP_ROWS, tile, dtype=torch.float32)
        counted = counters(device, GROUPS * programs)
    else:
        parts, counted = nothing(device)
    to_x, to_y = boxes(tile)
    name = f"experts, {tile}, {experts}, {gated}"
    make = functools.partial(_prepared, tile, experts, gated, split)
    packed.once(name, make)(
        (programs,), BoxedTensor(rows, tuple(rows.shape), rows.stride(), to_x),
        BoxedTensor(y, tuple(y.shape), y.stride(), to_y), bias, parts, counted, routing.tiles, routing.count,
    )  # fmt: skip
    return y


def _prepared(tile: int, experts: int, gated: bool, split: int, packed: PackedTensor) -> PreparedLaunch:
    """Launches with weights of experts: rows, y, bias, parts, counters, tiles and count come with each."""
    out = packed.shape[0] // experts
    columns = GROUP_ROWS if gated else GROUPS * GROUP_ROWS
    blocks = -(-(out // 2 if gated else out) // columns)
    grouping = FREE, FREE, out // TILE_ROWS, blocks, split
    return prepared_launch(tile, packed, (0, 0, 0), 1, grouping, gated)
