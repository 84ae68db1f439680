"""Counters that warp groups of one launch wait at for each other: zero before a launch, and zero after it.

`barriers.arrive` and `barriers.await_` count. A program may only wait for programs with a lower number: those
have been started before it, so that a launch ends however few programs run at a time.

A device has a slab of memory for counters, of which each stream and each CUDA graph gets a slice that it
keeps. `PackedTensor.wait` makes the slab, when weights have come to the device. So a first launch allocates
nothing that stays, within a CUDA graph and within the memory pool of the graphs of torch.compile, which
refuses a graph whose pool holds memory that is no result.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from neuzip.kernels.device.capture import capture_id

CAPACITY = 1024
"""Counters of a slice."""

SLICES = 256
"""Slices of a slab: 1 MiB."""


@dataclass
class _DeviceCounters:
    """The slabs of a device, and their slices: free ones, those of streams and of the graph under capture.

    Slabs are never freed: graphs use slices that nothing else refers to.
    """

    slabs: list[torch.Tensor] = field(default_factory=list)
    free: list[torch.Tensor] = field(default_factory=list)
    by_stream: dict[int, torch.Tensor] = field(default_factory=dict)
    graph: int = 0
    by_stream_of_graph: dict[int, torch.Tensor] = field(default_factory=dict)


_lock = threading.Lock()
_devices: dict[torch.device, _DeviceCounters] = {}


def reserve_counters(device: torch.device) -> None:
    """Allocate a slab if a GPU has fewer than half of the slices of one left. The host waits for its zeros.

    Does nothing for other devices, and while the current stream is captured.
    """
    if device.type != "cuda" or capture_id(device):
        return
    with _lock:
        known = _devices.setdefault(device, _DeviceCounters())
        if len(known.free) < SLICES // 2:
            known.slabs.append(_zeros(SLICES, device))
            torch.cuda.current_stream(device).synchronize()
            known.free += known.slabs[-1].unbind()


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` counters, int32, for launches on the current stream of a device.

    A stream has its own, as launches on other streams may run at the same time. So has each stream of a CUDA
    graph under capture: the graph may be replayed beside anything else. Raises ValueError for more than
    CAPACITY.
    """
    if count > CAPACITY:
        raise ValueError(f"`count`: a stream has {CAPACITY} counters, not {count}")
    if device.type != "cuda":
        return _zeros(1, device)[0]
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    graph = capture_id(device)
    known = _devices.setdefault(device, _DeviceCounters())
    if not graph and stream not in known.by_stream and not known.free:
        reserve_counters(device)
    with _lock:
        if not graph:
            return _slice_of(known, known.by_stream, stream, device)
        if known.graph != graph:
            known.graph, known.by_stream_of_graph = graph, {}
        return _slice_of(known, known.by_stream_of_graph, stream, device)


def _slice_of(
    known: _DeviceCounters, slices: dict[int, torch.Tensor], stream: int, device: torch.device
) -> torch.Tensor:
    if stream not in slices:  # a capture that finds no slice left has the graph make zeros of its own
        slices[stream] = known.free.pop() if known.free else _zeros(1, device)[0]
    return slices[stream]


def _zeros(slices: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(slices, CAPACITY, dtype=torch.int32, device=device)
