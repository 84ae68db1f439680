"""Several processes that train one model together, as torchrun starts them.

A step's batch is cut into equal parts, one a process; gradients are summed over all (see `compressed`). So
n processes do what one does with micro_batch = batch / n: for two the weights are the same bits, for more
they may differ in the last one, as sums are made in another order. Dropout is another in each.

This is data parallelism (DDP): every process holds all weights and all states. They are not cut up (FSDP2):
a layer in one coded array is what makes weights small here, and it would have to be coded in as many parts
as there are processes, and gathered decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from neuzip.compress.ranks import Ranks
from neuzip.errors import NeuzipError, UsageError

PATIENCE = timedelta(hours=1)
"""Time that the other processes wait while the first one writes a checkpoint."""


class Team:
    """The part of this process in training with others. A single process does everything."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device

    def share(self, batch: Tensor) -> Tensor:
        """The rows of a batch for this process."""
        rows = batch.shape[0] // self._ranks.world
        return batch[self._ranks.rank * rows : (self._ranks.rank + 1) * rows]

    def largest(self, number: int) -> int:
        """The largest of the numbers of all processes, as `loop.run` asks for it."""
        if self._ranks.world == 1:
            return number
        largest = torch.tensor(number, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def require_same(self, what: str, value: str) -> None:
        """Raise NeuzipError unless all processes have the same."""
        if len(set(self._ranks.all_gather(value))) > 1:
            raise NeuzipError(f"the processes have different {what}", "give all of them the same files")


@contextmanager
def team(ranks: Ranks, device: torch.device, batch: int) -> Iterator[Team]:
    """Connect the processes for training on `device`.

    Raises UsageError for what cannot be shared out, NeuzipError in a process that has lost another one.
    """
    if ranks.world == 1:
        yield Team(ranks, device)
        return
    if batch % ranks.world:
        raise UsageError(
            f"batch is {batch}, which {ranks.world} processes cannot share",
            f"give a multiple of {ranks.world}",
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and here > torch.cuda.device_count():
        raise UsageError(
            f"{here} processes, but {torch.cuda.device_count()} GPUs",
            'start as many processes as there are GPUs, or give device = "cpu"',
        )
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Team(ranks, device)
    except RuntimeError as error:
        if not _is_of_another(error):
            raise
        raise NeuzipError(
            "another process has gone while all were training", "`resume` goes on from the last checkpoint"
        ) from error
    dist.destroy_process_group()  # not after a failure: it would wait for processes that are gone


def _is_of_another(error: RuntimeError) -> bool:
    """Whether it is NCCL's or gloo's; the latter has no class of its own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
