"""The codes of a plan in memory: error feedback runs once for a trial and the files of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from neuzip.compress.prepared import Codes, PreparedCodes
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.kernels.grid import Grid


@dataclass(frozen=True, eq=False)
class HeldCodes:
    """Codes and grids by the names of tensors: two bytes a weight. `identity` is that of the codes."""

    identity: str
    pairs: Mapping[str, tuple[Codes, Grid]]

    @classmethod
    def of(
        cls,
        prepared: PreparedCodes,
        tensors: Sequence[SourceTensor],
        workers: Workers,
        on_weights: Callable[[int], None],
    ) -> HeldCodes:
        """The codes of tensors, several at a time."""
        pairs = {}
        with _shared_threads(workers.jobs):
            chosen = workers.map(lambda tensor: prepared.codes_of(tensor.name), tensors)
            for tensor, pair in zip(tensors, chosen, strict=True):
                if pair is not None:
                    pairs[tensor.name] = pair
                on_weights(tensor.info.numel)
        return cls(prepared.identity, pairs)

    def codes_of(self, name: str) -> tuple[Codes, Grid] | None:
        """The codes of a tensor, and their grid; None for a tensor without codes."""
        return self.pairs.get(name)

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids of the tensors with codes, by name."""
        return {name: grid for name, (_, grid) in self.pairs.items()}


@contextmanager
def _shared_threads(jobs: int) -> Iterator[None]:
    """Context in which the threads of torch's operations are divided among `jobs` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)
