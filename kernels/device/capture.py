"""What torch does not ask the CUDA driver: what a stream is captured for."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


def capture_id(device: torch.device) -> int:
    """A number for the graph that the current stream of a device, with its index, is captured for, or 0."""
    if device.type != "cuda":
        return 0
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # for every product: without an object
    if not stream:
        return 0  # the legacy default stream is never captured
    if torch._C._cuda_getDevice() == device.index and not torch._C._cuda_isCurrentStreamCapturing():
        return 0  # the usual answer, which torch has sooner than ctypes
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"the CUDA driver reports error {error} when asked for a capture")
    return number.value if status.value else 0


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
