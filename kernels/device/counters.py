"""Counters that warp groups of one launch wait at for each other: zero before a launch, and zero after it.

`barriers.arrive` and `barriers.await_` count. A program may only wait for programs with a lower number: those
have been started before it, so that a launch ends however few programs run at a time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from neuzip.kernels.device.capture import capture_id

CAPACITY = 4096
"""Counters of a stream."""


@dataclass
class _CapturedCounters:
    """The counters of the graph that is captured on a device, by stream."""

    graph: int = 0
    by_stream: dict[int, torch.Tensor] = field(default_factory=dict)


_lock = threading.Lock()
_eager: dict[tuple[torch.device, int], torch.Tensor] = {}
_captured: dict[torch.device, _CapturedCounters] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` counters, int32, for launches on the current stream of a device.

    A stream has its own, as launches on other streams may run at the same time. So has each stream of a CUDA
    graph under capture: the graph may be replayed beside anything else. Raises ValueError for more than
    CAPACITY.
    """
    if count > CAPACITY:
        raise ValueError(f"`count`: a stream has {CAPACITY} counters, not {count}")
    if device.type != "cuda":
        return _zeros(device)
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    graph = capture_id(device)
    with _lock:
        if not graph:
            if (device, stream) not in _eager:
                _eager[device, stream] = _zeros(device)
            return _eager[device, stream]
        if device not in _captured or _captured[device].graph != graph:
            _captured[device] = _CapturedCounters(graph)
        by_stream = _captured[device].by_stream
        if stream not in by_stream:
            by_stream[stream] = _zeros(device)
        return by_stream[stream]


def _zeros(device: torch.device) -> torch.Tensor:
    return torch.zeros(CAPACITY, dtype=torch.int32, device=device)
