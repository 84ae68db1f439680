"""Texts for a terminal: escaped, folded to its width, and figures with their units."""

from __future__ import annotations

import math
import os
import re
import textwrap
import unicodedata
from typing import TextIO

_LABEL = re.compile(r" *(?:\S+(?: \S+)? {2,})?")
"""What stands in front of the words of a line."""

_COMMAND = re.compile(r"(?!\w+: neuzip )(.*:) (neuzip \S.*)")
"""A line that ends in a command."""


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
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


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
