"""How work is shared out among ranks, by sizes alone: so that all ranks come to the same shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")

SLACK = 1.2
"""The most that one rank's files may take of an even share; a file that is too much is split among all."""


def share_out(sizes: Mapping[str, int], world: int) -> tuple[list[list[str]], list[str]]:
    """Which files each rank does alone, and which all do together, each in the order of `sizes`.

    The largest first, to the rank with the least; what would give one more than its share is for all.
    """
    loads = [0] * world
    owner: dict[str, int] = {}
    for file in sorted(sizes, key=lambda f: (-sizes[f], f)):
        rank = loads.index(min(loads))
        if world == 1 or loads[rank] + sizes[file] <= SLACK * sum(sizes.values()) / world:
            owner[file] = rank
            loads[rank] += sizes[file]
    alone = [[f for f in sizes if owner.get(f) == rank] for rank in range(world)]
    return alone, [f for f in sizes if f not in owner]


def split(sizes: Mapping[K, int], loads: list[int]) -> list[set[K]]:
    """A part for each rank, beside the `loads` that it has: the largest first, to the one with the least."""
    loads = list(loads)
    parts: list[set[K]] = [set() for _ in loads]
    for key in sorted(sizes, key=lambda k: -sizes[k]):  # stable, so the same on all ranks
        rank = loads.index(min(loads))
        parts[rank].add(key)
        loads[rank] += sizes[key]
    return parts
