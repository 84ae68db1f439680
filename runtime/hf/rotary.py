"""Which channels of keys stay where they are while positions go by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def still_channels(config: PreTrainedConfig, layer: int, wavelength: float, width: int) -> Tensor:
    """bool [width]: the channels of a key that turn once in `wavelength` tokens or more, or not at all.

    Channels i and i + r / 2 turn by base**(-2 i / r) radians a token, where r of the `width` channels turn.
    A model without a rotary embedding has still channels only, and so have the latents that are cached in
    place of keys in multi-head latent attention (arXiv 2405.04434), whose width is `kv_lora_rank`. If a model
    pairs its channels otherwise, the wrong ones count as still, which costs accuracy and is never wrong.
    """
    still = torch.ones(width, dtype=torch.bool)
    rope = _rope_parameters(config, layer)
    base = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    if base is None or width == getattr(config, "kv_lora_rank", None):
        return still
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    last = getattr(config, "qk_rope_head_dim", None)  # latent attention: the last channels turn
    half = (min(last, width) if last else int(width * part)) // 2
    begin = width - 2 * half if last else 0
    slow = 2 * math.pi * float(base) ** (torch.arange(half) / max(half, 1)) >= wavelength
    still[begin : begin + 2 * half] = slow.repeat(2)
    return still


def _rope_parameters(config: PreTrainedConfig, layer: int) -> dict[str, Any]:
    """What the config says of the rotary embedding of a layer, which may be that of a kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    if kinds and isinstance(rope.get(kinds[layer]), dict):
        return dict(rope[kinds[layer]])
    return dict(rope)
