"""Memory of the host that kernels on a GPU read where it is, over the link between both."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from neuzip.errors import NeuzipError

PAGE = 4096
"""Bytes of a page of memory."""


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory, uint8 [nbytes], that kernels on a device read by the address that the host has for it.

    For a CUDA device it is page-locked, so it counts against what the system lets a process lock. It is given
    back when no tensor has it, which waits for the device. torch's own pinned memory would be rounded up to
    a power of two. Raises NeuzipError where it cannot be had.
    """
    size = -(-nbytes // PAGE) * PAGE  # whole pages, that nothing else is in
    array = np.empty(size + PAGE, np.uint8)
    start = -array.ctypes.data % PAGE
    memory = torch.from_numpy(array)[start : start + nbytes]
    if device.type == "cuda" and nbytes:
        with torch.cuda.device(device):
            error = _runtime().cudaHostRegister(memory.data_ptr(), size, 0)
        if int(error):
            raise NeuzipError(
                f"the CUDA driver cannot lock {nbytes:,} bytes of host memory: error {int(error)}",
                "keep more experts on the GPU, or let processes lock more memory (`ulimit -l`)",
            )
        weakref.finalize(array, _give_back, memory.data_ptr(), device).atexit = False
    return memory


def _give_back(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still read it
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
