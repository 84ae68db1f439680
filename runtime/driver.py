"""What torch does not ask the CUDA driver: what a stream is captured for, and streams on part of a GPU."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

EIGHT = 8
"""Multiprocessors that belong together: by so many a GPU of compute capability 9.0 can be divided."""


def capture_of(device: torch.device) -> int:
    """A number for the graph that the current stream of a device is captured for, or 0."""
    if device.type != "cuda":
        return 0
    stream = torch.cuda.current_stream(device).cuda_stream
    if not stream:
        return 0  # the legacy default stream is never captured
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"the CUDA driver reports error {error} when asked for a capture")
    return number.value if status.value else 0


def confined_streams(device: torch.device, share: float, count: int) -> list[torch.cuda.Stream]:
    """Streams whose kernels run on a share of a GPU's multiprocessors only, always the same.

    What runs on other streams always finds the rest free of them. A share is rounded down to a multiple of
    EIGHT. Streams of the whole GPU for a share of 1, where the driver knows no such contexts ("green" ones,
    CUDA 12.5), and where the GPU cannot be divided. Not within a capture.
    """
    context = _context(device, share) if share < 1 else None
    made = [None if context is None else _stream_in(context) for _ in range(count)]
    streams: list[torch.cuda.Stream] = [
        torch.cuda.ExternalStream(one, device=device)  # type: ignore[no-untyped-call]
        for one in made
        if one is not None
    ]
    if len(streams) == count:
        return streams
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def _stream_in(context: ctypes.c_void_p) -> int | None:
    """A stream of a context, which stays until the process ends; None where the driver has none left."""
    stream = ctypes.c_void_p()
    error = _driver().cuGreenCtxStreamCreate(ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return None if error else stream.value


class _Resource(ctypes.Structure):
    """CUdevResource: of multiprocessors, their number is the first of what follows the padding."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("more", ctypes.c_ubyte * 44),
    )


_MULTIPROCESSORS, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1


@cache
def _context(device: torch.device, share: float) -> ctypes.c_void_p | None:
    """A context of a share of a GPU's multiprocessors, which stays until the process ends; None without."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    driver = _driver()
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        return None
    number, whole, some, rest = ctypes.c_int(), _Resource(), _Resource(), _Resource()
    groups, description, context = ctypes.c_uint(1), ctypes.c_void_p(), ctypes.c_void_p()
    refer = ctypes.byref
    if driver.cuDeviceGet(refer(number), device.index) or driver.cuDeviceGetDevResource(
        number, refer(whole), _MULTIPROCESSORS
    ):
        return None
    wanted = int(share * whole.multiprocessors) // EIGHT * EIGHT
    if (
        wanted == 0
        or driver.cuDevSmResourceSplitByCount(
            refer(some), refer(groups), refer(whole), refer(rest), 0, wanted
        )
        or driver.cuDevResourceGenerateDesc(refer(description), refer(some), 1)
        or driver.cuGreenCtxCreate(refer(context), description, number, _DEFAULT_STREAM)
    ):
        return None
    return context


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
