"""The one place that writes to the terminal. Results go to stdout, everything else to stderr.

A command speaks in all three modes at once and each mode keeps its part:

    human   text, tables, status lines, a progress bar when a person watches
    json    one object on stdout
    quiet   one path or number a line on stdout
    silent  nothing: another process speaks for this one
"""

from __future__ import annotations

import json as json_module
import math
import os
import re
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from io import StringIO, TextIOWrapper
from os import PathLike
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Literal, TextIO

from neuzip.cli.flags import in_options
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

SCHEMA = 2
"""The version of the keys in neuzip.cli.schema, which no command reads: describing them takes milliseconds.

It goes up when a key changes its name, its type or its meaning; a new key leaves it as it is.
"""

LONGEST_MESSAGE = 1000

SEPARATED = 2
"""Spaces between two columns of a table."""

FOLDED = 50
"""Characters of a name for which spare columns give way."""

NARROW = 10
"""Characters to which text is folded before figures are."""

EVERY = 30.0
"""Seconds between two lines of progress where no bar can move: in a pipe, or a log."""

BASIS = 0.01
"""The share of a piece of work after which the time that the rest takes is estimated."""

SMOOTHED = 300.0
"""Seconds whose mean speed a bar's estimate goes by: some tensors take a minute each, others come at once."""

_LABEL = re.compile(r" *(?:\S+(?: \S+)? {2,})?")
"""What stands in front of the words of a line."""

_COMMAND = re.compile(r"(?!\w+: neuzip )(.*:) (neuzip \S.*)")
"""A line that ends in a command."""

Mode = Literal["human", "json", "quiet", "silent"]
Advance = Callable[[int], None]


@dataclass
class Call:
    """One run of the command line: its verb, and whether `--json` was given and has been answered."""

    command: str | None = None
    json: bool = False
    answered: bool = False


CALL = Call()
"""The run that this process is in."""


def begin(command: str | None, *, json: bool) -> None:
    """Say which command runs from now on."""
    CALL.command, CALL.json, CALL.answered = command, json, False


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
        return self.mode == "human" and _person_watches()

    def text(self, line: str = "") -> None:
        """Say a line of the result (human only)."""
        if self.mode == "human":
            print(folded(printable(line), sys.stdout))

    @contextmanager
    def stream(self) -> Iterator[Callable[[str], None]]:
        """Give a function that says text of the result as it comes; a line end follows it (human only)."""
        said = False

        def write(text: str) -> None:
            nonlocal said
            if self.mode == "human":
                said = True
                print(printable(text), end="", flush=True)

        try:
            yield write
        finally:
            if said:
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
            _answer(data)
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
        if self._live is not None or self._told or self.mode != "human" or _silenced():
            yield lambda amount: None
            return
        if not self.watched:
            self._told = True
            try:
                with _lines(Course(label, total, unit)) as advance:
                    yield advance
            finally:
                self._told = False
            return

        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        with Progress(
            *_progress_columns(unit, total), console=console, transient=True, speed_estimate_period=SMOOTHED
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
        message = in_options(message)
        if self._live is not None:  # above the bar, not through it
            self._live.print(folded(printable(message), sys.stderr), soft_wrap=True)
        else:
            print(folded(printable(message), sys.stderr), file=sys.stderr)


def error(message: str, hint: str = "", *, kind: str = "NeuzipError", exit_code: int = 1) -> None:
    """Say why it failed and what to do about it: on stderr, and under --json on stdout too.

    `kind` is the class of the error. What a command answered before it failed stays the one object on stdout.
    """
    message, hint = _bounded(message), _bounded(hint)
    print(folded(f"error: {message}", sys.stderr), file=sys.stderr)
    if hint:
        print(folded(f"hint: {hint}", sys.stderr), file=sys.stderr)
    if CALL.json and not CALL.answered:
        told = {"kind": kind, "message": message, "hint": hint or None, "exit_code": exit_code}
        try:
            _answer({"error": told})
            sys.stdout.flush()  # an interrupted run ends without the flush at exit
        except OSError:  # the reader has gone or the disk is full, and Python would complain again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _answer(data: Mapping[str, object]) -> None:
    """Print the one object of a run under --json."""
    from neuzip import __version__

    CALL.answered = True
    envelope = {"schema": SCHEMA, "neuzip": __version__, "command": CALL.command}
    print(json_module.dumps({**envelope, **plain(data)}, indent=2, allow_nan=False))


def _bounded(text: str) -> str:
    """One line of bearable length: a message may quote what a hostile file holds."""
    from neuzip.formats.hub.secrets import scrubbed

    line = printable(scrubbed(in_options(text)), one_line=True)
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


def printable(text: str, one_line: bool = False) -> str:
    r"""Escape what could move the cursor or reorder the line: anyone may have written the names in a file.

    `one_line` also escapes line ends and tabs, which would make one entry look like two.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or (char in "\n\t" and not one_line) or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def folded(text: str, stream: TextIO) -> str:
    """Break lines between words where a terminal would break them anywhere; in a pipe lines stay whole.

    What follows a label and two spaces is lined up. A command at the end of a line gets a line of its own and
    stays whole, so that it can be copied.
    """
    if not stream.isatty():
        return text
    width = _columns(stream)
    return "\n".join(part for line in text.split("\n") for part in fold(line, width))


def fold(line: str, width: int) -> list[str]:
    """One line as lines of at most `width` characters, unless a word is longer.

    >>> fold("peak    12.3 MB of memory", 20)
    ['peak    12.3 MB of', '        memory']
    >>> fold("CPU codec  in vector registers", 24)
    ['CPU codec  in vector', '           registers']
    >>> fold("hint: try it: neuzip verify my-model", 20)
    ['hint: try it:', '  neuzip verify my-model']
    >>> fold("hint: neuzip reads folders", 20)
    ['hint: neuzip reads', 'folders']
    """
    if len(line) <= width:
        return [line]
    command = _COMMAND.fullmatch(line)
    if command is not None:
        return [*fold(command[1], width), f"  {command[2]}"]
    label = _LABEL.match(line)
    indent = len(label[0]) if label is not None and len(label[0]) <= width // 2 else 0
    return textwrap.wrap(
        line, width, subsequent_indent=" " * indent, replace_whitespace=False, expand_tabs=False,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _columns(stream: TextIO) -> int:
    """The width of a terminal: COLUMNS, or what the terminal says."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def plain(value: Any) -> Any:
    """Turn a value into what JSON knows: dataclasses become objects, paths strings, NaN and infinity null.

    >>> plain({"loss": float("inf"), "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def render_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    total: Sequence[object] | None = None,
    spare: Sequence[str] = (),
) -> tuple[str, list[str]]:
    """Lay out a table: its text, and which of `spare` it leaves out.

    On a terminal it fits the window: columns are left out, then text is folded, figures only if nothing else
    helps. In a pipe every line is as long as it must be.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    unknown = {*right, *spare} - set(columns)
    if unknown:
        raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
    terminal = sys.stdout.isatty()
    lines = [[printable(str(cell), one_line=True) for cell in row] for row in rows]
    last = None if total is None else [printable(str(cell)) for cell in total]
    page = _Page()
    console = Console(
        file=page,
        force_terminal=terminal,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if terminal else 1_000_000,
    )
    every = [*lines, *([last] if last is not None else [])]
    widths = {
        name: max([len(name), *(len(line[at]) for line in every)]) + SEPARATED
        for at, name in enumerate(columns)
    }
    for name in set(columns) - set(right):
        widths[name] = min(widths[name], FOLDED + SEPARATED)
    left_out: list[str] = []
    for name in spare if terminal else ():
        if sum(widths.values()) - SEPARATED <= console.width:
            break
        left_out.append(name)
        del widths[name]
    needed = (width if name in right else min(width, NARROW) for name, width in widths.items())
    whole = sum(needed) - SEPARATED <= console.width
    shown = [at for at, name in enumerate(columns) if name not in left_out]
    table = Table(
        box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), show_footer=last is not None
    )
    for at in shown:
        name = columns[at]
        justify: Literal["left", "right"] = "right" if name in right else "left"
        footer = "" if last is None else last[at]
        table.add_column(
            printable(name), footer, justify=justify, overflow="fold", no_wrap=whole and name in right
        )
    for line in lines:
        table.add_row(*(line[at] for at in shown))
    console.print(table, width=None if terminal else console.measure(table).maximum)
    text = page.getvalue().splitlines()
    return "".join(f"{line if terminal else line.rstrip()}\n" for line in text), left_out


class _Page(StringIO):
    """Text in memory that names the encoding of stdout: rich draws its lines with ASCII where it must."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding or "utf-8"


def bytes_text(count: float) -> str:
    """Write a number of bytes in decimal units.

    >>> [bytes_text(n) for n in (0, 999, 1000, 26_214_400, 3.2e12)]
    ['0 B', '999 B', '1.00 kB', '26.2 MB', '3.20 TB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def count_text(count: int, noun: str) -> str:
    """Write how many of something there are.

    >>> [count_text(n, "file") for n in (0, 1, 1234)]
    ['0 files', '1 file', '1,234 files']
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent_text(part: float, whole: float) -> str:
    """Write a share in percent.

    >>> percent_text(2, 3), percent_text(1, 0)
    ('66.67 %', '-')
    """
    return f"{100 * part / whole:.2f} %" if whole else "-"


def seconds_text(seconds: float) -> str:
    """Write a duration.

    >>> [seconds_text(s) for s in (0.0421, 9.87, 75, 7384)]
    ['0.04 s', '9.9 s', '1 min 15 s', '2 h 3 min']
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rough_text(seconds: float) -> str:
    """Write an estimated duration: no finer than it is known.

    >>> [rough_text(s) for s in (0.5, 31, 59, 75, 171, 3570, 7384)]
    ['10 s', '40 s', '1 min', '1 min', '3 min', '1 h', '2 h 3 min']
    """
    if seconds <= 50:
        return f"{max(1, math.ceil(seconds / 10)) * 10} s"
    minutes = max(1, round(seconds / 60))
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def _person_watches() -> bool:
    return sys.stderr.isatty() and not _silenced() and os.environ.get("TERM") != "dumb"


def _silenced() -> bool:
    return os.environ.get("NEUZIP_NO_PROGRESS", "") not in ("", "0")


class Course:
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
        far = f"{self._label}: {_far(done, total, self._unit)} after {seconds_text(after)}"
        if total is None or not done or done < BASIS * total:
            return far
        if done >= total:
            return f"{far}, finishing"
        return f"{far}, {_left(after * (total - done) / done)}"


@contextmanager
def _lines(course: Course) -> Iterator[Advance]:
    """Say on stderr how far something is, EVERY so many seconds, from a thread of its own."""
    ended = Event()

    def tell() -> None:
        with suppress(OSError, ValueError):  # stderr was closed
            while not ended.wait(EVERY):
                print(course.line, file=sys.stderr, flush=True)

    teller = Thread(target=tell, name="neuzip-progress", daemon=True)
    teller.start()
    try:
        yield course.advance
    finally:
        ended.set()
        teller.join()


def _far(done: int, total: int | None, unit: str) -> str:
    """How far something is, in words."""
    if not done:
        return "at work"
    if unit == "bytes":
        return bytes_text(done) if total is None else f"{bytes_text(done)} of {bytes_text(total)}"
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


def left_text(done: float, total: float, seconds: float, speed: float | None) -> str:
    """How long the rest of some work takes, by the `speed` of late, or else by the whole course so far.

    >>> [left_text(done, 4, 20.0, speed) for done, speed in ((0, 1.0), (1, None), (1, 0.01), (4, 1.0))]
    ['', 'about 1 min left', 'about 5 min left', 'finishing']
    >>> left_text(1, 4, 20.0, 1.0)
    'under 10 s left'
    """
    if not done or done < BASIS * total or not seconds:
        return ""
    if done >= total:
        return "finishing"
    return _left((total - done) / (speed or done / seconds))


def _left(seconds: float) -> str:
    """How long something still takes, in words."""
    return "under 10 s left" if seconds < 10 else f"about {rough_text(seconds)} left"


def _progress_columns(unit: str, total: int | None) -> list[ProgressColumn | str]:
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
