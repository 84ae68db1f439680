"""Pinned memory of the host, which a GPU reads over its link at the address that the host has for it.

torch's own pinned memory comes in powers of two, so that large weights take up to twice their size. This has
the size that is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from typing import Any

import torch

_PORTABLE, _MAPPED = 1, 2
"""Flags of cuMemHostAlloc: for all GPUs of the process, and with an address there."""

_UNUSED: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []
"""Contexts and addresses of memory that is to be freed."""


def pinned_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy of a tensor in pinned host memory, complete on return. `device` is a GPU.

    Raises MemoryError where the CUDA driver gives no memory.
    """
    copy = pinned(tensor.shape, tensor.dtype, device)
    copy.copy_(tensor)
    return copy


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor in pinned host memory, with undefined values. `device` is a GPU.

    The memory is freed with the last tensor that shares it, when the GPU has done all its work. Raises
    MemoryError where the CUDA driver gives none.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    driver, address, context = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # so that torch's context is the current one
        driver.cuCtxGetCurrent(ctypes.byref(context))
        error = driver.cuMemHostAlloc(
            ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE | _MAPPED)
        )
    if error:
        name = _name(driver, error)
        raise MemoryError(f"the CUDA driver gives no {size:,} bytes of pinned host memory: {name}")
    memory = (ctypes.c_ubyte * size).from_address(address.value or 0)
    weakref.finalize(memory, _free, driver, context, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _free(driver: Any, context: ctypes.c_void_p, address: ctypes.c_void_p) -> None:
    """Free pinned memory in its context, whichever thread drops it last. A capture has to end first."""
    _UNUSED.append((context, address))
    if torch.cuda.is_current_stream_capturing():
        return
    while _UNUSED:
        context, address = _UNUSED.pop()
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
