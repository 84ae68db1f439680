"""Runs that repeat bit by bit on a GPU: torch's deterministic algorithms, for as long as a run takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neuzip.errors import NeuzipError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Settings under which cuBLAS gives the same bits on several streams, says NVIDIA."""


@contextmanager
def deterministic_algorithms(wanted: bool = True) -> Iterator[None]:
    """Let torch use deterministic algorithms alone; do nothing unless `wanted`.

    Without them the backward pass of attention on a GPU adds up in an order that differs from run to run.
    Enter before the first product on a GPU, as cuBLAS reads its variable once. Raises NeuzipError where an
    operation of the model has no deterministic form.
    """
    if not wanted:
        yield
        return
    if os.environ.get(WORKSPACE) not in FIXED_WORKSPACES:
        os.environ[WORKSPACE] = FIXED_WORKSPACES[0]
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise NeuzipError(
            f"deterministic: {str(error).splitlines()[0]}", "train without it, or on the CPU"
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
