"""Buffers in which layers lie decoded: one, or two with which a GPU prefetches layers.

    caller's stream | forward, backward of layer 7      | of layer 6                        | of layer 5
    side stream     | encode 8, decode 6                | encode 7, decode 5                | encode 6 ...
    buffers         | 7 in one, 8 and then 6 in the other, ...

The encoder waits on the host for its own kernels, so a thread submits the work of the side stream. A job
starts after all work that the caller's stream had when the job was submitted, and jobs run one after another.
The two streams need no other synchronisation. Memory of encoded layers belongs to the side stream.

Tables of tokens are not prefetched: the caller decodes and encodes them in `buffer`, on its own stream, and
their memory may belong to either stream. `buffer` waits until no job is left, so no job can reuse memory that
the caller's stream still reads.

On a CPU nothing overlaps. Two buffers there serve tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class PrefetchUnit(Protocol):
    """Arrays that are decoded and encoded together."""

    def decode(self, buffer: Tensor) -> list[Tensor]:
        """The dense arrays, in `buffer` or where they lie anyway."""
        ...

    def encode(self, flats: list[Tensor]) -> None:
        """Store the present values of the dense arrays."""
        ...


@dataclass(eq=False)
class _Place:
    """A buffer, the unit that lies in it or will, and the job that decodes this unit."""

    buffer: Tensor
    unit: PrefetchUnit | None = None
    decoding: Future[tuple[list[Tensor], Any]] | None = None
    used: bool = False
    last: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Units whose last decoding was into this buffer: launches prepared for it can be reused."""


class LayerBuffers:
    """One buffer for decoded layers; with `prefetch` two, and a stream and a thread that fill them."""

    def __init__(self, device: torch.device, prefetch: bool) -> None:
        self._device, self._prefetches = device, prefetch
        on_gpu = device.type == "cuda"
        self._backend: Any = torch.cuda if on_gpu else torch.cpu
        self._side: Any = self._backend.Stream(*[device] if on_gpu else []) if prefetch else None
        arguments = device, self._side
        self._thread = (
            ThreadPoolExecutor(1, initializer=_use_stream, initargs=arguments) if prefetch else None
        )
        self._places: list[_Place] = []
        self._encoding: list[Future[Any]] = []

    def reserve(self, nbytes: int) -> None:
        """Allocate the buffers, of `nbytes` each."""
        self._places = [
            _Place(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
            for _ in range(1 + self._prefetches)
        ]
        if self._prefetches and self._device.type == "cuda":
            for place in self._places:  # a step that failed may leave a job behind
                place.buffer.record_stream(self._side)

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Context in which the side stream is the current one, so that allocations belong to it."""
        if not self._prefetches:
            yield
            return
        current = self._current()
        self._side.wait_stream(current)
        with self._backend.stream(self._side):
            yield
        current.wait_stream(self._side)

    def buffer(self) -> Tensor:
        """A buffer for the caller alone, until the next unit is opened or prefetched."""
        self.wait()
        return self._places[0].buffer

    @contextmanager
    def opened(
        self, unit: PrefetchUnit, *, changes: bool = False, next_unit: PrefetchUnit | None = None
    ) -> Iterator[list[Tensor]]:
        """Context with the dense arrays of a unit.

        changes    encodes them afterwards
        next_unit  is prefetched
        """
        place = next((p for p in self._places if p.unit is unit), None) or self._decode(unit)
        assert place.decoding is not None
        try:
            flats, ready = place.decoding.result()
        except BaseException:
            place.unit, place.decoding = None, None
            raise
        place.used = True
        if ready is not None:
            ready.wait(self._current())
        if next_unit is not None and self._prefetches:
            self._decode(next_unit)
        try:
            yield flats
        finally:
            place.unit, place.decoding, place.used = None, None, False
        if changes:
            self._encoding = [job for job in self._encoding if not _is_done(job)]
            self._encoding.append(self._submit(lambda: unit.encode(flats)))

    def wait(self) -> None:
        """Wait until no job is left. A unit that was prefetched and not yet opened is dropped."""
        for place in self._places:
            if place.decoding is not None and not place.used:
                decoding, place.unit, place.decoding = place.decoding, None, None
                decoding.result()
        encoding, self._encoding = self._encoding, []
        for job in encoding:
            job.result()
        if self._prefetches:
            self._current().wait_stream(self._side)

    def _decode(self, unit: PrefetchUnit) -> _Place:
        """Submit the decoding of a unit into a free buffer, if possible the one that it was in before."""
        free = [place for place in self._places if not place.used]
        place = next((p for p in free if unit in p.last), free[0])
        for other in self._places:
            other.last.discard(unit)
        place.last.add(unit)
        place.unit, place.decoding = unit, self._submit(lambda: unit.decode(place.buffer))
        return place

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a job on the side stream, after all present work of the current one; at once if there is none.

        The future holds what the job returns, and an event that is recorded behind its work.
        """
        if self._thread is None:
            done: Future[Any] = Future()
            done.set_result((job(), None))
            return done
        before = self._backend.Event()
        before.record(self._current())

        def run() -> tuple[Any, Any]:
            before.wait(self._side)
            output, after = job(), self._backend.Event()
            after.record(self._side)
            return output, after

        return self._thread.submit(run)

    def _current(self) -> Any:
        return self._backend.current_stream(self._device)


def _use_stream(device: torch.device, stream: Any) -> None:
    """Make a stream the current one of the thread. A method would keep LayerBuffers alive for ever."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)


def _is_done(job: Future[Any]) -> bool:
    """Whether a job is done. Raises what the job raised."""
    if job.done():
        job.result()
        return True
    return False
