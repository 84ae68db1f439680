"""Warnings of the library on the command line: one line on stderr, without a place in the code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def as_lines(say: Callable[[str], None]) -> Iterator[None]:
    """Context in which warnings of neuzip's own classes go to `say`; Python shows the others."""
    shown = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if category.__module__.partition(".")[0] == "neuzip":
            say(str(message))
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
