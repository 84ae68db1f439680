"""Options that exclude each other, as a table that a command looks through once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from neuzip.errors import UsageError


@dataclass(frozen=True)
class Exclusion:
    """Two options that exclude each other, and what to do instead of giving both."""

    option: str
    other: str
    hint: str


def refuse_excluded(exclusions: Iterable[Exclusion], options: Collection[str]) -> None:
    """Raise UsageError for the first pair of which both are among `options`, those that were given.

    >>> refuse_excluded([Exclusion("--a", "--b", "leave out --b")], {"--a", "--c"})
    >>> refuse_excluded([Exclusion("--a", "--b", "leave out --b")], {"--a", "--b"})
    Traceback (most recent call last):
      ...
    neuzip.errors.UsageError: --a and --b exclude each other
    """
    for pair in exclusions:
        if pair.option in options and pair.other in options:
            raise UsageError(f"{pair.option} and {pair.other} exclude each other", pair.hint)
