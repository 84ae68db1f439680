"""Counters that warp groups of one launch wait at for each other: zero before a launch, and zero after it.

    arrive   adds 1 for every thread of a warp group, after all that it has written (release)
    await_   waits until so many warp groups have arrived (acquire), and sets the counter to 0 again

A program may only wait for programs with a lower number: those have been started before it, so that a launch
ends however few programs run at a time.
"""

from __future__ import annotations

import threading

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from neuzip.kernels.device.barriers import thread_barrier
from neuzip.kernels.device.capture import capture_id

THREADS = 128
"""Threads of a warp group."""

THREADS_CONSTANT = gl.constexpr(THREADS)

CAPACITY = 4096
"""Counters of a stream."""

_ARRIVE = gl.constexpr("red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0;")
_AWAIT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 count; AGAIN_${:uid}: ld.acquire.gpu.global.b32 count, [$1];"
    " setp.lt.u32 p, count, $2; @p bra AGAIN_${:uid}; mov.b32 $0, count; }"
)


@gluon.jit
def arrive(pointers):
    """Add 1 to a counter, by each thread of a warp group. `pointers` are 128 pointers to the counter."""
    gl.inline_asm_elementwise(_ARRIVE, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_(pointers, groups):
    """Wait until so many warp groups have arrived, and set a counter to 0. `pointers` are 128 pointers to it."""
    count = groups * THREADS_CONSTANT
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [pointers, count], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()  # all threads have seen it
    gl.store(pointers, gl.full([THREADS_CONSTANT], 0, gl.int32, pointers.type.layout))


_lock = threading.Lock()
_eager: dict[tuple[torch.device, int], torch.Tensor] = {}
_captured: dict[torch.device, tuple[int, dict[int, torch.Tensor]]] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` counters, int32, for launches on the current stream of a device.

    A stream has its own, as launches on other streams may run at the same time. So has each stream of a CUDA
    graph under capture: the graph may be replayed beside anything else. Raises ValueError for more than
    CAPACITY.
    """
    if count > CAPACITY:
        raise ValueError(f"`count`: a stream has {CAPACITY} counters, not {count}")
    if device.type != "cuda":
        return torch.zeros(CAPACITY, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    graph = capture_id(device)
    with _lock:
        of_streams: dict = _eager
        key: object = (device, stream)
        if graph:
            number, of_graph = _captured.get(device, (0, {}))
            if number != graph:
                of_graph = {}
                _captured[device] = graph, of_graph
            of_streams, key = of_graph, stream
        if key not in of_streams:
            of_streams[key] = torch.zeros(CAPACITY, dtype=torch.int32, device=device)
        return of_streams[key]
