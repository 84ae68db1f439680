"""How loops are compiled for the CPU: by numba, without the GIL, kept for the next start if possible."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core.caching import FunctionCache

from neuzip.errors import FULL_OR_CLOSED

Array = TypeVar("Array", bound=npt.NDArray[np.generic])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop; only for this run where neither the package's folder nor a cache can be written."""
    dispatcher: Any = njit(nogil=True)(function)
    with suppress(RuntimeError):  # numba found no place for its cache; NUMBA_CACHE_DIR names one
        dispatcher._cache = LockedCache(function)
    return dispatcher  # type: ignore[no-any-return]


def read_only(array: Array) -> Array:
    """A view that cannot be written to: numba would compile a loop for each of the two kinds of array."""
    view: Array = array.view()
    view.flags.writeable = False
    return view


@contextmanager
def _optional() -> Iterator[None]:
    """Pass over a cache that cannot be read or written: the loop is compiled anew each time."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_OR_CLOSED:
            raise


class LockedCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, in which one process at a time writes.

    Without the lock, two processes that compile a loop for different dtypes at the same moment give both the
    same file name, and the loop for one dtype is found under the other for ever after (numba issue 10128).
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled loop for a signature, or None where the cache has none."""
        if not os.path.isdir(self.cache_path):
            return None
        loop = None
        with _optional(), self._lock(fcntl.LOCK_SH) as locked:
            if locked:
                loop = super().load_overload(sig, target_context)
        return loop

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature, if its folder can take it."""
        with _optional():
            os.makedirs(self.cache_path, exist_ok=True)
            with self._lock(fcntl.LOCK_EX) as locked:
                if locked:
                    self._save_whole(sig, data)

    def _save_whole(self, sig: Any, data: Any) -> None:
        """Keep it, or nothing: an index without its data would name what an older version has left there."""
        try:
            super().save_overload(sig, data)
        except OSError:
            with suppress(OSError):
                os.unlink(self._cache_file._index_path)
            raise

    @contextmanager
    def _lock(self, kind: int) -> Iterator[bool]:
        """Whether there is a lock: some file systems have none, and nothing is kept there."""
        folder = os.open(self.cache_path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, kind)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                yield False
            else:
                yield True
        finally:
            os.close(folder)
