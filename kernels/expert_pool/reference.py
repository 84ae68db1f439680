"""What `ops` computes, in plain torch: one tile after the other, sums in fp64."""

from __future__ import annotations

import torch

from neuzip.kernels.experts.routing import Routing, runs


def slot_lists(routing: Routing, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in use, -1 behind them, int32 [slots]; and the slot of each tile, -1 if it is not in use."""
    tiles, used = routing.tiles, int(routing.count)
    experts = list(dict.fromkeys(tiles[:used, 0].tolist()))
    chosen = torch.full((slots,), -1, dtype=torch.int32)
    chosen[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
    slot_of_tile = torch.full((tiles.shape[0],), -1, dtype=torch.int32)
    for tile in range(used):
        slot_of_tile[tile] = experts.index(int(tiles[tile, 0]))
    return chosen.to(tiles.device), slot_of_tile.to(tiles.device)


def pool_linear(
    rows: torch.Tensor, weights: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """rows @ weights[expert].T + bias[expert] in fp64; NaN in rows that no tile uses.

    weights: dense, [experts, out, in].
    """
    y = torch.full((rows.shape[0], weights.shape[1]), float("nan"), dtype=torch.float64, device=rows.device)
    for expert, own in runs(routing):
        y[own] = rows[own].double() @ weights[expert].double().T
        if bias is not None:
            y[own] += bias[expert].double()
    return y
