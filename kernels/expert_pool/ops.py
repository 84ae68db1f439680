"""Which expert each slot of a pool holds, and products with the experts in a pool: see the package."""

from __future__ import annotations

import torch

from neuzip.kernels.expert_pool.lists import ExpertsInUse
from neuzip.kernels.experts.routing import Routing, fitting_tile, tile_bounds
from neuzip.kernels.tuning import launch_for


def tile_rows(pairs: int, experts: int, device: torch.device) -> int:
    """Rows of a tile for so many pairs: by the mean of an expert, from the table of the card."""
    return fitting_tile(tile_bounds(launch_for("expert_pool.tile", device)), pairs, experts)


def pays_while_decoded(pairs: int, experts: int, expert_weights: int, device: torch.device) -> bool:
    """Whether a layer is faster if each pair multiplies its expert while that is decoded, without a pool.

    pairs: of a token and one of its experts. experts: of the layer. expert_weights: weights of one expert.
    From the table of the card.
    """
    use = launch_for(
        "expert_pool.while_decoded", device, mean=pairs / experts, weights=pairs * expert_weights
    )
    return bool(use["pays"])


def experts_in_use(routing: Routing, experts: int) -> ExpertsInUse:
    """The experts in use, of so many: the list has room for all that there can be."""
    from neuzip.kernels.expert_pool.triton.lists import slot_lists

    most = min(routing.position.numel(), experts)
    return ExpertsInUse(routing, *slot_lists(routing.tiles, routing.count, most))


def pool_linear(
    rows: torch.Tensor,
    pool: torch.Tensor,
    used: ExpertsInUse,
    first: int = 0,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows @ w.T + bias, with the weights and the bias of the expert of each tile: [rows, out].

    rows [tiles * tile, in] and pool [slots, out, in], of any strides, are of one dtype, bf16 or fp16; slot s
    holds expert `used.chosen[first + s]`. bias: [experts, out]. Sums are fp32. Only rows in use of
    tiles whose expert is in the pool are written: in `out` the others keep what they hold, and without `out`
    they are undefined. Raises ValueError for shapes that do not fit.
    """
    from neuzip.kernels.expert_pool.triton.linear import pool_linear as triton_pool_linear

    _, columns, width = pool.shape
    tiles, tile = used.routing.tiles, used.routing.tile
    if rows.shape != (tiles.shape[0] * tile, width):
        raise ValueError(
            f"rows {tuple(rows.shape)} are no {tiles.shape[0]} tiles of {tile} rows with {width} columns"
        )
    if rows.dtype != pool.dtype or rows.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rows of {rows.dtype} and experts of {pool.dtype}: both are bf16, or both fp16")
    if out is None:
        out = rows.new_empty(rows.shape[0], columns)
    if out.shape != (rows.shape[0], columns) or not out.is_contiguous() or out.dtype != rows.dtype:
        raise ValueError(f"out is contiguous {rows.dtype} [{rows.shape[0]}, {columns}]")
    triton_pool_linear(rows.contiguous(), pool, used, first, bias, out)
    return out
