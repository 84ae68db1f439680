"""Pinned memory of the host, which a GPU reads over its link at the address that the host has for it.

torch's own pinned memory comes in powers of two, so that large weights take up to twice their size. This has
the size that is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

from neuzip.errors import NeuzipError

_PORTABLE, _MAPPED = 1, 2
"""Flags of cuMemHostAlloc: for all GPUs of the process, and with an address there."""

_UNUSED: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
"""Contexts and addresses of memory that is to be freed."""


def pinned_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy of a tensor in `host_memory` for a device, complete on return."""
    memory = host_memory(tensor.nbytes, device)
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory, uint8 [nbytes], that kernels on a device read by the address that the host has for it.

    For a CUDA device it is pinned. It is freed with the last tensor that shares it, when the device has done
    all its work. Raises NeuzipError where the CUDA driver gives none.
    """
    if device.type != "cuda" or nbytes == 0:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    driver, address, context = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _free_unused(driver)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # so that torch's context is the current one
        driver.cuCtxGetCurrent(ctypes.byref(context))
        error = driver.cuMemHostAlloc(
            ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE | _MAPPED)
        )
    if error:
        raise NeuzipError(
            f"the CUDA driver gives no {nbytes:,} bytes of pinned host memory: {_name(driver, error)}",
            "give a larger `expert_memory`, or free host memory, which containers and `ulimit -l` limit",
        )
    memory = (ctypes.c_ubyte * nbytes).from_address(address.value or 0)
    weakref.finalize(memory, _free, driver, context, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _free(driver: Any, context: ctypes.c_void_p, address: ctypes.c_void_p) -> None:
    """Free pinned memory in its context, whichever thread drops it last."""
    _UNUSED.append((context, address))
    _free_unused(driver)


def _free_unused(driver: Any) -> None:
    """Free memory that nobody uses any more; later, if this thread is capturing a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        return
    while _UNUSED:
        try:
            context, address = _UNUSED.pop()
        except IndexError:  # another thread has taken the last
            return
        driver.cuCtxPushCurrent_v2(context)
        driver.cuCtxSynchronize()  # kernels may still read it
        driver.cuMemFreeHost(address)
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _name(driver: Any, error: int) -> str:
    """What the driver calls an error."""
    name = ctypes.c_char_p()
    driver.cuGetErrorName(error, ctypes.byref(name))
    return (name.value or b"error %d" % error).decode()


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
