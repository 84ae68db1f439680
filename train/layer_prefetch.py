"""Where layers lie open: one buffer, or two with which a GPU decodes ahead and codes behind.

    caller's stream | forward, backward of layer 7      | of layer 6                        | of layer 5
    own stream      | code 8, decode 6                  | code 7, decode 5                  | code 6 ...
    buffers         | 7 in one, 8 and then 6 in the other, ...

Coding waits for its own kernels on the host, so a thread starts what runs on that stream. Each job begins
after all that the caller's stream had been given when the job was ordered, and jobs follow each other:
nothing else is needed to keep the two apart. Memory of coded layers belongs to the own stream.

Tables are no units: the caller opens and closes them in `buffer`, on its own stream. Their memory may belong
to either. `buffer` waits until no job is left, so none takes memory that they give back while the caller's
stream still reads it.

On a CPU nothing overlaps; two buffers are for tests there.
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
    """Arrays that are opened and closed together."""

    def decode(self, buffer: Tensor) -> list[Tensor]:
        """Its arrays, dense, in `buffer` or where they always are."""
        ...

    def code(self, flats: list[Tensor]) -> None:
        """Keep what the arrays have become."""
        ...


@dataclass(eq=False)
class _Slot:
    """A buffer, the unit that is or will be open there, and the job that opens it."""

    buffer: Tensor
    unit: PrefetchUnit | None = None
    opening: Future[tuple[list[Tensor], Any]] | None = None
    used: bool = False
    last: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Units that lay here when they were last open: what prepared that is still of use."""


class LayerBuffers:
    """Buffers of `room` bytes; `ahead` takes two, a stream and a thread."""

    def __init__(self, device: torch.device, ahead: bool) -> None:
        self._device, self._ahead = device, ahead
        on_gpu = device.type == "cuda"
        self._backend: Any = torch.cuda if on_gpu else torch.cpu
        self._own: Any = self._backend.Stream(*[device] if on_gpu else []) if ahead else None
        given = device, self._own
        self._thread = ThreadPoolExecutor(1, initializer=_begin, initargs=given) if ahead else None
        self._slots: list[_Slot] = []
        self._closing: list[Future[Any]] = []

    def make_room(self, room: int) -> None:
        """Take the buffers."""
        self._slots = [
            _Slot(torch.empty(room, dtype=torch.uint8, device=self._device)) for _ in range(1 + self._ahead)
        ]
        if self._ahead and self._device.type == "cuda":
            for slot in self._slots:  # a step that failed may leave a job behind
                slot.buffer.record_stream(self._own)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """With the own stream as the current one, so that what is allocated belongs to it."""
        if not self._ahead:
            yield
            return
        current = self._current()
        self._own.wait_stream(current)
        with self._backend.stream(self._own):
            yield
        current.wait_stream(self._own)

    def buffer(self) -> Tensor:
        """A buffer for the caller alone, until the next layer is opened or expected."""
        self.settle()
        return self._slots[0].buffer

    @contextmanager
    def opened(
        self, unit: PrefetchUnit, *, changes: bool = False, then: PrefetchUnit | None = None
    ) -> Iterator[list[Tensor]]:
        """The arrays of a unit; `changes` keeps what they have become. `then` will be opened next."""
        slot = next((slot for slot in self._slots if slot.unit is unit), None) or self._expect(unit)
        assert slot.opening is not None
        try:
            flats, ready = slot.opening.result()
        except BaseException:
            slot.unit, slot.opening = None, None
            raise
        slot.used = True
        if ready is not None:
            ready.wait(self._current())
        if then is not None and self._ahead:
            self._expect(then)
        try:
            yield flats
        finally:
            slot.unit, slot.opening, slot.used = None, None, False
        if changes:
            self._closing = [job for job in self._closing if not _done(job)]
            self._closing.append(self._order(lambda: unit.code(flats)))

    def settle(self) -> None:
        """Wait until nothing is being decoded or coded; what was expected is forgotten."""
        for slot in self._slots:
            if slot.opening is not None and not slot.used:
                opening, slot.unit, slot.opening = slot.opening, None, None
                opening.result()
        closing, self._closing = self._closing, []
        for job in closing:
            job.result()
        if self._ahead:
            self._current().wait_stream(self._own)

    def _expect(self, unit: PrefetchUnit) -> _Slot:
        """Begin to open a unit in a buffer that is free."""
        free = [slot for slot in self._slots if not slot.used]
        slot = next((slot for slot in free if unit in slot.last), free[0])
        for other in self._slots:
            other.last.discard(unit)
        slot.last.add(unit)
        slot.unit, slot.opening = unit, self._order(lambda: unit.decode(slot.buffer))
        return slot

    def _order(self, job: Callable[[], Any]) -> Future[Any]:
        """Do a job on the own stream, after all that the current one has been given; what it returns, and an
        event. Without an own stream it is done at once."""
        if self._thread is None:
            done: Future[Any] = Future()
            done.set_result((job(), None))
            return done
        before = self._backend.Event()
        before.record(self._current())

        def run() -> tuple[Any, Any]:
            before.wait(self._own)
            found, after = job(), self._backend.Event()
            after.record(self._own)
            return found, after

        return self._thread.submit(run)

    def _current(self) -> Any:
        return self._backend.current_stream(self._device)


def _begin(device: torch.device, own: Any) -> None:
    """In the thread, whose stream it is. It must not know the desk: it would keep it for ever."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(own)


def _done(job: Future[Any]) -> bool:
    """Whether a job is done; raises what it raised."""
    if job.done():
        job.result()
        return True
    return False
