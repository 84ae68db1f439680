"""Ranks as torchrun starts them: they find each other, watch each other, and all end when one fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from neuzip.errors import NeuzipError, UsageError

from .ranks import ALONE, RESUME_HINT, Channel, Ranks, address, first_line

BEAT = 0.5
"""Seconds between two signs of life."""

SILENCE = 120
"""Beats of this rank without one of another after which that one counts as dead."""

JOINING = 600
"""Seconds in which all ranks must have begun."""

GRACE = 1.0
"""Seconds by which a rank outlives the one that failed: torchrun ends them all when the first one ends."""


class AnotherRankFailed(NeuzipError):
    """Another rank has failed and says why: nothing is left to say here."""


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
            f"rank {rank} cannot reach the others at {address()}: {first_line(error)}",
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
            or NeuzipError("stopped by SIGTERM, most likely because another rank has died", RESUME_HINT)
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
                    f"rank {peer} has given no sign of life for {self._since[peer] * BEAT:.0f} s", RESUME_HINT
                )
        return None
