"""Dense weights for the next products: shared memory on a device, and groups of weights decoded to it.

    one stream         | decode 1, 2, 3 | | product 1 | | product 2 | | product 3 | | decode 4, 5, 6 | ...

A launch for one matrix leaves much of a GPU idle, so weights that follow each other are decoded together, as
many as fit into that memory. Which weights come next is learnt: each remembers its successor. After a wrong
guess, which costs the time of a decode, the same one has to follow twice before it is believed again.

Streams of a device share its memory: each waits for what the one before does there. Threads take turns.

A CUDA graph gets memory of its own: it is replayed when nobody here looks, so neither may what it holds be
believed outside, nor the other way round. Between replays eager calls may have that memory (`within`).

The same code runs on a CPU, for tests with Triton's interpreter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch

from neuzip.kernels.device.capture import capture_id
from neuzip.kernels.rans.coded import TOGETHER

T = TypeVar("T")

CAPACITY = 3.25
"""Largest weights that a ring has memory for: with parts of 128 MiB, a layer of Llama 3 8B."""

AHEAD = TOGETHER
"""Weights that are decoded together at most: as many as a launch takes."""

ALIGNMENT = 512
"""Bytes that the start of a weight is a multiple of."""


class Unit:
    """What is decoded to shared memory. `sources` is what it is decoded from."""

    sources: tuple[torch.Tensor, ...]
    known_streams: set[Any]
    """Streams for which the memory of `sources` is kept."""

    def stay_for(self, stream: Any) -> None:
        """Keep the memory that is read from being used again before `stream` has done with it."""
        if stream not in self.known_streams:
            for source in self.sources:
                keep(source, stream)
            self.known_streams.add(stream)


@dataclass(eq=False)
class PoolUnit(Unit):
    """Weights of which a device decodes some, that the host does not know, to memory that is lent for it."""

    sources: tuple[torch.Tensor, ...]
    known_streams: set[Any] = field(default_factory=set, init=False)


@dataclass(eq=False)
class DecodeUnit(Unit):
    """Weights that are decoded as a whole, alone or with others of the same `decode`.

    `decode` takes what units hold `coded`, and for each of them uint8 memory of `capacity` bytes, to the
    beginning of which it writes their weights; it returns the weights as they are there. For None instead of
    memory they get memory of their own. `sources` is what it reads.
    """

    capacity: int
    sources: tuple[torch.Tensor, ...]
    coded: Any
    decode: Callable[[Sequence[Any], Sequence[torch.Tensor | None]], list[torch.Tensor]]
    successor: weakref.ref[DecodeUnit] | None = field(default=None, init=False)
    """What was used after it last."""

    is_sure: bool = field(default=True, init=False)
    """Whether that followed the only time, or twice in a row."""

    known_streams: set[Any] = field(default_factory=set, init=False)

    def dense(self) -> torch.Tensor:
        """The weights, in memory of their own."""
        return self.decode([self.coded], [None])[0]

    def followed_by(self, unit: DecodeUnit) -> None:
        """Learn what was used after this one."""
        same = self.successor is not None and self.successor() is unit
        self.is_sure = same or self.successor is None
        if not same:
            self.successor = weakref.ref(unit)

    def next(self) -> DecodeUnit | None:
        """What will probably be used after this one, if that is known."""
        return self.successor() if self.is_sure and self.successor is not None else None


def use(unit: DecodeUnit, product: Callable[[torch.Tensor], T], *, ahead: bool = True) -> T:
    """What `product` makes of a unit's dense weights. They are another's as soon as it returns.

    Others are decoded `ahead`, together with them. Beside a product of many rows nothing is gained; memory
    that is only used without holds one unit.
    """
    ring = _pool.ring(unit.sources[0].device)
    with ring.lock:
        return ring.use(unit, product, ahead)


def lend(unit: PoolUnit, nbytes: int, product: Callable[[torch.Tensor], T]) -> T:
    """What `product` makes with so many bytes of memory, uint8, to which it decodes weights of a unit itself.

    The memory is another's as soon as it returns. Nothing else is decoded there meanwhile, so that `product`
    must not use weights that are.
    """
    ring = _pool.ring(unit.sources[0].device)
    with ring.lock:
        return ring.lend(unit, nbytes, product)


def stay(unit: PoolUnit) -> None:
    """Keep what kernels that are launched now read of a unit: until they are done, or with their graph."""
    ring = _pool.ring(unit.sources[0].device)
    with ring.lock:
        ring.stay(unit)


def release() -> None:
    """Give the memory of all devices back. It comes again when it is needed."""
    _pool.release()


def make_way(device: torch.device) -> None:
    """Before a capture: give the memory of eager calls back. What is freed in one is of no use there.

    So is that of a capture that failed.
    """
    _pool.make_way(device)


@dataclass(frozen=True)
class CaptureMemory:
    """The memory that a graph decodes to, and the units that it reads: some may be another model's."""

    memory: torch.Tensor
    units: frozenset[Unit]


def memory_of_capture(device: torch.device) -> CaptureMemory | None:
    """At the end of a capture on the current stream; None if it decodes nothing.

    To be kept as long as the graph is replayed: nobody else does.
    """
    return _pool.end_capture(device)


@contextmanager
def within(reserved: CaptureMemory | None) -> Iterator[None]:
    """Let eager calls of this thread decode to the memory of a graph.

    All are on the stream that the graph is replayed on, which is not until this ends.
    """
    if reserved is None:
        yield
        return
    device, before = reserved.memory.device, _pool.lent.rings
    _pool.lent.rings = {**before, device: _Ring(device, memory=reserved.memory)}
    try:
        yield
    finally:
        _pool.lent.rings = before


class _LentRings(threading.local):
    """Rings in a graph's memory, by device, of one thread."""

    def __init__(self) -> None:
        self.rings: dict[torch.device, _Ring] = {}


class _Pool:
    """The rings of a process.

    eager     the ring of eager calls, by device
    captured  the ring of the CUDA graph that is captured on a device, and the number of that graph
    wanted    bytes of eager rings that made way for a capture, by device
    lent      rings of one thread that take the place of eager ones
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self.eager: dict[torch.device, _Ring] = {}
        self.captured: dict[torch.device, tuple[int, _Ring]] = {}
        self.wanted: dict[torch.device, int] = {}
        self.lent = _LentRings()

    def ring(self, device: torch.device) -> _Ring:
        """The ring of a device, or that of the CUDA graph that its current stream is captured for."""
        graph = capture_id(device)
        with self._changing:
            if not graph:
                if device in self.lent.rings:
                    return self.lent.rings[device]
                if device not in self.eager:
                    self.eager[device] = _Ring(device)
                return self.eager[device]
            number, last = self.captured.get(device, (0, None))
            if last is not None and number == graph:
                return last
            # Others give their memory to that of the graph. Kernels still at work there keep it.
            self.captured.pop(device, None)
            others = [other.size for other in (last, self.eager.pop(device, None)) if other is not None]
            last = None
            ring = _Ring(device, max([*others, self.wanted.pop(device, 0)]), graph)
            self.captured[device] = graph, ring
            return ring

    def release(self) -> None:
        with self._changing:
            self.eager.clear()
            self.captured.clear()
            self.wanted.clear()

    def make_way(self, device: torch.device) -> None:
        with self._changing:
            self.captured.pop(device, None)
            ring = self.eager.pop(device, None)
            if ring is not None:
                self.wanted[device] = ring.size

    def end_capture(self, device: torch.device) -> CaptureMemory | None:
        graph = capture_id(device)
        with self._changing:
            if device not in self.captured or self.captured[device][0] != graph:
                return None
            _, ring = self.captured.pop(device)
            return CaptureMemory(ring.memory, frozenset(ring.units))


_pool = _Pool()


def _nothing() -> None:
    """What is known where nothing is."""


class _Ring:
    """Memory that weights are decoded to, some at a time, each time from its beginning.

    `graph`, if not 0, is the CUDA graph that it belongs to, which has the memory. `memory`, if given, is that
    of a graph, for some time. Both begin anew one day, and end where they began.
    """

    def __init__(
        self, device: torch.device, size: int = 0, graph: int = 0, memory: torch.Tensor | None = None
    ) -> None:
        self.lock = threading.Lock()
        self._device, self._graph = device, graph
        self._ends = graph != 0 or memory is not None
        # A CPU has streams and events as well, that do nothing.
        self._backend: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self.memory: torch.Tensor
        self.units: weakref.WeakSet[Unit] = weakref.WeakSet()  # of a graph, which reads them in each replay
        self._is_kept: bool  # by a graph, or by who has lent it
        self._outgrown: list[torch.Tensor] = []
        self._known_on: set[Any]
        self._resident: list[tuple[weakref.ref[DecodeUnit], torch.Tensor]] = []
        self._done = self._backend.Event()  # whatever was given to a stream here
        self._first: Callable[[], DecodeUnit | None] = _nothing
        self._last: Callable[[], DecodeUnit | None] = _nothing
        self._take(size, self._stream, memory)
        self._largest = int(self.size / CAPACITY) // ALIGNMENT * ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    @property
    def _stream(self) -> Any:
        return self._backend.current_stream(self._device)

    def use(self, unit: DecodeUnit, product: Callable[[torch.Tensor], T], ahead: bool) -> T:
        """What `product` makes of a unit's dense weights; others are decoded `ahead` with them."""
        stream = self._stream
        self._done.wait(stream)  # of several streams each waits for the one before
        try:
            self._reserve(unit.capacity, ahead, stream)
            self._keep(stream)
            dense = self._dense(unit)
            if dense is None:
                self._decode(self._from(unit, self.size if ahead else 0), stream)
                dense = self._dense(unit)
            assert dense is not None
            self._learn(unit)
            return product(dense)
        finally:
            self._done.record(stream)

    def lend(self, unit: PoolUnit, nbytes: int, product: Callable[[torch.Tensor], T]) -> T:
        """What `product` makes with so many bytes. What is decoded ahead is decoded behind it."""
        stream = self._stream
        self._done.wait(stream)
        try:
            self._resident.clear()
            self._grow(nbytes, stream)
            self._keep(stream)
            self._stay(unit, stream)
            last = self._last()
            if last is not None:  # whatever follows would be overwritten
                last.successor = None
            self._last = _nothing
            return product(self.memory[:nbytes])
        finally:
            self._done.record(stream)

    def _dense(self, unit: DecodeUnit) -> torch.Tensor | None:
        return next((dense for other, dense in self._resident if other() is unit), None)

    def _learn(self, unit: DecodeUnit) -> None:
        last = self._last()
        if last is None and self._first() is None:
            self._first = weakref.ref(unit)
        elif last is not None and last is not unit:
            last.followed_by(unit)
        self._last = weakref.ref(unit)

    def _from(self, unit: DecodeUnit, limit: int) -> list[DecodeUnit]:
        """A unit, and those that will follow it, in `limit` bytes together."""
        units, size = [unit], _aligned(unit.capacity)
        while len(units) < AHEAD and (following := self._following(units[-1])) is not None:
            size += _aligned(following.capacity)
            if following in units or size > limit:
                break
            units.append(following)
        return units

    def _following(self, unit: DecodeUnit) -> DecodeUnit | None:
        following = unit.next()
        if following is None or following.sources[0].device != self._device:
            return None
        # Behind the last of a step comes something that believes nothing.
        return None if self._ends and following is self._first() else following

    def _decode(self, units: list[DecodeUnit], stream: Any) -> None:
        """Decode units together, over what was there."""
        self._resident.clear()
        for unit in units:
            self._stay(unit, stream)
        starts = accumulate((_aligned(unit.capacity) for unit in units), initial=0)
        resident: list[tuple[weakref.ref[DecodeUnit], torch.Tensor]] = []
        for decode, some in groupby(zip(units, starts, strict=False), key=lambda place: place[0].decode):
            together = list(some)
            memories = [self.memory[at : at + unit.capacity] for unit, at in together]
            dense = decode([unit.coded for unit, _ in together], memories)
            resident += [(weakref.ref(unit), d) for (unit, _), d in zip(together, dense, strict=True)]
        self._resident = resident

    def _reserve(self, capacity: int, ahead: bool, stream: Any) -> None:
        """Take more memory if a unit finds too little."""
        self._largest = max(self._largest, _aligned(capacity))
        self._grow(int(CAPACITY * self._largest) if ahead else self._largest, stream)

    def stay(self, unit: Unit) -> None:
        """Keep what a unit is decoded from for the current stream."""
        self._stay(unit, self._stream)

    def _stay(self, unit: Unit, stream: Any) -> None:
        """Keep what a unit is decoded from, as long as kernels here may read it."""
        if self._graph:
            self.units.add(unit)
        else:
            unit.stay_for(stream)

    def _grow(self, needed: int, stream: Any) -> None:
        """Take more memory if there is less than needed, in bytes."""
        if self.size < needed:
            if self._graph:  # where nobody says which streams still read there
                self._outgrown.append(self.memory)
            self._resident.clear()
            self.memory = torch.empty(0, dtype=torch.uint8)  # so that its memory may come again
            self._take(needed, stream)

    def _take(self, size: int, stream: Any, memory: torch.Tensor | None = None) -> None:
        self.memory = self._empty(size) if memory is None else memory
        self._is_kept = self._graph != 0 or memory is not None
        self._known_on = {stream}
        self._done.record(stream)  # kernels may still be at work with what was freed just now, or lent

    def _empty(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it may be written to later, outside that mode
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _keep(self, stream: Any) -> None:
        """Keep memory that was taken on one stream until another has done with it.

        In a graph streams wait for each other, and who has lent memory waits for all.
        """
        if not self._is_kept and stream not in self._known_on:
            keep(self.memory, stream)
            self._known_on.add(stream)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def keep(memory: torch.Tensor, stream: Any) -> None:
    """Keep memory, once it is freed, from being used again before `stream` has done with it."""
    if memory.is_cuda:
        memory.record_stream(stream)
