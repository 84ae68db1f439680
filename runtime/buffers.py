"""Dense weights for one product at a time: a ring of memory on a device, and the next weights decoded ahead.

    caller's stream   | product 1 | | product 2 | ...            | product 3 | | product 4 |
    side streams      | decode 2     |    | decode 4          |
                      | decode 3        |           | decode 5          |
    ring              1 read, 2 and 3 written       3 read, 4 and 5 written, as far as there is room

A decoder of one weight leaves much of a GPU idle, so several run side by side. Which weights come next is
learnt: each remembers its successor. After a wrong guess, which costs the time of a decode, the same one has
to follow twice before it is believed again.

Streams of a device share its ring, and events keep them apart; threads take turns.

A CUDA graph gets a ring of its own, in its own memory: it is replayed when nobody here looks, so neither may
what it holds be believed outside, nor the other way round. There the side streams are joined before a call
returns, so that a capture may end anywhere; `joined_at_the_end` puts that off. Between replays eager calls
may have that memory (`within`).

In a graph that is captured so, decoders have some multiprocessors only. Products of cuBLAS want whole ones,
and wait for decoders that are everywhere, as do the small kernels between them.

The same code runs on a CPU, where nothing overlaps, for tests with Triton's interpreter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

import torch

from .driver import capture_of as _graph_of
from .driver import confined_streams

T = TypeVar("T")

_Kind = Literal["eager", "captured", "joined at the end"]
"""Of rings: those of eager calls, of any capture, of one within `joined_at_the_end` behind `make_way`."""

SIDES = 6
"""Side streams: at most so many decoders run side by side."""

SHARE = 0.8
"""Of a GPU's multiprocessors, that decoders in a graph have."""

ROOM = 3
"""Slots of a ring, each for one of the largest weights or for some small ones.

Without slots, large weights would lie across what two others have left, and wait for both.
"""

AHEAD = 8
"""Weights that are decoded ahead at most."""

ALIGNMENT = 512
"""Bytes: where weights begin in a ring."""


@dataclass(eq=False)
class Unit:
    """Weights that are decoded together.

    `decode` writes them to the beginning of uint8 memory of `room` bytes, and returns them as they are there;
    given None, it returns them in memory of their own. `sources` is what it reads.
    """

    room: int
    sources: tuple[torch.Tensor, ...]
    decode: Callable[[torch.Tensor | None], torch.Tensor]
    _successor: weakref.ref[Unit] | None = None
    _sure: bool = True
    _known_on: set[Any] = field(default_factory=set)

    def followed_by(self, unit: Unit) -> None:
        """Learn what was used after this one."""
        same = self._successor is not None and self._successor() is unit
        self._sure = same or self._successor is None
        if not same:
            self._successor = weakref.ref(unit)

    def next(self) -> Unit | None:
        """What will probably be used after this one, if that is known."""
        return self._successor() if self._sure and self._successor is not None else None

    def is_known_on(self, stream: Any) -> bool:
        """Whether `stay_for` was called for a stream."""
        return stream in self._known_on

    def stay_for(self, stream: Any) -> None:
        """Keep the memory that is read from being used again before `stream` has done with it."""
        if not self.is_known_on(stream):
            for source in self.sources:
                keep(source, stream)
            self._known_on.add(stream)


def use(unit: Unit, product: Callable[[torch.Tensor], T], *, ahead: bool = True) -> T:
    """What `product` makes of a unit's dense weights. They are another's as soon as it returns.

    Others are decoded `ahead` meanwhile. Beside a product that keeps a GPU busy by itself nothing is gained;
    a ring that is only used without has room for one.
    """
    ring = _ring_of(unit.sources[0].device)
    with ring.lock:
        return ring.use(unit, product, ahead)


def release() -> None:
    """Give the rings of all devices back. They come again when they are needed."""
    with _changing:
        _eager.clear()
        _captured.clear()
        _wanted.clear()


def make_way(device: torch.device) -> None:
    """Before a capture: give the ring of eager calls back. What is freed in a capture is of no use there.

    Nor can streams on part of a GPU be made there: they are made here, if anything was ever decoded.
    """
    with _changing:
        ring = _eager.pop(device, None)
        if ring is not None:
            _wanted[device] = ring.size
        if device in _used:
            _sides(device, "joined at the end")
            _prepared.add(device)


@dataclass(eq=False)
class Room:
    """The memory of a graph's ring; None before its capture has ended, and if it decodes nothing."""

    memory: torch.Tensor | None = None


@contextmanager
def joined_at_the_end(device: torch.device) -> Iterator[Room]:
    """Within a capture on the current stream of a GPU: decode ahead of everything until this ends.

    The capture has to go on until then; if it fails meanwhile, the side streams are joined all the same.
    """
    graph = _graph_of(device)
    _late[graph] = None
    room = Room()
    try:
        yield room
    except BaseException:
        with suppress(RuntimeError):  # a capture that is invalid cannot be joined
            _join_late(graph)
        raise
    else:
        _join_late(graph)
        if (ring := _late[graph]) is not None:
            room.memory = ring.memory
    finally:
        _late.pop(graph, None)


@contextmanager
def within(room: Room) -> Iterator[None]:
    """Let eager calls of this thread decode to the memory of a graph.

    All are on the stream that the graph is replayed on, which is not until this ends.
    """
    if room.memory is None:
        yield
        return
    device = room.memory.device
    before = _lent.rings
    ring = _Ring(device, "eager", memory=room.memory)
    _lent.rings = {**before, device: ring}
    try:
        yield
    finally:
        _lent.rings = before
        ring.join()


def _join_late(graph: int) -> None:
    ring = _late.get(graph)
    if ring is not None:
        ring.join()


_changing = threading.Lock()
_eager: dict[torch.device, _Ring] = {}
_captured: dict[torch.device, tuple[int, _Ring]] = {}
_late: dict[int, _Ring | None] = {}
"""By the number of a graph, rings that are joined at the end of its capture."""

_used: set[torch.device] = set()
_prepared: set[torch.device] = set()
"""Devices that anything was decoded on; those with streams on part of them."""

_wanted: dict[torch.device, int] = {}
"""Bytes of rings that made way for a capture."""


class _Lent(threading.local):
    """By device, rings in a graph's memory, of one thread."""

    def __init__(self) -> None:
        self.rings: dict[torch.device, _Ring] = {}


_lent = _Lent()


def _ring_of(device: torch.device) -> _Ring:
    """The ring of a device, or that of the CUDA graph that its current stream is captured for."""
    graph = _graph_of(device)
    with _changing:
        if not graph:
            if device in _lent.rings:
                return _lent.rings[device]
            if device not in _eager:
                _eager[device] = _Ring(device, "eager")
                _used.add(device)
            return _eager[device]
        ring = _late.get(graph)
        if ring is None and device in _captured and _captured[device][0] == graph:
            ring = _captured[device][1]
        if ring is None:
            # Others make room for that of the graph. Kernels still at work there keep their memory.
            _, last = _captured.pop(device, (0, None))
            others = [other.size for other in (last, _eager.pop(device, None)) if other is not None]
            last = None
            size = max([*others, _wanted.pop(device, 0)])
            late = graph in _late
            kind: _Kind = "joined at the end" if late and device in _prepared else "captured"
            ring = _Ring(device, kind, size, graph)
            if late:
                _late[graph] = ring
            else:
                _captured[device] = graph, ring
        return ring


@cache
def _sides(device: torch.device, kind: _Kind) -> list[Any]:
    """Side streams of a device, others for each kind of rings. torch has few to give out."""
    if device.type != "cuda":
        return [torch.cpu.Stream() for _ in range(SIDES)]
    return confined_streams(device, SHARE if kind == "joined at the end" else 1.0, SIDES)


def _nothing() -> None:
    """What is held where nothing is."""


@dataclass(eq=False)
class _Span:
    """Bytes `start` to `stop` of a ring.

    `done` is when they were last written or read. `wanted` says that what they hold is still to be used.
    """

    start: int
    stop: int
    done: Any
    dense: torch.Tensor | None = None
    unit: Callable[[], Unit | None] = _nothing
    wanted: bool = False


class _Ring:
    """Memory that weights are decoded to, one behind the other, and from its beginning again.

    `graph`, if not 0, is the CUDA graph that it belongs to, which has the memory. `memory`, if given, is that
    of a graph, for some time. Both begin anew one day, and end where they began.
    """

    def __init__(
        self,
        device: torch.device,
        kind: _Kind,
        size: int = 0,
        graph: int = 0,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self._device, self._graph = device, graph
        self._ends = graph != 0 or memory is not None
        # A CPU has streams and events as well, that do nothing.
        self._backend: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._sides = _sides(device, kind)
        self._turn = 0
        self._to_join: set[Any] = set()
        self.memory: torch.Tensor
        self._is_kept: bool  # by a graph, or by who has lent it
        self._outgrown: list[torch.Tensor] = []
        self._known_on: set[Any]
        self._spans: list[_Span]
        self._end: int  # where the next one begins
        self._first: Callable[[], Unit | None] = _nothing
        self._last: Callable[[], Unit | None] = _nothing
        self._take(size, self._stream, memory)
        self._slot = self.size // ROOM // ALIGNMENT * ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    @property
    def _stream(self) -> Any:
        return self._backend.current_stream(self._device)

    def use(self, unit: Unit, product: Callable[[torch.Tensor], T], ahead: bool) -> T:
        """See the function."""
        stream = self._stream
        self._make_room(unit.room, ROOM if ahead else 1, stream)
        span = self._holding(unit)
        if span is None:
            span = self._decode(unit, stream, stream)
        else:  # of several streams that read a span, each waits for the one before: the last event counts
            span.done.wait(stream)
        assert span is not None and span.dense is not None
        span.wanted = False
        self._learn(unit)
        self._keep(stream)
        try:
            result = product(span.dense)
        finally:
            span.done.record(stream)
        if ahead:
            self._prefetch(unit, stream)
        return result

    def join(self) -> None:
        """Let the current stream wait for all that is decoded on the side."""
        stream = self._stream
        for side in self._to_join:
            stream.wait_stream(side)
        self._to_join.clear()

    def _holding(self, unit: Unit) -> _Span | None:
        return next((span for span in self._spans if span.unit() is unit), None)

    def _learn(self, unit: Unit) -> None:
        last = self._last()
        if last is None:
            self._first = weakref.ref(unit)
        elif last is not unit:
            last.followed_by(unit)
        self._last = weakref.ref(unit)

    def _prefetch(self, unit: Unit, stream: Any) -> None:
        """Decode on the side what will follow, as far as there is room."""
        following = unit.next()
        for _ in range(AHEAD):
            if following is None or following is unit or following.sources[0].device != self._device:
                break
            if self._ends and following is self._first():
                break  # whatever comes next believes nothing
            span = self._holding(following)
            if span is None:
                self._make_room(following.room, ROOM, stream)
                span = self._decode(following, self._next_side(stream), stream)
                if span is None:
                    break
            span.wanted = True
            following = following.next()
        if self._graph and self._graph not in _late:
            self.join()

    def _next_side(self, stream: Any) -> Any:
        """The side streams in turn, without that which the caller is on."""
        others = [side for side in self._sides if side != stream] or self._sides
        self._turn = (self._turn + 1) % len(others)
        return others[self._turn]

    def _decode(self, unit: Unit, where: Any, stream: Any) -> _Span | None:
        """Decode on the stream `where`, when nobody writes or reads any more what lies there.

        On the side, None if what lies there is still to be used. `stream` is the current one.
        """
        aside = where is not stream
        start = self._place_for(unit.room)
        stop = start + _aligned(unit.room)
        before = [span for span in self._spans if span.start < stop and start < span.stop]
        if aside and any(span.wanted for span in before):
            return None
        self._spans = [span for span in self._spans if span not in before]
        for span in before:
            span.done.wait(where)
            # What is left of it holds nothing, but may still be read or written.
            left = (span.start, start), (stop, span.stop)
            self._spans += [_Span(a, b, span.done) for a, b in left if a < b]
        if aside and self._ends:
            self._to_join.add(where)
        if aside and not self._graph:
            if not unit.is_known_on(where):  # what it reads may still be on its way
                where.wait_stream(stream)
            unit.stay_for(where)
        made = _Span(start, stop, self._backend.Event())
        self._spans.append(made)
        self._end = stop
        try:
            with self._backend.stream(where):
                made.dense = unit.decode(self.memory[start : start + unit.room])
            made.unit = weakref.ref(unit)
        finally:
            made.done.record(where)
        return made

    def _place_for(self, room: int) -> int:
        """Where what comes next begins: within a slot."""
        slots, at = divmod(self._end, self._slot)
        if at + room <= self._slot and self._end + room <= self.size:
            return self._end
        start = (slots + (at > 0)) * self._slot
        return start if start + self._slot <= self.size else 0

    def _make_room(self, room: int, slots: int, stream: Any) -> None:
        """Take more memory if a unit finds too little."""
        self._slot = max(self._slot, _aligned(room))
        needed = slots * self._slot
        if self.size < needed:
            if self._graph:  # where nobody says which streams still read there
                self._outgrown.append(self.memory)
            for span in self._spans:
                span.dense = None
            self.memory = torch.empty(0, dtype=torch.uint8)  # so that its memory may come again
            self._take(needed, stream)

    def _take(self, size: int, stream: Any, memory: torch.Tensor | None = None) -> None:
        self.memory = self._empty(size) if memory is None else memory
        self._is_kept = self._graph != 0 or memory is not None
        self._known_on = {stream}
        for side in self._sides:
            self._keep(side)
        # Kernels of this stream may still be at work with what was freed just now, or lent.
        span = _Span(0, self.size, self._backend.Event())
        span.done.record(stream)
        self._spans, self._end = [span], 0

    def _empty(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it may be written to later, outside that mode
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _keep(self, stream: Any) -> None:
        """Keep memory that was taken on one stream until another has done with it.

        In a graph streams wait for each other, and who has lent memory waits for all.
        """
        if stream not in self._known_on and not self._is_kept:
            keep(self.memory, stream)
            self._known_on.add(stream)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def keep(memory: torch.Tensor, stream: Any) -> None:
    """Keep memory, once it is freed, from being used again before `stream` has done with it."""
    if memory.is_cuda:
        memory.record_stream(stream)
