"""Work of several threads that is done in lists: which items share one, and what happens when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from neuzip.compress.workers import Gathering

PATIENCE = 60
"""Seconds after which a test that hangs fails."""


class Bench:
    """A gathering that notes its lists. A list that has an item with a gate ends when that is open."""

    def __init__(self, *gates: str, list_bytes: int = 100, starts: bool = False) -> None:
        self.lists: list[list[str]] = []
        self.gates = {name: threading.Event() for name in gates}
        self.begun = {name: threading.Event() for name in gates}
        self._starts = starts
        self.gathering: Gathering[str, str] = Gathering(self._work, list_bytes)

    def _work(self, items: Sequence[str], started: Callable[[], None]) -> list[str]:
        self.lists.append(list(items))
        if self._starts:
            started()
        for name in self.gates.keys() & set(items):
            self.begun[name].set()
            assert self.gates[name].wait(PATIENCE)
        if "bad" in items:
            raise ValueError(f"{len(items)} items")
        return [item.upper() for item in items]

    def wait_for(self, waiting: int) -> None:
        """Wait until so many items wait for a list to start."""
        until = time.monotonic() + PATIENCE
        while len(self.gathering._waiting) < waiting and time.monotonic() < until:
            time.sleep(0.001)

    @contextmanager
    def waiting(self, items: Sequence[tuple[str, str, int]]) -> Iterator[list[Future[str]]]:
        """Results to come of items, with kinds and bytes, all of which wait for the list "first" to end."""
        with ThreadPoolExecutor(len(items) + 2) as pool:
            try:
                first = pool.submit(self.gathering.result_of, "first", "a", 1)
                assert self.begun["first"].wait(PATIENCE)
                futures = [pool.submit(self.gathering.result_of, *item) for item in items]
                self.wait_for(len(items))
                yield futures
                self.gates["first"].set()
                assert first.result(PATIENCE) == "FIRST"
            finally:
                for gate in self.gates.values():
                    gate.set()


def test_items_that_come_while_a_list_is_started_are_the_next_list() -> None:
    bench = Bench("first")
    with bench.waiting([(name, "a", 1) for name in "pqrs"]) as futures:
        assert bench.lists == [["first"]]
    assert [future.result() for future in futures] == ["P", "Q", "R", "S"]
    first, second = bench.lists
    assert (first, sorted(second)) == (["first"], ["p", "q", "r", "s"])


def test_a_list_has_one_kind_and_at_most_so_many_bytes() -> None:
    bench = Bench("first", list_bytes=10)
    items = [("p", "a", 6), ("q", "b", 6), ("r", "a", 4), ("s", "a", 1), ("large", "a", 11)]
    with bench.waiting(items) as futures:
        pass
    assert [future.result() for future in futures] == ["P", "Q", "R", "S", "LARGE"]
    sizes = {name: nbytes for name, _, nbytes in items}
    kinds = {name: kind for name, kind, _ in items}
    for together in bench.lists[1:]:
        assert len({kinds[name] for name in together}) == 1
        assert sum(sizes[name] for name in together) <= 10 or together == ["large"]
    assert sorted(name for together in bench.lists for name in together) == sorted([*sizes, "first"])


def test_the_next_list_starts_while_the_first_one_is_waited_for() -> None:
    bench = Bench("first", starts=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(bench.gathering.result_of, "first", "a", 1)
        assert bench.begun["first"].wait(PATIENCE)
        assert bench.gathering.result_of("second", "a", 1) == "SECOND"
        assert not first.done()
        bench.gates["first"].set()
        assert first.result(PATIENCE) == "FIRST"


def test_no_thread_of_a_list_waits_for_the_next_one_to_start() -> None:
    bench = Bench("first", "p", "third")
    with bench.waiting([(name, "a", 1) for name in "pqrs"]) as futures, ThreadPoolExecutor(1) as pool:
        bench.gates["first"].set()
        assert bench.begun["p"].wait(PATIENCE)
        third = pool.submit(bench.gathering.result_of, "third", "a", 1)
        bench.wait_for(1)
        bench.gates["p"].set()
        assert bench.begun["third"].wait(PATIENCE)
        assert [future.result(PATIENCE) for future in futures] == ["P", "Q", "R", "S"]
        assert not third.done()
        bench.gates["third"].set()
        assert third.result(PATIENCE) == "THIRD"
    assert [len(together) for together in bench.lists] == [1, 4, 1]


def test_a_failure_is_that_of_its_list_alone() -> None:
    bench = Bench("first")
    with bench.waiting([("bad", "a", 1), ("p", "a", 1), ("q", "b", 1)]) as (bad, beside, other):
        pass
    for future in bad, beside:
        with pytest.raises(ValueError, match="2 items"):
            future.result()
    assert other.result() == "Q"
    assert bench.gathering.result_of("again", "a", 1) == "AGAIN"
