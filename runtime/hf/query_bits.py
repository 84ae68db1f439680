"""Queries in few bits beside a quantised KV cache, as BitNet a4.8 has them (section 3.1 and Table 3).

Queries are quantised after the rotary embedding, each token and head by itself, to unsigned integers with one
scale (`kernels.quantizers.quantize_heads`), and made floats again: this shows what the bits cost in quality,
not in time. Keys and values are those of `KVCache`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.quantizers import quantize_heads
from neuzip.runtime.hf.attention_names import QUERY_BITS
from neuzip.runtime.kv_bits import FEWEST, MOST

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def quantized_queries(model: PreTrainedModel, bits: int) -> Iterator[None]:
    """Context in which the queries of a model have 1 to 8 bits.

    Raises UsageError for other bits, and NeuzipError for a model that does not attend by sdpa.
    """
    if bits not in QUERY_BITS.values():
        raise UsageError(f"`query_bits={bits}`: queries have {FEWEST} to {MOST} bits", "give 4, or None")
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if before != "sdpa":
        raise NeuzipError(
            f"{model.config.name_or_path}: its attention is {before}, not sdpa", "leave out `query_bits`"
        )
    config._attn_implementation = next(name for name, own in QUERY_BITS.items() if own == bits)
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    bits: int, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it, of quantised queries: query [B, H', T, width]."""
    quantised = quantize_heads(query, bits).dequantize(query.dtype)
    return sdpa_attention_forward(module, quantised, key, value, attention_mask, **options)


for _name, _bits in QUERY_BITS.items():
    AttentionInterface.register(_name, partial(_attend, bits=_bits))
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
