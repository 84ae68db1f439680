"""What safetensors' own writer says of a disk, in the words of all other writers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .workspace import writing


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """`writing`, for what safetensors writes too: it has an error of its own for a disk that is full."""
    try:
        with writing(path):
            yield
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        with writing(path):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
