"""What compiling kernels needs of the machine: a C compiler, and folders that keep what was compiled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from neuzip.runtime.doctor.finding import Finding


def folder_findings(has_gpu: bool) -> Iterator[Finding]:
    """The C compiler and Triton's cache, which only a GPU needs, and the cache of numba."""
    if has_gpu:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is not None and shutil.which(compiler) is not None:
            yield Finding("folders", "C compiler", "ok", compiler)
        else:
            yield Finding(
                "folders", "C compiler", "problem",
                f"CC={compiler} is not there" if compiler else "neither gcc nor clang is on the PATH: Triton "
                "compiles its launchers with one",
                "install gcc, or set CC to a C compiler",
            )  # fmt: skip
        yield cache_finding(
            "Triton cache", triton_cache(), "TRITON_CACHE_DIR", "every process compiles all GPU kernels anew"
        )
    yield cache_finding(
        "numba cache", numba_cache(), "NUMBA_CACHE_DIR", "every process compiles the CPU codec anew"
    )


def triton_cache() -> Path:
    """The folder of Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def numba_cache() -> Path | None:
    """The folder where numba keeps neuzip's loops; None where it has found none."""
    from neuzip.kernels.rans import cpu

    cache = getattr(cpu.decode, "_cache", None)
    path = getattr(cache, "cache_path", None)
    return None if path is None else Path(path)


def cache_finding(name: str, folder: Path | None, variable: str, effect: str) -> Finding:
    """Whether a cache can be written: a note where not, as neuzip works without it."""
    if folder is not None and is_writable(folder):
        return Finding("folders", name, "ok", str(folder))
    text = (
        f"no folder can be written: {effect}" if folder is None else f"{folder} cannot be written: {effect}"
    )
    return Finding("folders", name, "note", text, f"set {variable} to a folder that can be written")


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the nearest folder above it that there is."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
