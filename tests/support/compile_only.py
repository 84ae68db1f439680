"""Kernels compiled as they are launched, for a card of compute capability 9.0 that need not be there.

    compile_only.watch(see)                     in a process of its own, for which Triton's interpreter is off
    compile_only.instructions(code, pattern)    what `see` finds in the machine code
    compile_only.unused_memory(code)            shared memory that no partition is given
    compile_only.said_by(script, folder, cache) such a process, from a test

The driver has a name only: nothing runs.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class Card:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def watch(see: Callable[[Any, Any, dict[str, Any]], None], once: bool = False) -> None:
    """From now on launches compile, and `see` gets the function, what was made of it, and the keywords.

    With `once` one kernel of Triton and one of Gluon are compiled; of the others `see` gets the `hash` only.
    """
    driver.set_active(Card())
    if once:
        triton.compiler.compile = _compile_once()
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


def unused_memory(code: Any) -> set[str]:
    """Shared memory that a compiled kernel allocates and gives to no partition of `gl.warp_specialize`.

    Triton may place there what it passes to the partitions, without ordering the two writes.
    """
    before, specialize, after = code.asm["ttgir"].partition("ttg.warp_specialize(")
    assert specialize, "the kernel has no partitions"
    given, _, _ = after.partition(")")
    return set(re.findall(r"(%\w+) = ttg[.]local_alloc", before)) - set(given.split(", "))


def _compile_once() -> Callable[..., Any]:
    """Triton's compiler, which makes no more than the hash of all kernels of a language but its first."""
    hashes: dict[type, str] = {}
    compile_kernel = triton.compiler.compile

    def compile_once(src: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        backend = make_backend(target)
        parsed = backend.parse_options(options | src.parse_options())
        key = get_cache_key(src, backend, parsed, env_vars=get_cache_invalidating_env_vars())
        name = hashlib.sha256(key.encode()).hexdigest()
        if hashes.setdefault(type(src), name) != name:
            return SimpleNamespace(hash=name)
        kernel = compile_kernel(src, target=target, options=options)
        assert kernel.hash == name
        return kernel

    return compile_once


@functools.cache
def _compilers() -> forked.Server:
    """Forks the processes of scripts, for as long as tests run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = str(Path(__file__).parent), environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    server = forked.Server(forked.COMPILER, environment)
    forked.SERVERS.append(server)
    atexit.register(server.close)
    return server


def said_by(script: str, folder: Path, cache: Path | None = None) -> str:
    """What a script prints, run in a folder, by a process that is forked.

    Triton keeps in `cache` what it compiles, or else in the folder. The key covers the sources, the
    arguments, the options and the versions of Triton and ptxas: only unchanged kernels are read from there.
    """
    file = folder / "script.py"
    file.write_text("import gc\n\ngc.disable()\n" + script, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache or folder)
    process = _compilers().start(file, cwd=folder, environment=environment)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr[-2000:]
    return stdout
