"""Loops compile where there is no place to keep the result, and many processes can keep theirs at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neuzip.kernels import compiled

LOOP = """
import sys, time
import numpy as np
from numba.core.caching import IndexDataCacheFile
from neuzip.kernels.compiled import compiled

@compiled
def total(values):
    result = 0
    for i in range(values.size):
        result += values[i]
    return result

load = IndexDataCacheFile._load_index
def slowly(self):  # so that all processes have read the index before one writes it
    index = load(self)
    time.sleep(0.5)
    return index
IndexDataCacheFile._load_index = slowly

dtype = np.dtype(sys.argv[1])
sys.stdin.readline()
assert total(np.ones(7, dtype)) == 7
"""


def test_no_place_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiled, "LockedCache", refuse)
    double = compiled.compiled(lambda x: 2 * x)
    assert double(21) == 42


@pytest.mark.slow
def test_processes_that_compile_at_once_do_not_mix_up_their_results(tmp_path: Path) -> None:
    """Four dtypes compiled at the same moment, then read back: each process finds its own."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    dtypes = ["u1", "u2", "u4", "u8"]
    for _ in range(2):
        running = [
            subprocess.Popen([sys.executable, str(script), dtype], stdin=subprocess.PIPE, env=environment)
            for dtype in dtypes
        ]
        for process in running:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()
        for process in running:
            process.wait()
        assert [process.returncode for process in running] == [0] * len(dtypes)
    kept = list((tmp_path / "cache").rglob("*.nbc"))
    assert len(kept) == len(dtypes)
