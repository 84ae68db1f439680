"""How every Triton and Gluon kernel is launched: one at a time, on the device of its tensors, PDL or not.

Kernels take two compile-time constants from here. COMPILED says that a GPU runs them and not Triton's
interpreter, which has no inline PTX. USE_PDL says that they call `gdc_wait` (programmatic dependent launch).

The code for the CPU does not import this module, and needs no Triton: importing it raises NeuzipError where
the installed Triton is too old.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from neuzip.kernels.device.properties import has_pdl
from neuzip.kernels.device.release import require_triton

require_triton()

import triton  # noqa: E402

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

    options  the kernel's constants, num_warps, num_stages, maxnreg, enable_fp_fusion
    pdl      True for programmatic dependent launch where the card has it, False for none; with either the
             kernel gets USE_PDL. None for kernels without that constant
    """
    if pdl is not None:
        options["USE_PDL"] = options["launch_pdl"] = pdl and uses_pdl(kernel, device)
    if device.type == "meta":
        if is_compiled(kernel):
            kernel.run(*arguments, grid=grid, warmup=True, **options)
        return
    with LAUNCHING, _guard(device):  # `launching`, without what that costs the host
        kernel.run(*arguments, grid=grid, warmup=False, **options)
