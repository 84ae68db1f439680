"""Names of transformers, replaced for a while: functions of its registries, and attributes of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def registered(registry: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have transformers find a function under a name: that of attention, or of masks, of this process.

    What is registered for all stays; what stood above it before stands there again afterwards.
    """
    before = registry._local_mapping.get(name)
    registry[name] = function
    try:
        yield
    finally:
        if before is None:
            del registry[name]
        else:
            registry[name] = before


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have `owner.name` be what `change` makes of it."""
    before = getattr(owner, name)
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
