"""The ring of dense weights: what is decoded when, that nobody reads what another writes, graphs."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from neuzip.runtime import buffers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Units:
    """Made-up units, each full of its number, that keep lists of decodes, those done together in one."""

    def __init__(self, rooms: list[int]) -> None:
        self.launches: list[list[int]] = []
        self.all = [
            buffers.DecodeUnit(room, (torch.zeros(1, device=DEVICE),), number, self.decode)
            for number, room in enumerate(rooms)
        ]

    def decode(self, numbers: Sequence[int], memories: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Of all units."""
        self.launches.append([*numbers])
        pause(1)
        return [self._filled(*pair) for pair in zip(numbers, memories, strict=True)]

    def _filled(self, number: int, memory: torch.Tensor | None) -> torch.Tensor:
        if memory is None:
            memory = torch.empty(self.all[number].capacity, dtype=torch.uint8, device=DEVICE)
        return memory.fill_(number)

    @property
    def decoded(self) -> list[int]:
        """All decodes."""
        return [number for launch in self.launches for number in launch]

    def use(self, *numbers: int) -> list[torch.Tensor]:
        """Copies of what products of some units see, in this order."""

        def copy(number: int) -> torch.Tensor:
            def product(dense: torch.Tensor) -> torch.Tensor:
                pause(4)  # longer than what may begin meanwhile
                return dense.clone()

            return buffers.use(self.all[number], product)

        return [copy(number) for number in numbers]

    def check(self, seen: list[torch.Tensor], numbers: list[int]) -> None:
        for dense, number in zip(seen, numbers, strict=True):
            assert dense.numel() == self.all[number].capacity
            assert (dense == number).all(), number


def pause(times: int) -> None:
    """Give other streams the time to do what they must not do yet."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(times * 100_000)


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    buffers.release()


def test_the_order_of_use_is_learnt() -> None:
    units = Units([1000, 500, 500, 900, 2000])  # with their gaps 1024, 512, 512, 1024 and 2048 bytes
    order = [0, 1, 2, 3, 4]
    units.check(units.use(*order), order)
    assert units.launches == [[0], [1], [2], [3], [4]]  # nothing to know
    units.launches.clear()
    units.check(units.use(*order * 2), order * 2)
    assert units.launches == [[0, 1, 2, 3, 4]]  # 5,120 of 6,656 bytes, which stay


def test_as_many_are_decoded_together_as_have_room() -> None:
    units = Units([1000] * 9)
    order = list(range(9))
    units.use(*order)
    units.launches.clear()
    units.check(units.use(*order * 3), order * 3)
    assert units.launches == [[i % 9, (i + 1) % 9, (i + 2) % 9] for i in range(0, 27, 3)]


def test_not_too_many_are_decoded_together() -> None:
    units = Units([4000, *[500] * 24])
    order = list(range(25))
    units.use(*order)
    units.launches.clear()
    units.use(*order)
    assert [len(launch) for launch in units.launches] == [buffers.AHEAD] * 4  # the last are of the next round


@pytest.mark.parametrize("seed", range(6))
def test_in_a_known_order_each_is_decoded_once(seed: int) -> None:
    """Whatever the sizes: what is decoded ahead is not written over before it was used."""
    generator = torch.Generator().manual_seed(seed)
    units = Units((torch.randint(1, 9, (17,), generator=generator) * 700).tolist())
    order = list(range(17))
    units.use(*order * 2)
    units.launches.clear()
    units.check(units.use(*order * 5), order * 5)
    assert max(units.decoded.count(number) for number in order) <= 5 + 1  # and the last group goes further


def test_a_wrong_guess_is_not_repeated() -> None:
    units = Units([64] * 7)
    units.use(0, 1, 2, 3, 0)
    assert units.launches == [[0], [1], [2], [3], [0, 1, 2]]
    units.launches.clear()
    others = [4, 5, 6, 0]
    units.check(units.use(*others), others)  # after 0 came 1, then 4: no guess
    assert units.launches == [[4], [5], [6], [0]]
    units.check(units.use(*others), others)  # 4 came again
    assert units.launches[4:] == [[4, 5, 6], [0, 4, 5]]


def test_what_is_held_is_not_decoded_again() -> None:
    """Nor does what was decoded ahead for nothing keep others from being so."""
    units = Units([500] * 6)
    units.use(0, 1, 2, 3, 0)
    units.use(4, 5, 4, 5)
    units.launches.clear()
    units.check(units.use(*[4, 5] * 3), [4, 5] * 3)
    assert units.launches == []


def test_nothing_is_decoded_ahead_of_large_products() -> None:
    units = Units([600] * 4)
    for number in [0, 1, 2] * 3:
        buffers.use(units.all[number], lambda dense: None, ahead=False)
    assert units.launches == [[0], [1], [2]] * 3
    (taken,) = buffers._pool.eager.values()
    assert taken.size == 2 * buffers.ALIGNMENT  # room for one
    units.check(units.use(0), [0])
    assert units.launches[9:] == [[0, 1, 2]]
    assert taken.size == buffers.CAPACITY * 2 * buffers.ALIGNMENT


def test_what_follows_lent_memory_is_not_decoded_before_it() -> None:
    """As it would be written over; and the memory is of the ring, which grows for it."""
    units = Units([500] * 6)
    pool = buffers.PoolUnit((torch.zeros(1, device=DEVICE),))
    for _ in range(3):
        units.use(0, 1, 2)
        lent = buffers.lend(pool, 20_000, lambda memory: memory.fill_(0xFF))
        units.check(units.use(3, 4, 5), [3, 4, 5])
    assert units.launches[6:8] == [[0, 1, 2], [3, 4, 5, 0, 1, 2]]
    assert units.launches[8:] == [[3, 4, 5, 0, 1, 2]]
    (taken,) = buffers._pool.eager.values()
    assert taken.size == 20_000 and lent.data_ptr() == taken.memory.data_ptr()


def test_units_of_other_decoders_share_no_launch() -> None:
    one, other = Units([100] * 2), Units([100] * 2)
    both = [*one.all, *other.all]
    for unit in both * 2:
        buffers.use(unit, lambda dense: None)
    assert one.launches == [[0], [1], [0, 1], [0, 1]]
    assert other.launches == [[0], [1], [0], [1]]


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

    def fails(numbers: Sequence[int], memories: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        right(numbers, memories)
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
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    made = Paper()
    monkeypatch.setattr(buffers, "_pool", buffers._Pool())  # its rings have events on paper
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(made, name))
    monkeypatch.setattr(buffers._Ring, "_empty", lambda _, size: made.empty(size))
    monkeypatch.setattr(buffers, "keep", made.keep)
    return made


def paper_unit(paper: Paper, number: int, room: int) -> buffers.DecodeUnit:
    """Whose source the current stream is still writing."""
    source = -1 - next(paper.numbers)
    paper.touch(source, source + 1, writes=True)

    def decode(coded: Sequence[int], memories: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        paper.touch(source, source + 1, writes=False)
        there = [memory for memory in memories if memory is not None]
        for memory in there:
            paper.access(memory, writes=True)
        return [memory.fill_(number) for number, memory in zip(coded, there, strict=True)]

    return buffers.DecodeUnit(room, (torch.zeros(1),), number, decode)


def use_on_paper(paper: Paper, units: list[buffers.DecodeUnit], number: int, ahead: bool = True) -> None:
    def product(dense: torch.Tensor) -> None:
        assert dense.numel() == units[number].capacity and (dense == number).all()
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
@pytest.mark.parametrize("seed", range(60))
def test_no_stream_of_a_graph_disturbs_another(
    seed: int, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(choose.randint(1, 9))]
    order = order_of(choose, len(units))
    if choose.random() < 0.5:  # else the ring grows in the capture
        for number in order:
            use_on_paper(paper, units, number)
    paper.accesses.clear()
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    main, other = paper.current, Stream()
    streams = [main, other] if choose.random() < 0.5 else [main]
    for number in order:
        with paper.stream(choose.choice(streams)):
            use_on_paper(paper, units, number)
        # Nothing is left on other streams: a capture may end.
        assert {access.number for access in paper.accesses} <= main.after | other.after


@CPU_ONLY
def test_a_ring_that_makes_way_for_a_capture_leaves_its_size(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the ring of the capture does not grow, and memory is not taken twice."""
    units = [paper_unit(paper, n, 1000 * (n + 1)) for n in range(4)]
    for number in range(4):
        use_on_paper(paper, units, number)
    buffers.make_way(torch.device("cpu"))
    assert not buffers._pool.eager
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    use_on_paper(paper, units, 0)
    ring = buffers._pool.captured[torch.device("cpu")][1]
    assert ring.size == buffers.CAPACITY * 4096 and [t.numel() for t in ring._outgrown] == []


@CPU_ONLY
@pytest.mark.parametrize("seed", range(60))
def test_a_graphs_memory_is_lent(seed: int, paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """To eager calls, which have ended before the next replay; other threads have memory of their own."""
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(choose.randint(1, 9))]
    order = order_of(choose, len(units))
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    for number in order:
        use_on_paper(paper, units, number)
    room = buffers.memory_of_capture(torch.device("cpu"))
    assert room is not None
    base = paper.base
    monkeypatch.setattr(buffers, "capture_id", lambda _: 0)
    for _ in range(3):
        paper.access(room.memory, writes=True)  # a replay
        with buffers.within(room):
            for number in order:
                use_on_paper(paper, units, number)
            assert not buffers._pool.eager
    paper.access(room.memory, writes=True)
    assert paper.base == base  # nothing was taken
    with ThreadPoolExecutor(1) as pool, buffers.within(room):
        pool.submit(use_on_paper, paper, units, 0).result()
    assert buffers._pool.eager


@CPU_ONLY
def test_memory_may_be_lent_while_other_memory_is(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever is called in a prompt: afterwards the first goes on with what it had."""
    units = [paper_unit(paper, n, 1000) for n in range(3)]
    rooms = []
    for graph in (7, 8):
        monkeypatch.setattr(buffers, "capture_id", lambda _, graph=graph: graph)
        use_on_paper(paper, units, 0)
        rooms.append(buffers.memory_of_capture(torch.device("cpu")))
    monkeypatch.setattr(buffers, "capture_id", lambda _: 0)
    held: list[buffers._Ring] = []

    def fail() -> None:
        with buffers.within(rooms[1]):
            held.append(buffers._pool.ring(torch.device("cpu")))
            raise ZeroDivisionError

    with buffers.within(rooms[0]):
        held.append(buffers._pool.ring(torch.device("cpu")))
        with pytest.raises(ZeroDivisionError):
            fail()
        assert buffers._pool.ring(torch.device("cpu")) is held[0]
    assert [ring.memory is room.memory for ring, room in zip(held, rooms, strict=True)] == [True] * 2
    assert not buffers._pool.lent.rings


@CPU_ONLY
def test_in_lent_memory_each_weight_is_decoded_once(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay believes nothing of what is ahead."""
    units = [paper_unit(paper, n, 500 + n) for n in range(9)]
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    for number in [*range(9)] * 2:
        use_on_paper(paper, units, number)
    room = buffers.memory_of_capture(torch.device("cpu"))
    monkeypatch.setattr(buffers, "capture_id", lambda _: 0)
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
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    use_on_paper(paper, units, 0)
    room = buffers.memory_of_capture(torch.device("cpu"))
    assert room is not None
    monkeypatch.setattr(buffers, "capture_id", lambda _: 0)
    with buffers.within(room):
        for number in [0, 1, 2, 3] * 3:
            use_on_paper(paper, units, number)
    paper.access(room.memory, writes=True)
    assert room.memory.numel() == buffers.CAPACITY * 1024


@CPU_ONLY
@pytest.mark.parametrize("seed", range(6))
def test_a_graph_decodes_each_weight_once(seed: int, paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay begins anew: nothing is decoded for it."""
    choose = random.Random(seed)
    units = [paper_unit(paper, n, choose.randint(1, 4000)) for n in range(9)]
    for number in [*range(9)] * 2:
        use_on_paper(paper, units, number)
    paper.accesses.clear()
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    for number in range(9):
        use_on_paper(paper, units, number)
    assert sum(access.writes for access in paper.accesses) == 1 + 9  # the memory itself counts as one


@CPU_ONLY
def test_what_a_graph_reads_is_kept_with_it(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is another model's, that once came next. A capture that nobody asks for it keeps nothing."""
    mine, others = (paper_unit(paper, n, 1000) for n in range(2))
    for unit in (mine, others):
        buffers.use(unit, lambda dense: None)
    monkeypatch.setattr(buffers, "capture_id", lambda _: 7)
    buffers.use(mine, lambda dense: None)
    gone = weakref.ref(others)
    room = buffers.memory_of_capture(torch.device("cpu"))
    assert room is not None and room.units == {mine, others}
    del unit, others
    assert gone() is not None
    del room
    assert gone() is None
    monkeypatch.setattr(buffers, "capture_id", lambda _: 8)
    buffers.use(mine, lambda dense: None)
    gone = weakref.ref(mine)
    del mine
    assert gone() is None


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
def test_prompts_and_replays_take_turns_in_a_graphs_memory() -> None:
    device = torch.device("cuda", 0)
    units = Units([50_000, 70_000, 300, 4000, 20_000])
    order, stream = [0, 1, 2, 3, 4], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        units.use(*order * 2)
    stream.synchronize()
    buffers.make_way(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        seen = units.use(*order)
        room = buffers.memory_of_capture(device)
    for _ in range(4):
        with torch.cuda.stream(stream):
            with buffers.within(room):
                prompt = units.use(*order, 3, 1)
                assert not buffers._pool.eager
            for tensor in seen:
                tensor.fill_(0xEE)
            graph.replay()
            graph.replay()
    stream.synchronize()
    units.check(seen, order)
    units.check(prompt, [*order, 3, 1])


@pytest.mark.gpu
def test_a_capture_without_weights_has_no_memory() -> None:
    x, graph = torch.zeros(4, device=DEVICE), torch.cuda.CUDAGraph()
    Units([100]).use(0)
    with torch.cuda.graph(graph):
        x += 1
        assert buffers.memory_of_capture(torch.device("cuda", 0)) is None
    graph.replay()
    assert x.tolist() == [1] * 4
    assert not buffers._pool.captured


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
