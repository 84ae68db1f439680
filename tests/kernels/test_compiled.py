"""Loops compile where there is no place to keep the result, and many processes can keep theirs at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import IndexDataCacheFile
from triton import knobs
from triton.runtime.cache import get_cache_manager

from neuzip.kernels.device import compiled, triton_cache

LOOP = """
import sys, time
import numpy as np
from numba.core.caching import IndexDataCacheFile
from neuzip.kernels.device.compiled import compiled

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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("file", ["_save_index", "_save_data"])
def test_a_cache_that_takes_nothing(
    file: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop runs all the same, and no index is left that names data which is not there."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    double = compiled.compiled(lambda x: 2 * x)
    monkeypatch.setattr(IndexDataCacheFile, file, refuse)
    assert double(21) == 42
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_other_errors_of_a_cache_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_save_index", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        compiled.compiled(lambda x: 2 * x)(21)


@pytest.mark.parametrize("call", ["makedirs", "replace"])
def test_a_full_cache_of_triton_is_left_for_another_folder(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch compiles is read from files again: they stand elsewhere, and only there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    real = getattr(os, call)
    code = errno.ENOSPC

    def full(*paths: Any, **options: Any) -> None:
        if str(paths[-1]).startswith(str(tmp_path)):
            raise OSError(code, os.strerror(code))
        real(*paths, **options)

    monkeypatch.setattr(os, call, full)
    before, knobs.cache.manager_class = knobs.cache.manager_class, None
    triton_cache.make_optional()
    try:
        manager = get_cache_manager("ab" * 32)
        group = {name: manager.put(name.encode(), name) for name in ("k.cubin", "k.json")}
        manager.put_group("k.json", group)
        assert manager.get_group("k.json") == group
        assert [Path(path).read_bytes() for path in group.values()] == [b"k.cubin", b"k.json"]
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
        code = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            get_cache_manager("cd" * 32).put(b"", "k.cubin")
    finally:
        knobs.cache.manager_class = before


@pytest.mark.slow
def test_processes_that_compile_at_once_do_not_mix_up_their_results(tmp_path: Path) -> None:
    """Three dtypes compiled at the same moment, then read back: each process finds its own."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    dtypes = ["u1", "u2", "u8"]
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
