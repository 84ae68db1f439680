"""Tables that fit the window of a terminal, and that are as wide as they must be in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from typing import Literal

from neuzip.cli.text import printable

SEPARATED = 2
"""Spaces between two columns of a table."""

FOLDED = 50
"""Characters of a name for which spare columns give way."""

NARROW = 10
"""Characters to which text is folded before figures are."""


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
