"""The ring of dense weights: what is decoded when, that nobody reads what another writes, graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from neuzip.runtime import buffers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Units:
    """Made-up units, each full of its number, that keep lists of decodes, and of those waited for."""

    def __init__(self, rooms: list[int]) -> None:
        self.decoded: list[int] = []
        self.missed: list[int] = []
        self.all = [self._unit(number, room) for number, room in enumerate(rooms)]

    def _unit(self, number: int, room: int) -> buffers.Unit:
        def decode(memory: torch.Tensor | None) -> torch.Tensor:
            self.decoded.append(number)
            memory = torch.empty(room, dtype=torch.uint8, device=DEVICE) if memory is None else memory
            pause(1)
            return memory.fill_(number)

        return buffers.Unit(room, (torch.zeros(1, device=DEVICE),), decode)

    def use(self, *numbers: int) -> list[torch.Tensor]:
        """Copies of what products of some units see, in this order."""

        def copy(number: int) -> torch.Tensor:
            before = len(self.decoded)

            def product(dense: torch.Tensor) -> torch.Tensor:
                self.missed += [number] * (len(self.decoded) > before)
                pause(4)  # longer than what may begin meanwhile
                return dense.clone()

            return buffers.use(self.all[number], product)

        return [copy(number) for number in numbers]

    def check(self, seen: list[torch.Tensor], numbers: list[int]) -> None:
        for dense, number in zip(seen, numbers, strict=True):
            assert dense.numel() == self.all[number].room
            assert (dense == number).all(), number


def pause(times: int) -> None:
    """Give other streams the time to do what they must not do yet."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(times * 100_000)


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    buffers.release()


def test_the_order_of_use_is_learnt() -> None:
    units = Units([100, 300, 50, 200])  # a ring has room for three
    order = [0, 1, 2, 3]
    units.check(units.use(*order), order)
    assert units.decoded == order  # nothing to know
    units.check(units.use(*order), order)
    assert units.decoded == [*order, *order, 0, 1, 2]  # ahead, as far as there is room
    units.decoded.clear()
    units.check(units.use(*order * 3), order * 3)
    assert units.decoded == [3, 0, 1, 2] * 3


@pytest.mark.parametrize("seed", range(6))
def test_in_a_known_order_all_are_decoded_ahead(seed: int) -> None:
    """Whatever the sizes: what is ahead is not written over before it was used."""
    generator = torch.Generator().manual_seed(seed)
    units = Units((torch.randint(1, 9, (7,), generator=generator) * 700).tolist())
    order = list(range(7))
    units.use(*order * 2)
    units.missed.clear()
    units.check(units.use(*order * 5), order * 5)
    assert not units.missed


def test_as_many_are_decoded_ahead_as_have_room() -> None:
    units = Units([4000, *[500] * 24])
    order = list(range(25))
    units.use(*order)
    units.decoded.clear()
    units.use(0)
    assert units.decoded == [0, *range(1, 1 + buffers.AHEAD)]
    units.use(1)
    assert units.decoded == [0, *range(1, 2 + buffers.AHEAD)]


def test_no_weight_lies_in_two_slots() -> None:
    """It would wait for what is read in both."""
    units = Units([1500, 400, 400, 1500, 5000, 5000, 5000, 300])
    order, places = list(range(8)), set()
    for _ in range(6):
        for number in order:
            places.add(buffers.use(units.all[number], lambda x: (x.storage_offset(), x.numel())))
    assert len(places) > len(order)
    slot = 5120
    assert all(start // slot == (start + room - 1) // slot < buffers.ROOM for start, room in places)


def test_a_wrong_guess_is_not_repeated() -> None:
    units = Units([64] * 7)
    units.use(0, 1, 2, 3, 0)
    assert units.decoded == [0, 1, 2, 3, 0, 1, 2, 3]
    units.decoded.clear()
    others = [4, 5, 6, 0]
    units.check(units.use(*others), others)  # after 0 came 1, then 4: no guess
    assert units.decoded == others
    units.check(units.use(*others), others)  # 4 came again
    assert units.decoded == [*others, *others, 4, 5, 6]


def test_a_wrong_guess_makes_room_again() -> None:
    """What was decoded ahead for nothing does not keep others from being decoded ahead."""
    units = Units([500] * 6)
    units.use(0, 1, 2, 3, 0)
    units.use(4, 5, 4, 5)
    units.decoded.clear()
    units.check(units.use(*[4, 5] * 3), [4, 5] * 3)
    assert units.decoded == []  # both are held


def test_nothing_is_decoded_ahead_of_large_products() -> None:
    units = Units([600] * 4)
    for number in [0, 1, 2] * 3:
        buffers.use(units.all[number], lambda dense: None, ahead=False)
    assert units.decoded == [0, 1, 2] * 3
    (taken,) = buffers._eager.values()
    assert taken.size == 2 * buffers.ALIGNMENT  # room for one
    units.check(units.use(0), [0])
    assert units.decoded == [0, 1, 2] * 3 + [0, 1, 2]
    assert taken.size == buffers.ROOM * 2 * buffers.ALIGNMENT


@pytest.mark.parametrize("seed", range(4))
def test_any_order_is_right(seed: int) -> None:
    """Whatever was guessed, whatever the sizes, and on whichever stream."""
    generator = torch.Generator().manual_seed(seed)
    rooms = torch.randint(1, 5000, (6,), generator=generator).tolist()
    units = Units(rooms)
    cycle = torch.randint(0, 6, (9,), generator=generator).tolist()
    numbers = cycle * 4 + torch.randint(0, 6, (40,), generator=generator).tolist() + cycle * 2
    streams = [torch.cuda.Stream() for _ in range(2)] if DEVICE.type == "cuda" else []
    seen = []
    for at, number in enumerate(numbers):
        if streams and at % 3 == 0:
            torch.cuda.set_stream(streams[at // 3 % 2])
        seen += units.use(number)
    if streams:
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.synchronize()
    units.check(seen, numbers)


def test_threads_take_turns() -> None:
    units = Units([1000, 2000, 3000, 500])

    def run(shift: int) -> tuple[list[torch.Tensor], list[int]]:
        numbers = [(i * shift) % 4 for i in range(50)]
        if DEVICE.type == "cuda" and shift % 2:
            with torch.cuda.stream(torch.cuda.Stream()):
                return units.use(*numbers), numbers
        return units.use(*numbers), numbers

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, [1, 2, 3, 5]))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for seen, numbers in results:
        units.check(seen, numbers)


def test_a_decode_that_fails_spoils_nothing() -> None:
    units = Units([600] * 3)
    units.use(0, 1, 2, 0, 1, 2)
    buffers.release()
    right = units.all[1].decode

    def fails(memory: torch.Tensor | None) -> torch.Tensor:
        right(memory)
        raise ZeroDivisionError

    units.all[1].decode = fails
    with pytest.raises(ZeroDivisionError):
        units.use(0)  # 1 follows
    units.all[1].decode = right
    units.check(units.use(1, 2, 0, 1), [1, 2, 0, 1])


def test_a_product_that_fails_spoils_nothing() -> None:
    units = Units([64] * 3)
    units.use(0, 1, 2, 0)

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        buffers.use(units.all[1], fails)
    units.check(units.use(1, 2, 0), [1, 2, 0])


# What may happen at the same time, whatever a GPU makes of it: streams and events on paper.


@dataclass(frozen=True)
class Access:
    """Something that reads or writes bytes of memory, and all that has ended before it begins."""

    number: int
    writes: bool
    start: int
    stop: int
    after: frozenset[int]


@dataclass(eq=False)
class Stream:
    """Knows what has to end before what it is given next."""

    after: set[int] = field(default_factory=set)

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after


class Event:
    def __init__(self) -> None:
        self.after: frozenset[int] | None = None

    def record(self, stream: Stream) -> None:
        self.after = frozenset(stream.after)

    def wait(self, stream: Stream) -> None:
        assert self.after is not None
        stream.after |= self.after


class Paper:
    """In place of `torch.cpu`, and of an allocator that gives the same memory out again at once.

    That waits for the stream that had asked for it, and for those that it is kept for.
    """

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.current = Stream()
        self.accesses: list[Access] = []
        self.numbers = itertools.count()
        self.kept: set[Stream] = set()
        self.memory: StorageWeakRef | None = None
        self.base = 0

    def current_stream(self, _: object) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def access(self, memory: torch.Tensor, writes: bool) -> None:
        """By what is given to the current stream. Whatever it could disturb has to have ended."""
        start = self.base + memory.storage_offset()
        self.touch(start, start + memory.numel(), writes)

    def empty(self, size: int) -> torch.Tensor:
        """Memory of the caching allocator, where what was there before begins."""
        if self.memory is not None and not self.memory.expired():
            self.base += 1 << 20  # it was not freed
        freed: set[int] = set().union(*(stream.after for stream in self.kept))
        self.kept = {self.current}
        self.touch(self.base, self.base + size, True, freed)
        made = torch.empty(size, dtype=torch.uint8)
        self.memory = StorageWeakRef(made.untyped_storage())
        return made

    def keep(self, memory: torch.Tensor, stream: Stream) -> None:
        if self.memory is not None and memory.untyped_storage()._cdata == self.memory.cdata:
            self.kept.add(stream)

    def touch(self, start: int, stop: int, writes: bool, others: Collection[int] = ()) -> None:
        """The same of any bytes, after `others` have ended too."""
        new = Access(next(self.numbers), writes, start, stop, frozenset(self.current.after.union(others)))
        for old in self.accesses:
            if (old.writes or writes) and old.start < stop and start < old.stop:
                assert old.number in new.after, (old, new)
        self.accesses.append(new)
        self.current.after |= {*new.after, new.number}


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    made = Paper()
    buffers._sides.cache_clear()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(made, name))
    monkeypatch.setattr(buffers._Ring, "_empty", lambda _, size: made.empty(size))
    monkeypatch.setattr(buffers, "keep", made.keep)
    yield made
    buffers._sides.cache_clear()


def paper_unit(paper: Paper, number: int, room: int) -> buffers.Unit:
    """Whose source the current stream is still writing."""
    source = -1 - next(paper.numbers)
    paper.touch(source, source + 1, writes=True)

    def decode(memory: torch.Tensor | None) -> torch.Tensor:
        assert memory is not None
        paper.touch(source, source + 1, writes=False)
        paper.access(memory, writes=True)
        return memory.fill_(number)

    return buffers.Unit(room, (torch.zeros(1),), decode)


def use_on_paper(paper: Paper, units: list[buffers.Unit], number: int, ahead: bool = True) -> None:
    def product(dense: torch.Tensor) -> None:
        assert dense.numel() == units[number].room and (dense == number).all()
        paper.access(dense, writes=False)

    buffers.use(units[number], product, ahead=ahead)


def order_of(choose: random.Random, units: int) -> list[int]:
    """Rounds of the same order, disturbed now and then, and others of more units after them."""
    order: list[int] = []
    for known in sorted({choose.randint(1, units), units}):
        cycle = [choose.randrange(known) for _ in range(choose.randint(1, 12))]
        order += cycle * 4 + [choose.randrange(known) for _ in range(5)] + cycle * 3
    for _ in range(choose.randint(0, 3)):
        order.insert(choose.randrange(len(order)), choose.randrange(units))
    return order


CPU_ONLY = pytest.mark.skipif(DEVICE.type != "cpu", reason="streams on paper stand in for those of a CPU")


@CPU_ONLY
@pytest.mark.parametrize("seed", range(200))
def test_no_stream_disturbs_another(seed: int, paper: Paper) -> None:
    """Of several streams with the same ring, in any order of use, with and without decoding ahead.

    The ring may be older than the weights, which were written on a stream that callers wait for.
    """
    choose = random.Random(seed)
    if choose.random() < 0.5:
        use_on_paper(paper, [paper_unit(paper, 0, choose.randint(1, 9000))], 0)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(choose.randint(1, 9))]
    streams = [Stream(set(paper.current.after)) for _ in range(choose.randint(1, 3))]
    for number in order_of(choose, len(units)):
        with paper.stream(choose.choice(streams)):
            use_on_paper(paper, units, number, ahead=choose.random() < 0.9)
    assert paper.base == 0  # nothing was taken before what was outgrown was freed


@CPU_ONLY
def test_a_caller_may_be_on_a_side_stream(paper: Paper) -> None:
    """torch gives the same streams out again: decoders run on the others."""
    mine = buffers._sides(torch.device("cpu"), "eager")[1]
    units = [paper_unit(paper, n, 300) for n in range(9)]
    ran_on: list[Stream] = []
    for unit in units:
        decode = unit.decode
        unit.decode = lambda memory, decode=decode: (ran_on.append(paper.current), decode(memory))[1]
    mine.wait_stream(paper.current)
    with paper.stream(mine):
        for number in [*range(9)] * 2:
            use_on_paper(paper, units, number)
        ran_on.clear()
        for number in [*range(9)] * 3:
            use_on_paper(paper, units, number)
    assert ran_on and mine not in ran_on


@CPU_ONLY
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_no_stream_of_a_graph_disturbs_another(
    seed: int, late: bool, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a capture may end: the stream that it began on has waited for all that is done on the side."""
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(choose.randint(1, 9))]
    order = order_of(choose, len(units))
    if choose.random() < 0.5:  # else the ring grows in the capture
        for number in order:
            use_on_paper(paper, units, number)
    paper.accesses.clear()
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    main, other = paper.current, Stream()
    streams = [main, other] if choose.random() < 0.5 else [main]

    def everything_is_joined() -> None:
        assert {access.number for access in paper.accesses} <= main.after | other.after

    with buffers.joined_at_the_end(torch.device("cpu")) if late else nullcontext():
        for number in order:
            with paper.stream(choose.choice(streams)):
                use_on_paper(paper, units, number)
            if not late:
                everything_is_joined()
    everything_is_joined()


@CPU_ONLY
def test_a_capture_that_fails_is_joined(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be ended, and what failed is what is told."""
    units = [paper_unit(paper, n, 1000) for n in range(5)]
    for number in [*range(5)] * 2:
        use_on_paper(paper, units, number)
    paper.accesses.clear()
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)

    def fail() -> None:
        with buffers.joined_at_the_end(torch.device("cpu")):
            use_on_paper(paper, units, 0)
            raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        fail()
    assert len(paper.accesses) > 3
    assert {access.number for access in paper.accesses} <= paper.current.after
    assert not buffers._late and not buffers._captured


@CPU_ONLY
def test_a_ring_that_makes_way_for_a_capture_leaves_its_size(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the ring of the capture does not grow, and memory is not taken twice."""
    units = [paper_unit(paper, n, 1000 * (n + 1)) for n in range(4)]
    for number in range(4):
        use_on_paper(paper, units, number)
    buffers.make_way(torch.device("cpu"))
    assert not buffers._eager
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    use_on_paper(paper, units, 0)
    ring = buffers._captured[torch.device("cpu")][1]
    assert ring.size == buffers.ROOM * 4096 and [t.numel() for t in ring._outgrown] == []


@CPU_ONLY
@pytest.mark.parametrize("seed", range(60))
def test_a_graphs_memory_is_lent(seed: int, paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """To eager calls, which have ended before the next replay; other threads have memory of their own."""
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(choose.randint(1, 9))]
    order = order_of(choose, len(units))
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    with buffers.joined_at_the_end(torch.device("cpu")) as room:
        for number in order:
            use_on_paper(paper, units, number)
    assert room.memory is not None
    base = paper.base
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 0)
    for _ in range(3):
        paper.access(room.memory, writes=True)  # a replay
        with buffers.within(room):
            for number in order:
                use_on_paper(paper, units, number)
            assert not buffers._eager
    paper.access(room.memory, writes=True)
    assert paper.base == base  # nothing was taken
    with ThreadPoolExecutor(1) as pool, buffers.within(room):
        pool.submit(use_on_paper, paper, units, 0).result()
    assert buffers._eager


@CPU_ONLY
def test_memory_may_be_lent_while_other_memory_is(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever is called in a prompt: afterwards the first goes on with what it had."""
    units = [paper_unit(paper, n, 1000) for n in range(3)]
    rooms = []
    for graph in (7, 8):
        monkeypatch.setattr(buffers, "_graph_of", lambda _, graph=graph: graph)
        with buffers.joined_at_the_end(torch.device("cpu")) as room:
            use_on_paper(paper, units, 0)
        rooms.append(room)
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 0)
    held: list[buffers._Ring] = []

    def fail() -> None:
        with buffers.within(rooms[1]):
            held.append(buffers._ring_of(torch.device("cpu")))
            raise ZeroDivisionError

    with buffers.within(rooms[0]):
        held.append(buffers._ring_of(torch.device("cpu")))
        with pytest.raises(ZeroDivisionError):
            fail()
        assert buffers._ring_of(torch.device("cpu")) is held[0]
    assert [ring.memory is room.memory for ring, room in zip(held, rooms, strict=True)] == [True] * 2
    assert not buffers._lent.rings


@CPU_ONLY
def test_in_lent_memory_each_weight_is_decoded_once(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay believes nothing of what is ahead."""
    units = [paper_unit(paper, n, 500 + n) for n in range(9)]
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    with buffers.joined_at_the_end(torch.device("cpu")) as room:
        for number in [*range(9)] * 2:
            use_on_paper(paper, units, number)
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 0)
    for _ in range(2):
        paper.accesses.clear()
        with buffers.within(room):
            for number in range(9):
                use_on_paper(paper, units, number)
        assert sum(access.writes for access in paper.accesses) == 9


@CPU_ONLY
def test_a_larger_weight_than_a_graphs_has_memory_of_its_own(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [paper_unit(paper, n, 1000 * (n + 1)) for n in range(4)]
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    with buffers.joined_at_the_end(torch.device("cpu")) as room:
        use_on_paper(paper, units, 0)
    assert room.memory is not None
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 0)
    with buffers.within(room):
        for number in [0, 1, 2, 3] * 3:
            use_on_paper(paper, units, number)
    paper.access(room.memory, writes=True)
    assert room.memory.numel() == buffers.ROOM * 1024


@CPU_ONLY
@pytest.mark.parametrize("seed", range(6))
def test_a_graph_decodes_each_weight_once(seed: int, paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay begins anew: nothing is decoded for it."""
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(9)]
    for number in [*range(9)] * 2:
        use_on_paper(paper, units, number)
    paper.accesses.clear()
    monkeypatch.setattr(buffers, "_graph_of", lambda _: 7)
    with buffers.joined_at_the_end(torch.device("cpu")):
        for number in range(9):
            use_on_paper(paper, units, number)
    assert sum(access.writes for access in paper.accesses) == 1 + 9  # the memory itself counts as one


# On a GPU: graphs and streams.


@pytest.mark.gpu
def test_graphs_and_eager_calls_do_not_disturb_each_other() -> None:
    """Nor graphs each other: one begins with the weight that the one before has guessed."""
    units = Units([5000, 70_000, 300, 4000])
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [3, 3, 0, 1, 0]]
    for _ in range(2):
        units.use(*orders[0])
    torch.cuda.synchronize()
    graphs = []
    for order in orders:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = units.use(*order)
        graphs.append((graph, seen, order))
    for _ in range(3):
        for graph, seen, order in graphs:
            eager = units.use(*orders[0])
            for tensor in seen:
                tensor.fill_(0xEE)
            graph.replay()
            eager += units.use(2, 3)
            torch.cuda.synchronize()
            units.check(seen, order)
            units.check(eager, [*orders[0], 2, 3])


@pytest.mark.gpu
def test_graphs_overlap_on_streams() -> None:
    units = Units([50_000, 70_000, 30_000])
    order = [0, 1, 2] * 4
    units.use(*order)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = units.use(*order)
        graphs.append((graph, seen, torch.cuda.Stream()))
    for _ in range(5):
        for graph, _, stream in graphs:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, seen, _ in graphs:
            units.check(seen, order)
            for tensor in seen:
                tensor.fill_(0xEE)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [1, 4])
def test_side_streams_are_joined_at_the_end_of_a_capture(first: int) -> None:
    """With the first weights larger and smaller than others, so that a ring grows in the capture or not."""
    units = Units([50_000, 700, 1000, 70_000, 300, 20_000, 600, 600, 600])
    order = [*range(first, 9), *range(first)]
    units.use(*order * 2)
    buffers.release()
    graphs = []
    for _ in range(2):
        graph, after = torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
        with torch.cuda.graph(graph), buffers.joined_at_the_end(torch.device("cuda", 0)):
            seen = units.use(*order)
            after += 1
        graphs.append((graph, seen))
    for _ in range(3):
        for graph, seen in graphs:
            for tensor in seen:
                tensor.fill_(0xEE)
            graph.replay()
            torch.cuda.synchronize()
            units.check(seen, order)
    units.check(units.use(*order), order)


@pytest.mark.gpu
def test_decoders_of_a_graph_are_confined_if_way_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    units = Units([50_000, 700, 1000])
    for prepared in (False, True):
        units.use(0, 1, 2, 0, 1, 2)
        monkeypatch.setattr(buffers, "_prepared", set())
        if prepared:
            buffers.make_way(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), buffers.joined_at_the_end(device) as room:
            seen = units.use(0, 1, 2)
            (ring,) = buffers._late.values()
        assert ring is not None and room.memory is ring.memory
        assert (type(ring._sides[0]) is torch.cuda.ExternalStream) == prepared
        graph.replay()
        torch.cuda.synchronize()
        units.check(seen, [0, 1, 2])


@pytest.mark.gpu
def test_prompts_and_replays_take_turns_in_a_graphs_memory() -> None:
    device = torch.device("cuda", 0)
    units = Units([50_000, 70_000, 300, 4000, 20_000])
    order, stream = [0, 1, 2, 3, 4], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        units.use(*order * 2)
    stream.synchronize()
    buffers.make_way(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), buffers.joined_at_the_end(device) as room:
        seen = units.use(*order)
    for _ in range(4):
        with torch.cuda.stream(stream):
            with buffers.within(room):
                prompt = units.use(*order, 3, 1)
                assert not buffers._eager
            for tensor in seen:
                tensor.fill_(0xEE)
            graph.replay()
            graph.replay()
    stream.synchronize()
    units.check(seen, order)
    units.check(prompt, [*order, 3, 1])


@pytest.mark.gpu
def test_a_capture_without_weights_joins_nothing() -> None:
    x, graph = torch.zeros(4, device=DEVICE), torch.cuda.CUDAGraph()
    Units([100]).use(0)
    with torch.cuda.graph(graph), buffers.joined_at_the_end(torch.device("cuda", 0)):
        x += 1
    graph.replay()
    assert x.tolist() == [1] * 4
    assert not buffers._captured and not buffers._late


@pytest.mark.gpu
def test_graphs_may_share_a_pool() -> None:
    units = Units([50_000, 70_000, 30_000])
    order = [0, 1, 2, 1]
    units.use(*order)
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        a = units.use(*order)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=first.pool()):
        b = units.use(*order)
    for _ in range(3):
        first.replay()
        torch.cuda.synchronize()
        units.check(a, order)
        second.replay()
        torch.cuda.synchronize()
        units.check(b, order)
