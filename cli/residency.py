"""Where a model can run, and in which residency, as far as that shows before anything is loaded."""

from __future__ import annotations

from neuzip.errors import UsageError


def require_device(device: str, residency: str = "dense") -> None:
    """Raise UsageError for a GPU that is wanted, by a residency or by itself, and is not there.

    Without torch, which takes seconds to load: whether torch finds the GPU too shows when it is chosen.
    """
    if device != "cuda" and residency != "ans":
        return
    from neuzip.compress.device import driver_devices

    missing = not driver_devices()
    if residency == "ans" and (missing or device == "cpu"):
        found = "and --device is cpu" if device == "cpu" else "and NVIDIA's driver finds no device"
        raise UsageError(
            f"--residency ans: is decoded on a GPU, {found}",
            "give --residency packed, which runs on a CPU too",
        )
    if device == "cuda" and missing:
        raise UsageError("--device cuda: NVIDIA's driver finds no device", "use --device cpu")
