"""What can be asked of a model before it is loaded, and before torch is, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from neuzip.errors import UsageError
from neuzip.runtime.residencies import RESIDENCIES, compressed_on_cpu, offloading_names

SEEDS = range(-(1 << 63), 1 << 64)
"""What torch takes as a seed."""


def require_stop(strings: Sequence[str]) -> None:
    """Raise UsageError for an empty string among those that shall end a text."""
    if "" in strings:
        raise UsageError("`stop`: is empty", "give the text that ends the answer")


def require_seed(seed: int | None) -> None:
    """Raise UsageError for a seed that random numbers cannot begin with. None is no seed."""
    if seed is not None and (type(seed) is not int or seed not in SEEDS):
        raise UsageError(f"`seed={seed!r}`: is no whole number of 64 bits", "give a small number, such as 1")


def require_model(model: object) -> None:
    """Raise UsageError for a value that is no model of transformers. Imports none."""
    if not hasattr(model, "get_input_embeddings"):
        raise UsageError(f"`model={model!r}`: is no model of transformers", "give what load_model returns")


def require_quantisable(activations: str | None, residency: str) -> str | None:
    """The mode to load a model with. Raises UsageError for one that dense weights cannot have."""
    if residency != "dense":
        return activations
    if activations not in (None, "none"):
        raise UsageError(
            f"`activations={activations!r}` has no effect with `residency='dense'`",
            "add `residency='packed'`, which keeps ternary weights in 2 bits",
        )
    return None


def require_expert_memory(expert_memory: object, *residencies: str, device: str | None = None) -> None:
    """Raise UsageError for a value that is no number of bytes, or that no residency heeds. None: no limit.

    `device` is "auto", "cpu" or "cuda..." where it is known, and a CPU is refused first: no residency would
    help there.
    """
    _require_bytes("expert_memory", expert_memory)
    if expert_memory is not None and device is not None:
        _require_gpu_for_experts(expert_memory, device)
    if expert_memory is None or any(RESIDENCIES[name].offloads_experts for name in residencies):
        return
    raise UsageError(
        f"`expert_memory={expert_memory}` has no effect with {_named_residencies(residencies)}",
        f"give {_named_residencies(offloading_names())}, whose experts a GPU can read from host memory",
    )


def _require_gpu_for_experts(expert_memory: object, device: str) -> None:
    from neuzip.compress.device import driver_devices

    if device == "cpu":
        place = "with `device='cpu'` there is none"
    elif device == "auto" and not driver_devices():
        place = "NVIDIA's driver finds none"
    else:
        return
    raise UsageError(
        f"`expert_memory={expert_memory}`: limits what experts take of a GPU, and {place}",
        "leave out `expert_memory`: on a CPU all experts are in its memory anyway",
    )


def require_expert_pool(expert_pool_bytes: object, residency: str) -> None:
    """Raise UsageError for a value that is no number of bytes, or with a residency that has no such pool."""
    _require_bytes("expert_pool_bytes", expert_pool_bytes)
    if expert_pool_bytes is not None and residency != "ans":
        raise UsageError(
            f"`expert_pool_bytes={expert_pool_bytes}`: experts of `residency={residency!r}` are not decoded "
            "to a pool",
            "give `residency='ans'`, or leave it out",
        )


def _require_bytes(parameter: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 0):
        raise UsageError(
            f"`{parameter}={value!r}`: is no number of bytes", "give a whole number, such as 8589934592"
        )


def _named_residencies(names: Sequence[str]) -> str:
    return " or ".join(f"`residency={name!r}`" for name in names)


def require_device(device: str, residency: str = "dense") -> None:
    """Raise UsageError for a GPU that is wanted, by a residency or by itself, and is not there.

    Whether torch finds the GPU too shows when it is chosen.
    """
    on_gpu = not RESIDENCIES[residency].cpu
    if device != "cuda" and not on_gpu:
        return
    from neuzip.compress.device import driver_devices

    missing = not driver_devices()
    if on_gpu and (missing or device == "cpu"):
        why = "not with `device='cpu'`" if device == "cpu" else "and NVIDIA's driver finds no device"
        raise UsageError(
            f"`residency={residency!r}`: is decoded on a GPU, {why}",
            f"give `residency={compressed_on_cpu()!r}`, which runs on a CPU too",
        )
    if device == "cuda" and missing:
        raise UsageError("`device='cuda'`: NVIDIA's driver finds no device", "use `device='cpu'`")
