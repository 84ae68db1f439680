"""The run of the command line that this process is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def as_it_is(text: str) -> str:
    """A text in the words of the library."""
    return text


@dataclass
class CommandRun:
    """One run of the command line: its verb, and whether `--json` was given and has been answered.

    `translate` puts what the library says into the words of the command line.
    """

    command: str | None = None
    json: bool = False
    answered: bool = False
    translate: Callable[[str], str] = as_it_is


RUN = CommandRun()
"""The current run, of which there is one in a process."""


def begin(command: str | None, *, json: bool, translate: Callable[[str], str] = as_it_is) -> None:
    """Say which command runs from now on."""
    RUN.command, RUN.json, RUN.answered, RUN.translate = command, json, False, translate
