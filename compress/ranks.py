"""Several processes at work on one checkpoint, as torchrun starts them.

What they say to each other goes through the key-value store of torch.distributed, which torchrun's rendezvous
gives them, and a wait is a poll: it may be as long as another rank needs for its files, and yet ends at once
when a rank fails. Weights go through the file system, which all ranks share.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from neuzip.errors import NeuzipError, UsageError

from .verify import OnBytes
from .workers import default_jobs

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT = 0.5
"""Seconds between two signs of life."""

SILENCE = 120
"""Beats of this rank without one of another after which that one counts as dead."""

JOINING = 600
"""Seconds in which all ranks must have begun."""

GRACE = 1.0
"""Seconds by which a rank outlives the one that failed: torchrun ends them all when the first one ends."""

ANSWER = 60
"""Seconds that the store may take for an answer."""

CHUNK = 1 << 20
"""Bytes of one value in the store, which takes no more than 8 MB."""

SLACK = 1.2
"""The most that one rank's files may take of an even share; a file that is too much is split among all."""

T = TypeVar("T")
K = TypeVar("K")

_GO_ON = "what is finished is kept: the same command goes on where it stopped, with any number of ranks"


class AnotherRankFailed(NeuzipError):
    """Another rank has failed and says why: nothing is left to say here."""


class Channel:
    """Counters and values that all ranks see. Raises NeuzipError when the store has gone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gone = False

    def add(self, counter: str, n: int) -> int:
        """Add to a counter; what it has come to."""
        return self._ask(lambda: self._store.add(counter, n))

    def put(self, key: str, value: object) -> None:
        """Leave a value of any size."""
        data = zlib.compress(pickle.dumps(value), 1)
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        for i, part in enumerate([str(len(parts)).encode(), *parts]):
            self._ask(lambda i=i, part=part: self._store.set(f"{key}/{i}", part))  # type: ignore[misc]

    def get(self, key: str) -> Any:
        """A value that is there."""
        parts = range(1, 1 + int(self._ask(lambda: self._store.get(f"{key}/0"))))
        data = b"".join(self._ask(lambda i=i: self._store.get(f"{key}/{i}")) for i in parts)  # type: ignore[misc]
        return pickle.loads(zlib.decompress(data))

    def wait(self, counter: str, n: int) -> None:
        """Wait until a counter has come to `n`."""
        pause = 0.002
        while self.add(counter, 0) < n:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def _ask(self, question: Callable[[], T]) -> T:
        """What the store answers. A thread asks: nothing interrupts a call to a machine that has died."""
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        if not self._gone:
            threading.Thread(target=ask, name="neuzip-ask", daemon=True).start()
        try:
            return answer.result(0 if self._gone else ANSWER)
        except (RuntimeError, FutureTimeoutError) as error:
            self._gone = True
            reason = _first_line(error) if isinstance(error, RuntimeError) else "no answer"
            raise NeuzipError(f"torchrun's rendezvous at {_address()} has gone: {reason}", _GO_ON) from error


class Ranks:
    """The processes of a run: `world` of them, of which this is `rank`. By default it is the only one.

    All ranks must make the same calls in the same order.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, on_this_machine: int = 1, channel: Channel | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.counted = 0
        """Bytes of weights that this rank has done."""
        self.on_bytes: OnBytes | None = None
        self._on_this_machine = on_this_machine
        self._channel = channel
        self._calls = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns the workspace and speaks."""
        return self.rank == 0

    @property
    def jobs(self) -> int:
        """This rank's part of the processors."""
        return max(1, default_jobs() // self._on_this_machine)

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self._channel is None:
            return [value]
        call = self._next_call()
        self._channel.put(f"{call}/{self.rank}", value)
        self._channel.add(call, 1)
        self._channel.wait(call, self.world)
        return [self._channel.get(f"{call}/{rank}") for rank in range(self.world)]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._channel is not None:
            call = self._next_call()
            self._channel.add(call, 1)
            self._channel.wait(call, self.world)

    def on_first(self, function: Callable[[], T]) -> T:
        """What `function` gives on rank 0, the only one to call it, for all ranks."""
        if self._channel is None:
            return function()
        call = self._next_call()
        if self.is_first:
            value = function()
            self._channel.put(call, value)
            self._channel.add(call, 1)
            return value
        self._channel.wait(call, 1)
        result: T = self._channel.get(call)
        return result

    def first_before_others(self, function: Callable[[], T]) -> T:
        """What `function` gives here; the other ranks call it when rank 0 has done so."""
        if not self.is_first:
            self.barrier()
        value = function()
        if self.is_first:
            self.barrier()
        return value

    def counting(self, on_bytes: OnBytes) -> OnBytes:
        """What to tell of weights done on this rank, so that rank 0's `on_bytes` is told of those of all."""
        if self.is_first:
            self.on_bytes = on_bytes
            return on_bytes
        return self._count

    def _count(self, nbytes: int) -> None:
        self.counted += nbytes

    def _next_call(self) -> str:
        self._calls += 1
        return f"call/{self._calls}"


ALONE = Ranks()


def share_out(sizes: Mapping[str, int], world: int) -> tuple[list[list[str]], list[str]]:
    """Which files each rank does alone, and which all do together, each in the order of `sizes`.

    The largest first, to the rank with the least; what would give one more than its share is for all.
    """
    loads = [0] * world
    owner: dict[str, int] = {}
    for file in sorted(sizes, key=lambda f: (-sizes[f], f)):
        rank = loads.index(min(loads))
        if world == 1 or loads[rank] + sizes[file] <= SLACK * sum(sizes.values()) / world:
            owner[file] = rank
            loads[rank] += sizes[file]
    alone = [[f for f in sizes if owner.get(f) == rank] for rank in range(world)]
    return alone, [f for f in sizes if f not in owner]


def split(sizes: Mapping[K, int], loads: list[int]) -> list[set[K]]:
    """A part for each rank, beside the `loads` that it has: the largest first, to the one with the least."""
    loads = list(loads)
    parts: list[set[K]] = [set() for _ in loads]
    for key in sorted(sizes, key=lambda k: -sizes[k]):  # stable, so the same on all ranks
        rank = loads.index(min(loads))
        parts[rank].add(key)
        loads[rank] += sizes[key]
    return parts


def started_by_torchrun() -> bool:
    """Whether the environment says that this is one of several processes."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and {"RANK", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone. For the main thread.

    When the block fails on one rank it ends on all: with the error there, with AnotherRankFailed elsewhere.
    Raises NeuzipError when a rank does not begin, dies, or cannot be reached.
    """
    if not started_by_torchrun():
        yield ALONE
        return
    ranks, channel = _join()
    watch = _Watch(ranks, channel)
    before = signal.signal(signal.SIGTERM, watch.on_signal)
    try:
        watch.start()
        yield ranks
        ranks.barrier()
    except BaseException as failure:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _is_first_to_fail(channel):
            time.sleep(GRACE)
            raise AnotherRankFailed("another rank has failed") from failure
        if isinstance(failure, _Stopped):
            raise failure.reason from failure
        raise
    else:
        watch.stop()
        _leave(ranks, channel)
    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _join() -> tuple[Ranks, Channel]:
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not 0 <= rank < world or on_this_machine < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            "RANK, WORLD_SIZE and LOCAL_WORLD_SIZE do not say which of how many processes this is",
            "start the command with torchrun; or unset WORLD_SIZE to run one process",
        ) from None
    # A store that closes would have torch print its C++ stack over our own message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOINING)))
    except (RuntimeError, ValueError) as error:
        raise NeuzipError(
            f"rank {rank} cannot reach the others at {_address()}: {_first_line(error)}",
            "start the command with torchrun; or unset WORLD_SIZE to run one process",
        ) from error
    # torchrun may keep its store when it starts the ranks again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    channel = Channel(PrefixStore(f"neuzip/{attempt}", store))
    return Ranks(rank, world, on_this_machine, channel), channel


def _leave(ranks: Ranks, channel: Channel) -> None:
    """The last to leave is rank 0, which may be the one that holds the store."""
    channel.add("left", 1)
    deadline = time.monotonic() + SILENCE * BEAT
    while ranks.is_first and channel.add("left", 0) < ranks.world and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_first_to_fail(channel: Channel) -> bool:
    """Say that this rank has failed. Without a store, one rank of every machine is the first."""
    try:
        return channel.add("failed", 1) == 1
    except NeuzipError:
        return os.environ.get("LOCAL_RANK", "0") == "0"


class _Stopped(BaseException):
    """Ends the block wherever it is. No Exception: nothing on the way may take it for an error of its own."""

    def __init__(self, reason: NeuzipError) -> None:
        super().__init__(reason.message)
        self.reason = reason


class _Watch:
    """A thread that gives signs of life, looks for those of others, and ends the block when they fail."""

    def __init__(self, ranks: Ranks, channel: Channel) -> None:
        self._ranks = ranks
        self._channel = channel
        self._main = threading.get_ident()
        self._ending: NeuzipError | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neuzip-watch", daemon=True)
        # Rank 0 watches all others, who watch rank 0: for each its signs, and the beats since the last one.
        self._signs = dict.fromkeys(range(1, ranks.world) if ranks.is_first else [0], 0)
        self._since = dict.fromkeys(self._signs, 0)
        self._passed_on = 0

    def start(self) -> None:
        """Begin to watch, with a first sign: from now on silence counts."""
        self._sign()
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._leaving.set()
        self._thread.join(timeout=2 * BEAT)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """End the block: torchrun stops the other ranks when one has died, and so does this thread."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped(
            self._ending
            or NeuzipError("stopped by SIGTERM, most likely because another rank has died", _GO_ON)
        )

    def _run(self) -> None:
        try:
            while self._ending is None and not self._leaving.wait(BEAT):
                self._ending = self._beat()
        except NeuzipError as gone:
            self._ending = gone
        if self._ending is not None and not self._leaving.is_set():
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _sign(self) -> None:
        self._channel.add(f"alive/{self._ranks.rank}", 1)

    def _beat(self) -> NeuzipError | None:
        ranks, channel = self._ranks, self._channel
        self._sign()
        counted = ranks.counted
        total = channel.add("bytes", 0 if ranks.is_first else counted - self._passed_on)
        if ranks.on_bytes is not None:
            ranks.on_bytes(total - self._passed_on)
        self._passed_on = total if ranks.is_first else counted
        if channel.add("failed", 0):
            return AnotherRankFailed("another rank has failed")
        for peer, signs in self._signs.items():
            self._signs[peer] = channel.add(f"alive/{peer}", 0)
            self._since[peer] = 0 if self._signs[peer] > signs else self._since[peer] + 1
            if self._since[peer] > (SILENCE if signs else JOINING / BEAT):
                return NeuzipError(
                    f"rank {peer} has given no sign of life for {self._since[peer] * BEAT:.0f} s", _GO_ON
                )
        return None


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '?')}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
