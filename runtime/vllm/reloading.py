"""Refuses to load weights into a running engine that holds them packed: CUDA graphs have their addresses."""

from __future__ import annotations

import torch

from neuzip.runtime.serving import EngineRefusal

PACKED = ("neuzip_packed", "neuzip_experts")
"""Attributes of layers that hold packed weights, None while a layer waits for them."""


def require_unpacked(model: torch.nn.Module) -> None:
    """Raise EngineRefusal if a layer of a model has packed weights, which vLLM cannot replace."""
    for layer in model.modules():
        if any(getattr(layer, name, None) is not None for name in PACKED):
            raise EngineRefusal(
                "neuzip: packed weights cannot be reloaded into a running engine",
                "start vLLM again, or with the residency 'dense'",
            )
