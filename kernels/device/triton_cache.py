"""Triton's cache of compiled kernels, which a launch can do without."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from neuzip.errors import FULL_OR_CLOSED


def make_optional() -> None:
    """Let kernels run where Triton's cache cannot be written, unless it has a manager of somebody else."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = OptionalCache


class OptionalCache(FileCacheManager):  # type: ignore[misc]
    """Files of one kernel: in Triton's folder, or if that is full or closed in one of this process.

    Triton reads what it has compiled from files, so there have to be some.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError as error:
            self.key = key
            self._move_away(error)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write a file of the kernel; its path."""
        try:
            return str(super().put(data, filename, binary))
        except OSError as error:
            for half in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(half, ignore_errors=True)
            self._move_away(error)
            return str(super().put(data, filename, binary))

    def _move_away(self, error: OSError) -> None:
        spare = str(_spare_folder() / self.key)
        if error.errno not in FULL_OR_CLOSED or getattr(self, "cache_dir", None) == spare:
            raise error
        self.cache_dir, self.lock_path = spare, os.path.join(spare, "lock")
        os.makedirs(spare, exist_ok=True)


@functools.cache
def _spare_folder() -> Path:
    """A folder that goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="neuzip-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
