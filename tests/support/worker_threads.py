"""How many threads each process of the test suite computes with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_threads(environment: Mapping[str, str], cores: int, *, has_gpu: bool) -> int | None:
    """Threads of torch in a process that may run on `cores`; None: as many as torch itself chooses.

    Without a GPU one. With a GPU a worker of xdist gets its share of the cores, and a process alone all.
    """
    if not has_gpu:
        return 1
    workers = environment.get("PYTEST_XDIST_WORKER_COUNT")
    return None if workers is None else max(1, cores // int(workers))
