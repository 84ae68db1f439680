"""How loops are compiled for the CPU: by numba, without the GIL, kept for the next start if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop; only for this run where neither the package's folder nor a cache can be written."""
    compiler: Callable[..., Callable[..., Any]]
    try:
        compiler = njit(nogil=True, cache=True)
        return compiler(function)
    except RuntimeError:  # numba found no place for its cache; NUMBA_CACHE_DIR names one
        compiler = njit(nogil=True)
        return compiler(function)
