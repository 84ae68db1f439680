"""Kernels compiled as they are launched, for a card of compute capability 9.0 that need not be there.

    compile_only.watch(see)                     in a process of its own, for which Triton's interpreter is off
    compile_only.instructions(code, pattern)    what `see` finds in the machine code
    compile_only.said_by(script, folder, cache) that process, from a test

The driver has a name only: nothing runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from forked import NO_COLLECTOR
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Card:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def watch(see: Callable[[Any, Any, dict[str, Any]], None]) -> None:
    """From now on launches compile, and `see` gets the function, what was made of it, and the keywords."""
    driver.set_active(Card())
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        code = run(self, *args, grid=grid, warmup=True, **kwargs)
        see(self, code, kwargs)
        return code

    JITFunction.run = compile_only


def instructions(code: Any, pattern: str) -> list[str]:
    """The names of machine instructions that match a pattern whole, in their order in a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\b({pattern})\b", sass)


def said_by(script: str, folder: Path, cache: Path | None = None) -> str:
    """What a script prints, run in a folder.

    Triton keeps in `cache` what it compiles, or else in the folder. The key covers the sources, the
    arguments, the options and the versions of Triton and ptxas: only unchanged kernels are read from there.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache or folder)
    paths = str(Path(__file__).parent), environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    said = subprocess.run(
        [sys.executable, "-P", "-c", NO_COLLECTOR + script],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    return said.stdout
