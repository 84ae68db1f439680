"""Which expert each slot of a pool holds, and products with the experts in a pool: see the package."""

from __future__ import annotations

import torch

TILES = (16, 32, 64, 128, 256)
"""Rows that a tile may have."""


def slot_lists(tiles: torch.Tensor, count: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts in use, and where each tile's is among them.

    tiles: int32 [tiles, 4], rising by expert: expert, first tile of the expert, tiles of the expert, rows in
    use. count: int32 [1], tiles in use. Returns the experts in use, -1 behind them, int32 [slots], of which
    there must not be more than slots; and for each tile the place of its expert in that list, int32 [tiles],
    -1 for tiles that are not in use.
    """
    from neuzip.kernels.expert_pool.triton.lists import slot_lists as triton_slot_lists

    return triton_slot_lists(tiles, count, slots)


def pool_linear(
    rows: torch.Tensor,
    pool: torch.Tensor,
    tiles: torch.Tensor,
    count: torch.Tensor,
    slot_of_tile: torch.Tensor,
    first: int = 0,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows @ w.T + bias, with the weights and the bias of the expert of each tile: [rows, out].

    rows [tiles * tile, in] and pool [slots, out, in], of any strides, are of one dtype, bf16 or fp16; slot s
    holds the expert number `first + s` of the list. bias: [experts, out]. Sums are fp32. Only rows in use of
    tiles whose expert is in the pool are written: in `out` the others keep what they hold, and without `out`
    they are undefined. Raises ValueError for shapes that do not fit.
    """
    from neuzip.kernels.expert_pool.triton.linear import pool_linear as triton_pool_linear

    _, columns, width = pool.shape
    tile, rest = divmod(rows.shape[0], tiles.shape[0])
    if rest or tile not in TILES or rows.shape[1] != width:
        raise ValueError(
            f"rows {tuple(rows.shape)} are no {tiles.shape[0]} tiles of {', '.join(map(str, TILES))} rows "
            f"with {width} columns"
        )
    if rows.dtype != pool.dtype or rows.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rows of {rows.dtype} and experts of {pool.dtype}: both are bf16, or both fp16")
    if out is None:
        out = rows.new_empty(rows.shape[0], columns)
    if out.shape != (rows.shape[0], columns) or not out.is_contiguous() or out.dtype != rows.dtype:
        raise ValueError(f"out is contiguous {rows.dtype} [{rows.shape[0]}, {columns}]")
    triton_pool_linear(rows.contiguous(), pool, tiles, count, slot_of_tile, first, bias, out)
    return out
