"""Attention of transformers to packed keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from neuzip.kernels import kv_cache as kernels
from neuzip.runtime.hf.attention_names import NAMES, PACKED_CACHE
from neuzip.runtime.hf.kv_layers import DEQUANTISED, PackedStates
from neuzip.runtime.hf.static_cache import head_width

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def not_readable(model: PreTrainedModel) -> str | None:
    """Why a model's attention cannot read packed keys and values, in words; None if it can."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return "its cache keeps latents, from which it makes keys and values"
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        return "the kernel is for GPUs"
    if text is not config:
        return "its text model has a config of its own"
    name = config._attn_implementation
    if name in NAMES:  # they leave one token to what the model has by itself
        name = model.get_correct_attn_implementation(None)
    if name not in ("sdpa", PACKED_CACHE):
        return f"its attention is {name}, not sdpa"
    if not getattr(model, "_supports_attention_backend", False):
        return "it does not let its attention be chosen"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    width = head_width(text)
    if width is None:
        return "its config does not say one width of heads for all layers"
    group = text.num_attention_heads // (
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    )
    from neuzip.kernels.kv_cache.triton.shares import fits

    return None if fits(width, group) else f"its heads are {group} queries of {width} numbers"


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | PackedStates,
    value: Tensor | PackedStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, H', T, width] to [B, T, H', width']."""
    if isinstance(key, PackedStates) and isinstance(value, PackedStates):
        reason = _asks_for_more(attention_mask, dropout, options)
        if reason is None:
            output = kernels.attend(
                query[:, :, 0], key.heads, value.heads, key.first,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                length=key.length, mask=None if attention_mask is None else attention_mask[:, 0, 0],
            )  # fmt: skip
            return output[:, None], None
        key.form.how = f"{DEQUANTISED}: {reason}"
    keys, values = (x.dense() if isinstance(x, PackedStates) else x for x in (key, value))
    return sdpa_attention_forward(
        module, query, keys, values, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _asks_for_more(mask: Tensor | None, dropout: float, options: dict[str, Any]) -> str | None:
    """What a call wants that the kernel does not do, in words."""
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
        return "its heads have masks of their own"
    extras = [name for name in ("softcap", "position_bias", "s_aux") if options.get(name) is not None]
    return f"it has a {extras[0]}" if extras else "it drops out weights" if dropout else None


AttentionInterface.register(PACKED_CACHE, _attend)
AttentionMaskInterface.register(PACKED_CACHE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
