"""How jobs tell of their progress: functions that count bytes, and stages that show them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

OnBytes = Callable[[int], None]
Stage = Callable[[str, int], AbstractContextManager[OnBytes]]
"""stage(label, nbytes): shows how far a piece of work is; gives the function that moves it."""


def ignore(_: int) -> None:
    """Report no progress."""


def unseen(label: str, total: int, unit: str = "bytes") -> AbstractContextManager[OnBytes]:
    """A `Stage` that shows nothing."""
    return nullcontext(ignore)
