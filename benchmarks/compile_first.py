"""Compile kernels side by side before anything is timed.

Within a process Triton compiles one kernel after the other. Several processes, each with a part of the work,
fill Triton's cache on disk in a fraction of the time, and the process that measures reads from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CORES_A_PROCESS = 2
"""Cores that a process which compiles keeps busy: itself and ptxas."""


def processes() -> int:
    """How many processes can compile at once."""
    return max(1, len(os.sched_getaffinity(0)) // CORES_A_PROCESS)


def run_side_by_side(script: str, parts: Sequence[Sequence[str]]) -> float:
    """Run a script once for the arguments of each part, as many at once as cores allow; seconds it took.

    A part that fails prints its error and is left: what it did not compile is compiled when it is measured.
    """
    began = time.perf_counter()
    at_once = min(len(parts), processes())
    with ThreadPoolExecutor(at_once) as pool:
        failed = sum(pool.map(lambda part: _run(script, part), parts))
    seconds = time.perf_counter() - began
    print(
        f"compiled in {seconds:.0f} s by {len(parts)} processes, {at_once} at a time; {failed} failed",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return seconds


def _run(script: str, arguments: Sequence[str]) -> bool:
    """Whether a process failed."""
    process = subprocess.run(
        [sys.executable, script, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if process.returncode:
        print(f"{' '.join(arguments)}:\n{process.stderr[-2000:]}", file=sys.stderr, flush=True)
    return process.returncode != 0
