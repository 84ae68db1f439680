"""Which tile of rows each pair of a token and an expert goes to, and the plain version of that in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

TILES = (16, 32, 64, 128, 256)
"""Numbers of rows that a tile can have."""

EXPERT, FIRST, COUNT, USED = range(4)
"""Columns of `Routing.tiles`."""


class Routing(NamedTuple):
    """Where the rows of each expert lie: tiles of rows in the order of experts, each for one expert.

    An expert without a pair has no tile. The tiles of an expert follow each other, and its pairs keep their
    order. The tensors are on the device, and their shapes depend on shapes alone.
    """

    tile: int
    """Rows of a tile: one of TILES."""
    position: Tensor
    """int32 [pairs]: the row of each pair, pair p = token * k + slot; -1 where its id names no expert."""
    tiles: Tensor
    """int32 [most_tiles, 4]: expert, first tile of that expert, its number of tiles, rows in use in this one.

    Entries from `count` on are undefined."""
    count: Tensor  # type: ignore[assignment]  # tuple.count, which nobody needs
    """int32 [1]: tiles in use."""


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """How many tiles so many pairs can need at most, however they are spread over the experts.

    >>> most_tiles(8, 128, 16), most_tiles(1024, 128, 16), most_tiles(0, 8, 64)
    (8, 184, 0)
    """
    return pairs if pairs <= experts else experts + (pairs - experts) // tile


def tile_bounds(use: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Rows of tiles, with the mean of pairs up to which each is best, of an entry of a launch table.

    >>> tile_bounds({"rows_16": 12, "rows_64": 0})
    ((16, 12), (64, 0))
    """
    return tuple((int(name.removeprefix("rows_")), mean) for name, mean in use.items())


def fitting_tile(bounds: tuple[tuple[int, float], ...], pairs: int, experts: int) -> int:
    """Rows of a tile for so many pairs: by the mean of an expert. The last of the bounds takes all others.

    >>> [fitting_tile(((16, 12), (64, 0)), pairs, experts=8) for pairs in (96, 97)]
    [16, 64]
    """
    for rows, mean in bounds:
        if pairs <= mean * experts:
            return rows
    return bounds[-1][0]


def route(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    """The routing of ids [tokens, k], and x [tokens, in] copied to the rows [most_tiles * tile, in].

    Plain torch, for a CPU: on a GPU the host would wait.
    """
    pairs, k = index.numel(), index.shape[1]
    most = most_tiles(pairs, experts, tile)
    ids = index.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = torch.argsort(ids, stable=True)
    pairs_of = torch.bincount(ids, minlength=experts + 1)
    tiles_of = (pairs_of[:experts] + tile - 1) // tile
    first = tiles_of.cumsum(0) - tiles_of

    valid = order[: int(pairs_of[:experts].sum())]
    rank = torch.arange(len(valid)) - (pairs_of.cumsum(0) - pairs_of)[ids[valid]]
    position = torch.full((pairs,), -1, dtype=torch.int32)
    position[valid] = (first[ids[valid]] * tile + rank).int()

    expert = torch.repeat_interleave(torch.arange(experts), tiles_of)
    before = (torch.arange(len(expert)) - first[expert]) * tile
    used = (pairs_of[expert] - before).clamp(max=tile)
    tiles = torch.zeros(most, 4, dtype=torch.int32)
    tiles[: len(expert)] = torch.stack([expert, first[expert], tiles_of[expert], used], 1).int()

    rows = torch.empty(most * tile, x.shape[1], dtype=x.dtype)
    rows[position[valid].long()] = x[valid // max(1, k)]
    return Routing(tile, position, tiles, tiles_of.sum(0, keepdim=True).int()), rows


def runs(routing: Routing) -> list[tuple[int, slice]]:
    """The experts in use with the rows of each. On a GPU the host waits."""
    tiles = routing.tiles[: int(routing.count)].tolist()
    experts: list[tuple[int, slice]] = []
    for number, (expert, first, count, used) in enumerate(tiles):
        if number == first + count - 1:  # the last tile of an expert: the ones before are full
            start = first * routing.tile
            experts.append((expert, slice(start, start + (count - 1) * routing.tile + used)))
    return experts


def in_use(routing: Routing) -> Tensor:
    """Which rows a pair fills: bool [most_tiles * tile]. On a GPU the host does not wait."""
    tiles, device = routing.tiles, routing.tiles.device
    used = torch.where(torch.arange(len(tiles), device=device) < routing.count, tiles[:, USED], 0)
    return (torch.arange(routing.tile, device=device) < used[:, None]).flatten()


def cleaned(rows: Tensor, routing: Routing) -> Tensor:
    """The rows, with zeros written where no pair fills them."""
    return rows.masked_fill_(~in_use(routing)[:, None], 0.0)


def sums_by_expert(rows: Tensor, routing: Routing, experts: int) -> Tensor:
    """The sums of the rows that pairs fill, by expert: [most_tiles * tile, n] to [experts, n].

    The order of the sums does not change from call to call.
    """
    there = in_use(routing)
    own = routing.tiles[:, EXPERT].repeat_interleave(routing.tile).where(there, -1)
    chosen = own == torch.arange(experts, device=own.device)[:, None]
    return chosen.to(rows.dtype) @ rows.masked_fill(~there[:, None], 0.0)
