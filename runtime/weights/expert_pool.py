"""Products with experts that are coded by rANS: those in use are decoded into a pool, chosen on the device.

    route                   which rows go to which expert; nothing of it is known to the host
    slot_lists              the experts in use, numbered: the first ones are decoded first
    decode, multiply        into the slots of a pool, and the rows of these experts with them

A pool is memory that all layers share, of at most `limit` bytes. It has as many slots as there may be experts
in use, or as fit. If fewer fit, experts have their turn in rounds, whose number depends on sizes alone. So
all this can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from neuzip.errors import NeuzipError
from neuzip.kernels.expert_pool.ops import pool_linear, slot_lists
from neuzip.kernels.experts.routing import Routing
from neuzip.kernels.rans.chosen import CodedItems, can_choose, coded_items
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.runtime import buffers
from neuzip.runtime.buffers import PoolUnit
from neuzip.runtime.weights.ans import AnsWeight

LIMIT = 1 << 30
"""Bytes of a pool, at most, unless another limit is given."""

_CACHE = "_expert_pool"
"""The attribute of a layer's first weight that keeps its tables."""


class ExpertsInUse(NamedTuple):
    """Which experts a routing uses, on the device: at most `most`."""

    routing: Routing
    chosen: torch.Tensor
    slot_of_tile: torch.Tensor
    most: int

    @classmethod
    def of(cls, routing: Routing, experts: int) -> ExpertsInUse:
        """The experts in use of a routing."""
        most = min(routing.position.numel(), experts)
        return cls(routing, *slot_lists(routing.tiles, routing.count, most), most)


@dataclass(frozen=True, eq=False)
class ExpertPool:
    """The weights of some parameters of one layer [experts, out, in], of which a pool holds some experts."""

    weights: tuple[AnsWeight, ...]
    residents: tuple[tuple[ResidentTensor, ...], ...]
    """What the tables were made of: weights may be moved."""
    items: CodedItems
    unit: PoolUnit

    def slots(self, limit: int) -> int:
        """How many experts fit into so many bytes. Raises NeuzipError where not one does."""
        slots = limit // self.items.slot_bytes
        if not slots:
            raise NeuzipError(
                f"an expert takes {self.items.slot_bytes:,} bytes when it is decoded, and the pool of experts "
                f"has {limit:,}",
                "make the limit of the pool larger",
            )
        return slots

    def decode(self, used: ExpertsInUse, first: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """Decode experts from number `first` of those in use on: weights [slots, out, in] of each parameter.

        memory: uint8, whole slots.
        """
        self.items.decode(used.chosen, first, memory)
        slots = memory.numel() // self.items.slot_bytes
        pools = []
        for weight, region in zip(self.weights, self.items.regions, strict=True):
            _, out, columns = weight.stored
            flat = memory[region.start :].view(weight.stored_dtype)
            slot = self.items.slot_bytes // weight.stored_dtype.itemsize
            pool = flat.as_strided((slots, out, columns), (slot, columns, 1))
            pools.append(pool.mT if weight.flipped else pool)
        return pools


def can_pool(weights: Sequence[torch.Tensor]) -> bool:
    """Whether these parameters are experts coded by rANS whose matrices a device can decode by a list."""
    coded = [weight for weight in weights if isinstance(weight, AnsWeight)]
    return (
        len(coded) == len(weights)
        and all(len(w.stored) == 3 and w.stored_dtype in (torch.bfloat16, torch.float16) for w in coded)
        and len({(w.stored[0], w.stored_dtype, w.data_device) for w in coded}) == 1
        and expert_pool(coded) is not None
    )


def expert_pool(weights: Sequence[AnsWeight]) -> ExpertPool | None:
    """The pool of some parameters, whose tables are made once; None if their parts are not aligned."""
    residents = tuple(weight.residents for weight in weights)
    known: dict[int, ExpertPool | None] = weights[0].__dict__.setdefault(_CACHE, {})
    pool = known.get(len(weights))
    if pool is not None and _same(pool.residents, residents):
        return pool
    matrices = [_chunks(weight) for weight in weights]
    if not can_choose(matrices):
        return None
    items = coded_items(matrices)
    pool = ExpertPool(tuple(weights), residents, items, PoolUnit(items.memories))
    known[len(weights)] = pool
    return pool


def _same(some: tuple[tuple[ResidentTensor, ...], ...], others: tuple[tuple[ResidentTensor, ...], ...]) -> bool:
    return [[id(r) for r in tensors] for tensors in some] == [[id(r) for r in tensors] for tensors in others]


def _chunks(weight: AnsWeight) -> list[list[tuple[ResidentTensor, int]]]:
    """The chunks of each expert, in the order of its rows."""
    experts, out, _ = weight.stored
    chunks: list[list[tuple[ResidentTensor, int]]] = [[] for _ in range(experts)]
    for (resident, number), part in zip(weight.chunks, weight.parts, strict=True):
        chunks[part.start // out].append((weight.residents[resident], number))
    return chunks
