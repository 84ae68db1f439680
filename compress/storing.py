"""What safetensors' own writer says of a disk, in the words of all other writers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from neuzip.errors import system_error

from .workspace import writing


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """`writing`, for what safetensors writes too: it has an error of its own for a disk that is full."""
    with writing(path):
        try:
            yield
        except SafetensorError as error:
            system = system_error(error)
            if system is None:
                raise
            raise system from error
