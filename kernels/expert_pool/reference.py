"""What `ops` computes, in plain torch: one tile after the other, sums in fp64."""

from __future__ import annotations

import torch


def slot_lists(tiles: torch.Tensor, count: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in use, -1 behind them, int32 [slots]; and the slot of each tile, -1 if it is not in use."""
    used = int(count)
    experts = list(dict.fromkeys(tiles[:used, 0].tolist()))
    chosen = torch.full((slots,), -1, dtype=torch.int32)
    chosen[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
    slot_of_tile = torch.full((tiles.shape[0],), -1, dtype=torch.int32)
    for tile in range(used):
        slot_of_tile[tile] = experts.index(int(tiles[tile, 0]))
    return chosen.to(tiles.device), slot_of_tile.to(tiles.device)


def pool_linear(
    rows: torch.Tensor, weights: torch.Tensor, tiles: torch.Tensor, count: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """rows @ weights[expert].T + bias[expert] in fp64; NaN in rows that no tile uses.

    weights: dense, [experts, out, in].
    """
    tile = rows.shape[0] // tiles.shape[0]
    y = torch.full((rows.shape[0], weights.shape[1]), float("nan"), dtype=torch.float64, device=rows.device)
    for number, (expert, _, _, used) in enumerate(tiles[: int(count)].tolist()):
        own = slice(number * tile, number * tile + used)
        y[own] = rows[own].double() @ weights[expert].double().T
        if bias is not None:
            y[own] += bias[expert].double()
    return y
