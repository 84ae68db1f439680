"""Threads for the kernels, which release the GIL."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

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
