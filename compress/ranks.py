"""Several processes at work on one checkpoint, as torchrun starts them.

What they say to each other goes through the key-value store of torch.distributed, which torchrun's rendezvous
gives them, and a wait is a poll: it may be as long as another rank needs for its files, and yet ends at once
when a rank fails. Weights go through the file system, which all ranks share.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from neuzip.errors import NeuzipError

from .progress import OnBytes
from .workers import default_jobs

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ANSWER = 60
"""Seconds that the store may take for an answer."""

CHUNK = 1 << 20
"""Bytes of one value in the store, which takes no more than 8 MB."""

T = TypeVar("T")

RESUME_HINT = "what is finished is kept: the same command goes on where it stopped, with any number of ranks"


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
            reason = first_line(error) if isinstance(error, RuntimeError) else "no answer"
            raise NeuzipError(
                f"torchrun's rendezvous at {address()} has gone: {reason}", RESUME_HINT
            ) from error


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


def address() -> str:
    """Where the store of the ranks is."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '?')}"


def first_line(error: Exception) -> str:
    """The first line of an error of torch, or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
