"""Kernels compiled side by side, by threads, before their first launch: a prefetch of compilation.

    prefetch = compile_ahead(launches, device)

`launches` call the functions that launch kernels, with tensors on the meta device, which stands for
`device`: so what is compiled and what is launched cannot disagree. Triton's compiler holds Python's lock for
about a fifth of its time only. A launch that comes before its kernel has been compiled waits for that; a
kernel that is in Triton's cache is read from there.

No launch depends on it. What fails here fails again in the launch, or is compiled there.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

MOST_THREADS = 16
"""Threads that compile, at most: a model needs some 20 kernels."""


_SUBMITTING = threading.Lock()
"""Held by who finds out what to compile, so that nothing is compiled twice."""


class KernelPrefetch:
    """What a call of `compile_ahead` does: `launched` kernels, of which the cache lacked `compiled`."""

    def __init__(self) -> None:
        self.launched = 0
        self.compiled = 0
        self.error: Exception | None = None
        """What went wrong, if anything did: for tests and for those who wonder why a launch compiles."""

        self._ended = threading.Event()

    def _try(self, launch: Callable[[], object]) -> None:
        try:
            launch()
        except (
            Exception
        ) as error:  # of Triton's compiler, of a driver, of a disk: the launch itself reports it
            self.error = self.error or error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is compiled; whether it is."""
        return self._ended.wait(seconds)


def compile_ahead(
    launches: Sequence[Callable[[], object]],
    device: torch.device,
    note: Callable[[str], None] = lambda remark: None,
) -> KernelPrefetch:
    """Compile what `launches` launch on the meta device, for the GPU `device`, and return at once.

    If one of them fails, the others are compiled all the same. `note` is given one line if the cache lacks a
    kernel, from another thread.
    """
    prefetch = KernelPrefetch()
    thread = threading.Thread(
        target=_run, args=(prefetch, launches, device, note), name="neuzip-compile-ahead", daemon=True
    )
    thread.start()
    return prefetch


def _run(
    prefetch: KernelPrefetch,
    launches: Sequence[Callable[[], object]],
    device: torch.device,
    note: Callable[[str], None],
) -> None:
    workers = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    try:
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            ThreadPoolExecutor(workers, thread_name_prefix="neuzip-compile") as pool,
            _Counted(_Compilers(pool), prefetch),
        ):
            with _SUBMITTING:
                for launch in launches:
                    prefetch._try(launch)
            if prefetch.compiled:
                note(_remark(prefetch.compiled, workers))
    except Exception as error:
        prefetch.error = prefetch.error or error
    finally:
        prefetch._ended.set()


def _remark(kernels: int, workers: int) -> str:
    what = "1 GPU kernel" if kernels == 1 else f"{kernels} GPU kernels"
    how = f", {workers} at a time" if kernels > workers > 1 else ""
    return f"compiling {what}{how}; once a machine, as Triton's cache keeps them"


class _Counted(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode in which launches of its thread leave the compiler to an executor, and are counted."""

    def __init__(self, executor: Executor, prefetch: KernelPrefetch) -> None:
        super().__init__(executor, ignore_errors=True)
        self._prefetch = prefetch

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """What stands for a kernel until it is compiled. `key` is that of Triton's cache."""
        if key not in self.future_kernels:
            self._prefetch.launched += 1
            self._prefetch.compiled += not _is_cached(key)
        return super().submit(key, compile_fn, finalize_fn)


def _is_cached(key: str) -> bool:
    """Whether Triton's cache has the kernel of a key: False for a cache that is no folder."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    folder = getattr(manager, "cache_dir", None)
    return folder is not None and any(Path(folder).glob("__grp__*.json"))


class _Compilers(Executor):
    """Threads that compile kernels, and what Triton needs to launch them."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A kernel, once it is compiled."""
        kernel = _CompiledLater(fn)
        self._pool.submit(kernel.compile, self._pool)
        return kernel


class _CompiledLater(Future[Any]):
    """A kernel that a thread compiles. Where that fails, who asks for it compiles it, and gets that error."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile_kernel = compile_kernel

    def compile(self, pool: Executor) -> None:
        """Compile, in a thread of `pool`; not when the process ends, which would wait for it."""
        try:
            pool.submit(int)  # raises RuntimeError then
            kernel = self._compile_kernel()
            with suppress(Exception):  # Triton 3.6 compiles C for each signature, which its cache keeps, too
                driver.active.launcher_cls(kernel.src, kernel.metadata)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(kernel)

    def result(self, timeout: float | None = None) -> Any:
        """The kernel, after a wait of `timeout` seconds at most."""
        try:
            return super().result(timeout)
        except TimeoutError:
            raise
        except Exception:
            return self._compile_kernel()
