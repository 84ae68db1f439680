"""How far a piece of work is: a bar where a person watches, a line every half minute elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from neuzip.cli.text import bytes_text, printable, rough_text, seconds_text

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

EVERY = 30.0
"""Seconds between two lines of progress where no bar can move: in a pipe, or a log."""

BASIS = 0.01
"""The share of a piece of work after which the time that the rest takes is estimated."""

SMOOTHED = 300.0
"""Seconds whose mean speed a bar's estimate goes by: some tensors take a minute each, others come at once."""

Advance = Callable[[int], None]


def person_watches() -> bool:
    return sys.stderr.isatty() and not is_silenced() and os.environ.get("TERM") != "dumb"


def is_silenced() -> bool:
    return os.environ.get("NEUZIP_NO_PROGRESS", "") not in ("", "0")


class WorkProgress:
    """How far a piece of work is, and what to say of it. `clock` gives seconds."""

    def __init__(
        self, label: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._total, self._unit = printable(label), total, unit
        self._clock, self._began = clock, clock()
        self._done, self._lock = 0, Lock()

    def advance(self, amount: int) -> None:
        """Add to what is done; any thread may."""
        with self._lock:
            self._done += amount

    @property
    def line(self) -> str:
        """Where it is now."""
        after, done, total = self._clock() - self._began, self._done, self._total
        far = f"{self._label}: {done_text(done, total, self._unit)} after {seconds_text(after)}"
        if total is None or not done or done < BASIS * total:
            return far
        if done >= total:
            return f"{far}, finishing"
        return f"{far}, {remaining_text(after * (total - done) / done)}"


@contextmanager
def printed_lines(work: WorkProgress) -> Iterator[Advance]:
    """Say on stderr how far some work is, EVERY so many seconds, from a thread of its own."""
    ended = Event()

    def tell() -> None:
        with suppress(OSError, ValueError):  # stderr was closed
            while not ended.wait(EVERY):
                print(work.line, file=sys.stderr, flush=True)

    teller = Thread(target=tell, name="neuzip-progress", daemon=True)
    teller.start()
    try:
        yield work.advance
    finally:
        ended.set()
        teller.join()


def done_text(done: int, total: int | None, unit: str) -> str:
    """How far something is, in words."""
    if not done:
        return "at work"
    if unit == "bytes":
        return bytes_text(done) if total is None else f"{bytes_text(done)} of {bytes_text(total)}"
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


def left_text(done: float, total: float, seconds: float, speed: float | None) -> str:
    """How long the rest of some work takes, by the `speed` of late, or else by the whole work so far.

    >>> [left_text(done, 4, 20.0, speed) for done, speed in ((0, 1.0), (1, None), (1, 0.01), (4, 1.0))]
    ['', 'about 1 min left', 'about 5 min left', 'finishing']
    >>> left_text(1, 4, 20.0, 1.0)
    'under 10 s left'
    """
    if not done or done < BASIS * total or not seconds:
        return ""
    if done >= total:
        return "finishing"
    return remaining_text((total - done) / (speed or done / seconds))


def remaining_text(seconds: float) -> str:
    """How long something still takes, in words."""
    return "under 10 s left" if seconds < 10 else f"about {rough_text(seconds)} left"


def bar_columns(unit: str, total: int | None) -> list[ProgressColumn | str]:
    """What a bar shows: how far, and how long the rest takes; without a total, the time so far."""
    from rich import progress
    from rich.table import Column
    from rich.text import Text

    # Only the bar gives way in a narrow window: a second line would flicker.
    def whole() -> Column:
        return Column(no_wrap=True)

    class Left(progress.ProgressColumn):
        max_refresh = 0.5

        def render(self, task: progress.Task) -> Text:
            return Text(left_text(task.completed, task.total or 0, task.elapsed or 0.0, task.speed))

    head: list[ProgressColumn | str] = [
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=30),
    ]
    if total is None:
        if unit != "bytes":
            head += [progress.TextColumn("{task.completed:,.0f}"), unit]
        return [*head, progress.TimeElapsedColumn()]
    middle: list[ProgressColumn | str] = (
        [progress.DownloadColumn(table_column=whole()), progress.TransferSpeedColumn(table_column=whole())]
        if unit == "bytes"
        else [progress.MofNCompleteColumn(table_column=whole()), unit]
    )
    return [*head, progress.TaskProgressColumn(), *middle, Left(table_column=whole())]
