"""How every Triton and Gluon kernel is launched: one at a time, on the device of its tensors, PDL or not.

Kernels take two compile-time constants from here. COMPILED says that a GPU runs them and not Triton's
interpreter, which has no inline PTX. USE_PDL says that they call `gdc_wait` (programmatic dependent launch).

The code for the CPU does not import this module, and needs no Triton: importing it raises NeuzipError where
the installed Triton is too old.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from neuzip.kernels.device.properties import has_pdl
from neuzip.kernels.device.release import require_triton

require_triton()

import triton  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from neuzip.kernels.device.start import (  # noqa: E402
    Start,
    argument_kinds,
    start_of,
    triton_arguments,
    with_named,
)

_STARTS: dict[Any, Start] = {}
"""How kernels that have been launched start, by kernel, device, kinds of arguments, and options."""

LAUNCHING = threading.Lock()
"""Held during a launch, as the first launch of a kernel compiles it, which two threads cannot do at once."""


@functools.cache
def _guard(device: torch.device) -> Any:
    """Makes a CUDA device the current one. It keeps the one before, so only the holder of the lock enters."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


class launching:  # noqa: N801  (a context manager, named as the standard library names them)
    """Context for launches on `device`: the current CUDA device is that one, and no other thread launches.

    It is not reentrant: `launch` within it waits for ever.
    """

    __slots__ = ("_guard",)

    def __init__(self, device: torch.device) -> None:
        self._guard = _guard(device)

    def __enter__(self) -> None:
        LAUNCHING.acquire()
        try:
            self._guard.__enter__()
        except BaseException:
            LAUNCHING.release()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._guard.__exit__(*error)
        finally:
            LAUNCHING.release()


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel is compiled for a GPU; else Triton's interpreter runs it, or a test's stand-in."""
    return isinstance(kernel, triton.JITFunction)


def uses_pdl(kernel: Any, device: torch.device) -> bool:
    """Whether `launch(..., pdl=True)` starts a kernel before its predecessor in the stream has ended."""
    return isinstance(kernel, triton.JITFunction) and has_pdl(device)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    device: torch.device,
    pdl: bool | None = None,
    **options: Any,
) -> None:
    """Launch a kernel on a grid of programs, on the current stream of `device`; on "meta" only compile it.

    arguments  tensors, parts of their memory (`MemoryPart`), numbers, None, and TMA descriptors:
               `BoxedTensor`, or Triton's own
    options    other arguments, the kernel's constants, num_warps, num_stages, maxnreg, enable_fp_fusion
    pdl        True for programmatic dependent launch where the card has it, False for none; with either the
               kernel gets USE_PDL. None for kernels without that constant
    """
    _add_pdl(options, kernel, device, pdl)
    if not isinstance(kernel, triton.JITFunction):
        _run(kernel, grid, arguments, device, options)
        return
    arguments = with_named(kernel, arguments, options)
    kinds: list[Any] = [id(kernel), device]
    values: list[Any] = []
    start = key = None
    if argument_kinds(arguments, kinds, values) and not _is_observed(kernel):
        key = (*kinds, *options.items())
        start = _STARTS.get(key)
    if start is not None:
        _start(start, grid, device, values)
    elif (start := _run(kernel, grid, arguments, device, options)) is not None and key is not None:
        _STARTS[key] = start


FREE: Any = type("Free", (), {"__repr__": lambda _: "FREE"})()
"""An argument of a `PreparedLaunch` that comes with each call."""


class PreparedLaunch:
    """Launches of a kernel whose options and most arguments do not change.

    Arguments that are FREE come with each call, in their order. Fixed tensors stay where they are in memory.
    `launch` explains the others. A call costs the host about half of what `launch` costs.
    """

    def __init__(
        self, kernel: Any, *arguments: Any, device: torch.device, pdl: bool | None = None, **options: Any
    ) -> None:
        _add_pdl(options, kernel, device, pdl)
        if isinstance(kernel, triton.JITFunction):
            arguments = with_named(kernel, arguments, options)
        self._kernel, self._device, self._options, self._arguments = kernel, device, options, arguments
        self._free = [at for at, one in enumerate(arguments) if one is FREE]
        self._starts: dict[Any, Start] = {}
        self._values: list[Any] = []
        fixed = [None if one is FREE else one for one in arguments]
        self._is_fast = isinstance(kernel, triton.JITFunction) and argument_kinds(fixed, [], self._values)

    def __call__(self, grid: tuple[int, ...], *free: Any) -> None:
        """Launch it on a grid of programs with the values of its free arguments."""
        kinds: list[Any] = []
        own: list[Any] = []
        start = key = None
        if self._is_fast and argument_kinds(free, kinds, own) and not _is_observed(self._kernel):
            key = tuple(kinds)
            start = self._starts.get(key)
        if start is not None:
            values = self._values.copy()
            for at, value in zip(self._free, own, strict=True):
                values[at] = value
            _start(start, grid, self._device, values)
            return
        arguments = [*self._arguments]
        for at, argument in zip(self._free, free, strict=True):
            arguments[at] = argument
        start = _run(self._kernel, grid, arguments, self._device, self._options)
        if start is not None and key is not None:
            self._starts[key] = start


def _add_pdl(options: dict[str, Any], kernel: Any, device: torch.device, pdl: bool | None) -> None:
    if pdl is not None:
        options["USE_PDL"] = options["launch_pdl"] = pdl and uses_pdl(kernel, device)


def _start(start: Start, grid: tuple[int, ...], device: torch.device, values: list[Any]) -> None:
    """Start a compiled kernel on the current stream of a device."""
    active = driver.active
    current = active.get_current_device()
    if current == device.index or device.type != "cuda":
        start(grid, active.get_current_stream(current), values)
    else:
        with LAUNCHING, _guard(device):
            start(grid, active.get_current_stream(device.index), values)


def _run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    device: torch.device,
    options: dict[str, Any],
) -> Start | None:
    """Let Triton or its interpreter launch a kernel: how that starts again, if it can without Triton."""
    if device.type == "meta":
        if is_compiled(kernel):
            kernel.run(*triton_arguments(arguments), grid=grid, warmup=True, **options)
        return None
    with LAUNCHING, _guard(device):  # `launching`, without what that costs the host
        compiled = kernel.run(*triton_arguments(arguments), grid=grid, warmup=False, **options)
        return start_of(kernel, compiled, len(arguments), options)


def _is_observed(kernel: Any) -> bool:
    """Whether somebody, such as a profiler, wants to see launches, or to have others than the usual ones."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        runtime.debug
        or kernel.pre_run_hooks
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )
