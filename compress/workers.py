"""Threads for the kernels, which release the GIL."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def default_jobs() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Items of an iterator, each begun while the one before it is still in use."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="neuzip-ahead") as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]


class Workers:
    """A pool of `jobs` threads with an ordered, bounded map: a few results wait, never all of them."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or default_jobs()
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="neuzip")

    @property
    def waiting(self) -> int:
        """How many results may wait."""
        return 2 * self.jobs + 4

    def submit(self, function: Callable[[T], R], item: T) -> Future[R]:
        """Begin with one item, when a thread is free."""
        return self._pool.submit(function, item)

    def map(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        """Results in the order of `items`, which are taken only a little ahead of them."""
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(self._pool.submit(function, item))
                if len(pending) > self.waiting:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(eq=False)
class _Entry(Generic[T, R]):
    """An item that waits to be worked on, and the promise of its result."""

    item: T
    kind: Hashable
    nbytes: int
    result: Future[R] = field(default_factory=Future)


class Gathering(Generic[T, R]):
    """Work of several threads, done in lists: while one list is started, the items of the next one gather.

    `work(items, started)` returns the results of a list in order. The thread whose item is the first of the
    list runs it, and the other threads wait for their results. When `work` calls `started`, or ends, another
    thread may start the next list. Items of a list have one kind, and together at most `list_bytes`; a larger
    item is a list of its own. A thread waits with one item, so a list has at most as many items as there are
    threads.
    """

    def __init__(
        self, work: Callable[[Sequence[T], Callable[[], None]], Sequence[R]], list_bytes: int
    ) -> None:
        self._work = work
        self._list_bytes = list_bytes
        self._changed = threading.Condition()
        self._is_starting = False
        self._waiting: list[_Entry[T, R]] = []

    def result_of(self, item: T, kind: Hashable, nbytes: int) -> R:
        """The result of an item. Raises what `work` raises for the list that the item is in."""
        entry: _Entry[T, R] = _Entry(item, kind, nbytes)
        with self._changed:
            self._waiting.append(entry)
            self._changed.wait_for(lambda: entry not in self._waiting or not self._is_starting)
            together = self._taken(entry) if entry in self._waiting else []
            self._is_starting |= bool(together)
        if together:
            self._do(together)
        return entry.result.result()

    def _taken(self, first: _Entry[T, R]) -> list[_Entry[T, R]]:
        """The list that an item begins, which waits no longer."""
        together, room = [first], self._list_bytes - first.nbytes
        for entry in self._waiting:
            if entry is not first and entry.kind == first.kind and entry.nbytes <= room:
                together.append(entry)
                room -= entry.nbytes
        self._waiting = [entry for entry in self._waiting if entry not in together]
        return together

    def _do(self, together: Sequence[_Entry[T, R]]) -> None:
        """Work on a list, and hand out the results, or what was raised."""
        with ExitStack() as turn:
            turn.callback(self._let_next_start)
            try:
                results = self._work([entry.item for entry in together], turn.close)
            except BaseException as error:
                for entry in together:
                    entry.result.set_exception(error)
                return
        for entry, result in zip(together, results, strict=True):
            entry.result.set_result(result)

    def _let_next_start(self) -> None:
        with self._changed:
            self._is_starting = False
            self._changed.notify_all()
