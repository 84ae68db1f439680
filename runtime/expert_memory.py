"""Which compressed experts stay on a GPU, and which are read from pinned host memory.

    memory = ExpertMemory(8 << 30)
    weight = memory.placed(weight, name)    for each parameter [experts, out, in], when it is compressed

What fits beside those before it stays. So a GPU never holds more than the limit, the parameter that is being
compressed, and of those in host memory the indexes, a few per cent of them, which count as far as there is
room.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from neuzip.errors import NeuzipError
from neuzip.runtime.weights.base import CompressedWeight

Weight = TypeVar("Weight", bound=CompressedWeight)


class ExpertMemory:
    """Places compressed experts: `limit` bytes of them on each GPU, in the order in which they come."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left: dict[torch.device, int] = {}

    def placed(self, weight: Weight, name: str) -> Weight:
        """The experts of the parameter `name`, where they are to be.

        Raises NeuzipError where there is no more pinned host memory.
        """
        device = weight.device
        left = self._left.setdefault(device, self.limit)
        try:
            weight = weight.offloaded(left)
        except NeuzipError as error:
            raise NeuzipError(f"{name}: {error.message}", error.hint) from error
        self._left[device] = max(0, left - weight.stored_bytes)
        return weight
