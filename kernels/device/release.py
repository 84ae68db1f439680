"""Whether the Triton that is installed can compile the kernels."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from neuzip.errors import NeuzipError

TRITON = (3, 6)
"""The lowest version with all that the kernels use: torch 2.10 is the first release that brings it."""


def unfit_triton() -> str | None:
    """Why Triton, as it is installed, cannot compile the kernels; None if it can."""
    try:
        there = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    if tuple(map(int, re.findall(r"\d+", there)[:2])) >= TRITON:
        return None
    return f"Triton {there} is installed, and {'.'.join(map(str, TRITON))} or newer is needed"


def require_triton() -> None:
    """Raise NeuzipError where Triton cannot compile the kernels."""
    if (problem := unfit_triton()) is not None:
        raise NeuzipError(f"the kernels for a GPU cannot be compiled: {problem}", HINT)


HINT = "install a CUDA build of torch 2.10 or newer, which brings it; or work on the CPU"
