"""Devices of torch that a caller names."""

from __future__ import annotations

from typing import Any, get_args

import torch

from neuzip.choices import DeviceMap
from neuzip.compress.device import AnyDevice, named
from neuzip.errors import UsageError

DEVICE_MAPS = get_args(DeviceMap)
"""Words for device maps that accelerate computes."""


def place_of(device: Any) -> torch.device:
    """One device by its name or number; None is the CPU. Raises UsageError for one that torch has not."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    try:
        place = torch.device("cpu" if device is None else f"cuda:{device}" if is_number else device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"`device={device!r}`: torch knows no such device",
            f"give 'cpu', 'cuda', 'cuda:1', the number of a GPU, or a device map:"
            f" {', '.join(map(repr, DEVICE_MAPS))}",
        ) from error
    require_place(place)
    return place


def require_place(place: torch.device) -> None:
    """Raise UsageError for a GPU that torch does not find."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        devices = f"{count} CUDA device{'' if count == 1 else 's'}" if count else "no CUDA device"
        raise UsageError(f"`device={str(place)!r}`: torch finds {devices}", "give another, or `device='cpu'`")


def choose_device(device: AnyDevice) -> torch.device:
    """Where a model shall run: "auto" is a GPU if torch finds one. Raises UsageError for one that is not."""
    option, has_cuda = named(device), torch.cuda.is_available()
    if option == "cpu" or (option == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise UsageError(f"`device={option!r}`: torch finds no CUDA device", "use `device='cpu'`")
    from neuzip.kernels.device.release import require_triton

    require_triton()
    from neuzip.kernels.device.triton_cache import make_optional

    make_optional()
    if option.startswith("cuda:"):
        place = torch.device(option)
        require_place(place)
        return place
    return torch.device("cuda", torch.cuda.current_device())
