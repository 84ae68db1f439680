"""Random generator states, so that a layer that runs again draws the same dropout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

KEY = "chance"
"""First part of the names of these states in a file of a training run, `chance/PROCESS/NUMBER`."""


class RngStates:
    """States of the random generators that a model uses: of the CPU, and of the GPU if it is on one."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._has_dropout = any(  # in some models dropout is a number, and no module
            isinstance(value, float) and value > 0 and ("drop" in name or isinstance(m, nn.Dropout))
            for m in model.modules()
            for name, value in vars(m).items()
        )

    def current(self) -> list[Tensor]:
        """The present states; none for a model without dropout and in evaluation mode."""
        if not (self._has_dropout and self._model.training):
            return []
        on_cpu = [torch.get_rng_state()]
        return on_cpu + ([torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else [])

    @contextmanager
    def replayed(self, states: list[Tensor]) -> Iterator[None]:
        """Context in which the generators start from earlier states."""
        if not states:
            yield
            return
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.set_rng_state(states[0])
            if len(states) > 1:
                torch.cuda.set_rng_state(states[1], self._device)
            yield

    def of_all_processes(self) -> list[list[Tensor]]:
        """The present states of each process, on the CPU."""
        own = [state.cpu() for state in self.current()]
        if not dist.is_initialized() or not own:
            return [own]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the generators of this process to the states in a file of a training run, if it has any."""
        process = dist.get_rank() if dist.is_initialized() else 0
        if self.current() and f"{KEY}/{process}/0" in tensors:
            torch.set_rng_state(tensors[f"{KEY}/{process}/0"])
            if f"{KEY}/{process}/1" in tensors and self._device.type == "cuda":
                torch.cuda.set_rng_state(tensors[f"{KEY}/{process}/1"], self._device)
