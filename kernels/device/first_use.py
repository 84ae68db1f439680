"""The check of a GPU at its first use in a process: a card that computes wrong results is refused.

    check_first_use("packed products", device, is_right)

An operation calls this where the host waits anyway, or before its first launch. `is_right` launches what the
operation launches, so that no kernel is compiled for the check, and compares the result with the CPU's. The
check runs once for each operation and device of a process. The environment variable NEUZIP_GPU_CHECK=0
switches it off. `neuzip doctor` is the long form.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from neuzip.errors import NeuzipError

DEVICE_TYPES = {"cuda"}
"""Types of devices that are checked. Tests add "cpu", where Triton's interpreter is what computes."""

_passed: set[tuple[str, torch.device]] = set()
"""Operations that have passed, or are not checked, by device."""

_running: set[tuple[str, torch.device]] = set()
"""Checks that the holder of the lock is in: their own launches are not checked."""

_lock = threading.RLock()


class WrongResults(NeuzipError):
    """A GPU computes other results than the CPU."""


def is_checked(operation: str, device: torch.device) -> bool:
    """Whether an operation needs no check on a device: it has passed, or is not checked."""
    return (operation, device) in _passed


def check_first_use(operation: str, device: torch.device, is_right: Callable[[], bool]) -> None:
    """Raise WrongResults where the first use of an operation on a device shows that results are wrong.

    Nothing is checked while the current stream is captured for a CUDA graph, which forbids to wait: the next
    use is checked then. Other threads wait for a check that runs.
    """
    key = operation, device
    if key in _passed:
        return
    if device.type not in DEVICE_TYPES or os.environ.get("NEUZIP_GPU_CHECK") == "0":
        _passed.add(key)
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if key in _passed or key in _running:
            return
        _running.add(key)
        try:
            if not is_right():
                raise wrong_results(operation, device)
            _passed.add(key)
        finally:
            _running.discard(key)


def wrong_results(operation: str, device: torch.device) -> WrongResults:
    """The error for a device whose results of an operation are wrong."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
    return WrongResults(
        f"{card} ({device}): {operation} gives other results than on the CPU, so the GPU is not used",
        "`neuzip doctor` shows which operations fail; NEUZIP_GPU_CHECK=0 uses the GPU all the same",
    )
