"""Which residencies can be where a model shall run."""

from __future__ import annotations

from neuzip.errors import UsageError


def require_gpu_for(residency: str, device: str) -> None:
    """Raise UsageError for weights coded with ans where there is no GPU, before anything is read."""
    if residency != "ans":
        return
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return
    found = "and --device is cpu" if device == "cpu" else "and torch finds no CUDA device"
    raise UsageError(
        f"--residency ans: is decoded on a GPU, {found}", "give --residency packed, which runs on a CPU too"
    )
