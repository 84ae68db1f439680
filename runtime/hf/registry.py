"""Functions of transformers' registries, replaced for a while."""

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
