"""Where weights are coded and decoded: on the CPU, or on a GPU. The bytes are the same.

Nothing here loads torch before a GPU is wanted and there: that takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias, Union

from neuzip.distribution import require
from neuzip.errors import UsageError
from neuzip.kernels.device.release import unfit_triton

from .pieces import PIECE

if TYPE_CHECKING:
    import torch

    from .gpu import Gpu

AnyDevice: TypeAlias = Union[str, int, "torch.device", None]
"""A device as a caller names it: "auto", "cpu", "cuda", "cuda:1", the number of a GPU, or a torch.device.

None is "auto".
"""

WORTH_STARTING = 16 << 30
"""Bytes of weights from which on a GPU saves the 3 s that it takes to start; beside 16 cores, just so."""

CAPABILITY = (8, 0)
"""The oldest kind of GPU that knows all instructions of the kernels."""

MOST_THREADS = 32
"""Threads beside a GPU, where nobody says how many: each of them holds pinned memory."""


@dataclass(frozen=True)
class Device:
    """Where the weights of a run are coded and decoded: `name` is "cpu" or "cuda:N".

    Tensors of fewer than `smallest` weights stay on the CPU, where they take less time than a launch.
    """

    name: str
    gpu: Gpu | None = None
    smallest: int = 1

    def gpu_for(self, numel: int) -> Gpu | None:
        """The GPU, if a tensor of `numel` weights goes there."""
        return self.gpu if numel >= self.smallest else None

    @property
    def piece(self) -> int:
        """Bytes of one job at least, as far as a tensor has them."""
        return self.gpu.piece if self.gpu is not None else 0

    def jobs(self, cores: int) -> int:
        """How many threads to start."""
        return min(cores, MOST_THREADS) if self.gpu is not None else cores


CPU = Device("cpu")


def named(device: AnyDevice) -> str:
    """The name of a device: "auto", "cpu", "cuda" or "cuda:N". Raises UsageError for what is no device.

    >>> named(None), named("cpu"), named(1)
    ('auto', 'cpu', 'cuda:1')
    """
    name = "auto" if device is None else str(device)
    if isinstance(device, int) and not isinstance(device, bool):
        name = f"cuda:{device}"
    match = re.fullmatch(r"(auto|cpu|cuda)|(cpu):0|(cuda:\d{1,4})", name)
    if match is None:
        raise UsageError(
            f"`device={device!r}`: is no device that neuzip knows",
            "give 'auto', 'cpu', 'cuda', 'cuda:1', the number of a GPU, or a torch.device",
        )
    return str(match[1] or match[2] or match[3])


def choose(device: AnyDevice, nbytes: int) -> Device:
    """The device for `nbytes` of weights. Under torchrun every process of a machine gets a card of its own.

    "auto" is a GPU if there is one, and enough to do for it. Raises NeuzipError for a GPU that cannot be had.
    """
    option = named(device)
    if option.startswith("cuda"):
        require(f"`device={option!r}`", "torch")
    if option == "cpu" or (option == "auto" and (nbytes < WORTH_STARTING or _missing() is not None)):
        return CPU
    problem = _missing()
    if problem is None:
        import torch

        count = torch.cuda.device_count() if torch.version.cuda is not None else 0
        rank = os.environ.get("LOCAL_RANK", "0")
        number = int(rank) % count if count and rank.isdecimal() else 0
        if option.startswith("cuda:"):
            number = int(option.removeprefix("cuda:"))
        try:
            if not count:
                problem = f"torch {torch.__version__} finds no CUDA device"
            elif number >= count:
                problem = f"torch finds {count} of them, numbered from 0"
            else:
                problem = unfit(number)
            if problem is None:
                from neuzip.kernels.device.triton_cache import make_optional

                from .gpu import Gpu

                make_optional()
                place = torch.device("cuda", number)
                return Device(str(place), Gpu(place), PIECE if option == "auto" else 1)
        except RuntimeError as error:  # a card that is taken, or lost
            problem = str(error).splitlines()[0]
    if option == "auto":
        return CPU
    raise UsageError(f"`device={option!r}`: {problem}", "give `device='cpu'`, or let `device='auto'` choose")


def _missing() -> str | None:
    """What there must be for a GPU and is not, as far as that shows without torch."""
    if not driver_devices():
        return "NVIDIA's driver finds no device"
    return "torch is not installed" if find_spec("torch") is None else unfit_triton()


def driver_devices() -> int:
    """How many devices NVIDIA's driver has; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def unfit(number: int) -> str | None:
    """Why a card cannot run the kernels, if it cannot."""
    import torch

    capability = torch.cuda.get_device_capability(number)
    if capability >= CAPABILITY:
        return None
    name = torch.cuda.get_device_name(number)
    needed = ".".join(map(str, CAPABILITY))
    return f"{name} has the compute capability {'.'.join(map(str, capability))}, and {needed} is needed"
