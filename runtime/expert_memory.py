"""Which packed experts stay on a GPU, and which have their words in pinned host memory.

    memory = ExpertMemory(8 << 30)
    weight = memory.placed(weight, name)    for each parameter [experts, out, in], when it has been packed

A parameter stays if it fits beside those that stay already. So a GPU never holds more than the limit, the
parameter that is being packed, and of those in host memory what is read with other loads than words: about
4 % of them.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from neuzip.errors import NeuzipError
from neuzip.runtime.weights.packed import PackedWeight


class ExpertMemory:
    """Places packed experts: `limit` bytes of them on each GPU, in the order in which they come."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used: dict[torch.device, int] = defaultdict(int)
        self._host_bytes = 0

    def fits(self, nbytes: int, device: torch.device) -> bool:
        """Whether so many bytes stay on a GPU. If so, they count from now on."""
        if self._used[device] + nbytes > self.limit:
            return False
        self._used[device] += nbytes
        return True

    def placed(self, weight: PackedWeight, name: str) -> PackedWeight:
        """The experts of a parameter, where they are to be.

        Raises NeuzipError where there is no more pinned host memory.
        """
        if self.fits(weight.stored_bytes, weight.packed.device):
            return weight
        try:
            weight = weight.in_host_memory()
        except MemoryError as error:
            raise NeuzipError(
                f"{name}: `expert_memory={self.limit}` moves these experts to host memory, behind"
                f" {self._host_bytes:,} bytes of others, and there is none left: {error}",
                "give a larger `expert_memory`, or free host memory, which containers and `ulimit -l` limit",
            ) from error
        self._host_bytes += weight.host_bytes
        return weight
