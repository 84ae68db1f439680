"""The one place that writes to the terminal. Results go to stdout, everything else to stderr.

A command speaks in all three modes at once and each mode keeps its part:

    human   text, tables, status lines, a progress bar when a person watches
    json    one object on stdout
    quiet   one path or number a line on stdout
    silent  nothing: another process speaks for this one
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Literal

from neuzip.cli.command_run import RUN
from neuzip.cli.document import print_document
from neuzip.cli.progress import (
    SMOOTHED,
    Advance,
    WorkProgress,
    bar_columns,
    is_silenced,
    person_watches,
    printed_lines,
)
from neuzip.cli.table import render_table
from neuzip.cli.text import folded, printable
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_MESSAGE = 1000

Mode = Literal["human", "json", "quiet", "silent"]


class Output:
    """The sink of one command."""

    def __init__(self, *, json: bool = False, quiet: bool = False, silent: bool = False) -> None:
        if json and quiet:
            raise UsageError("--json and --quiet exclude each other", "leave one of them out")
        self.mode: Mode = "silent" if silent else "json" if json else "quiet" if quiet else "human"
        self._finished = False
        self._live: Console | None = None
        self._told = False

    @property
    def watched(self) -> bool:
        """Whether something may move on the screen: a person is watching."""
        return self.mode == "human" and person_watches()

    def text(self, line: str = "") -> None:
        """Say a line of the result (human only)."""
        if self.mode == "human":
            print(folded(printable(line), sys.stdout))

    @contextmanager
    def stream(self) -> Iterator[Callable[[str], None]]:
        """Give a function that says text of the result as it comes; a line end follows it (human only)."""
        wrote = False

        def write(text: str) -> None:
            nonlocal wrote
            if self.mode == "human":
                wrote = True
                print(printable(text), end="", flush=True)

        try:
            yield write
        finally:
            if wrote:
                print(flush=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        right: Collection[str] = (),
        total: Sequence[object] | None = None,
        title: str = "",
        spare: Sequence[str] = (),
    ) -> list[str]:
        """Show a table (human only). `right` names columns to align right; `total` is a last row.

        `spare` names columns that a narrow window does without, the least useful first; these are returned,
        for `wider`.
        """
        if self.mode != "human":
            return []
        if title:
            print(folded(printable(title), sys.stdout))
        text, left_out = render_table(columns, rows, right=right, total=total, spare=spare)
        print(text, end="")
        return left_out

    def wider(self, left_out: Sequence[str]) -> None:
        """Say which columns a wider window would show, if a table had no room for them."""
        if left_out:
            self.hint(f"a wider window shows {', '.join(left_out)} too, and a pipe shows everything")

    def result(self, data: Mapping[str, object], quiet: Iterable[object] = ()) -> None:
        """Give what a machine reads, once a command: `data` as the JSON object, or the lines of `quiet`.

        The keys of `data` are those that `neuzip.cli.schema` lists for the command.
        """
        if self._finished:
            raise RuntimeError("a command has one result")
        self._finished = True
        if self.mode == "json":
            print_document(data)
        elif self.mode == "quiet":
            for line in quiet:
                print(printable(str(line), one_line=True))

    def status(self, message: str) -> None:
        """Say what is going on (stderr, human only)."""
        if self.mode == "human":
            self._say(message)

    def loading(self) -> None:
        """Say that libraries are loaded, which takes seconds in which nothing else is said (who watches)."""
        if self.watched and "torch" not in sys.modules:
            self._say("loading PyTorch ...")

    def hint(self, message: str) -> None:
        """Say what could be done next (stderr, human only)."""
        if self.mode == "human":
            self._say(f"hint: {message}")

    def warning(self, message: str, hint: str = "") -> None:
        """Say what is odd (stderr, all modes but silent)."""
        if self.mode == "silent":
            return
        self._say(f"warning: {message}")
        if hint:
            self._say(f"hint: {hint}")

    @contextmanager
    def progress(self, label: str, total: int | None, *, unit: str = "bytes") -> Iterator[Advance]:
        """Show a bar while the block runs and give it a function that adds to it; any thread may call that.

        Nothing moves unless a person is watching; in a pipe or a log a line says every now and then how far
        it is, and about how long the rest takes. `total` is None when it is not known.
        """
        if self._live is not None or self._told or self.mode != "human" or is_silenced():
            yield lambda amount: None
            return
        if not self.watched:
            self._told = True
            try:
                with printed_lines(WorkProgress(label, total, unit)) as advance:
                    yield advance
            finally:
                self._told = False
            return

        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        with Progress(
            *bar_columns(unit, total), console=console, transient=True, speed_estimate_period=SMOOTHED
        ) as bar:
            task = bar.add_task(printable(label), total=total)
            self._live = console
            try:
                # `update`, as `advance` would count work that is taken back as a negative speed.
                yield lambda amount: bar.update(task, advance=amount)
            finally:
                self._live = None

    def stage(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """`progress` of one of several pieces of work, as the library asks for it."""
        return self.progress(label, total, unit=unit)

    def _say(self, message: str) -> None:
        message = RUN.translate(message)
        if self._live is not None:  # above the bar, not through it
            self._live.print(folded(printable(message), sys.stderr), soft_wrap=True)
        else:
            print(folded(printable(message), sys.stderr), file=sys.stderr)


def error(
    message: str,
    hint: str = "",
    *,
    kind: str = "NeuzipError",
    exit_code: int = 1,
    verbatim: bool = False,
) -> None:
    """Say why it failed and what to do about it: on stderr, and under --json on stdout too.

    A `verbatim` message quotes a file or another library, so that names in backquotes are no parameters.

    `kind` is the class of the error. What a command answered before it failed stays the one object on stdout.
    """
    message, hint = _bounded(message if verbatim else RUN.translate(message)), _bounded(RUN.translate(hint))
    print(folded(f"error: {message}", sys.stderr), file=sys.stderr)
    if hint:
        print(folded(f"hint: {hint}", sys.stderr), file=sys.stderr)
    if RUN.json and not RUN.answered:
        problem = {"kind": kind, "message": message, "hint": hint or None, "exit_code": exit_code}
        try:
            print_document({"error": problem})
            sys.stdout.flush()  # an interrupted run ends without the flush at exit
        except OSError:  # the reader has gone or the disk is full, and Python would complain again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _bounded(text: str) -> str:
    """One line of bearable length: a message may quote what a hostile file holds."""
    from neuzip.formats.hub.secrets import scrubbed

    line = printable(scrubbed(text), one_line=True)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 3]}..."


def open_closed_streams() -> bool:
    """Let nothing stand where a shell has closed a stream (`>&-`), and say whether stdout was open.

    Python has None for such a stream, and the next file that is opened would get its number.
    """
    had_stdout = sys.stdout is not None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
    return had_stdout


def make_streams_forgiving() -> None:
    """Show a character that the terminal's encoding lacks as an escape instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
