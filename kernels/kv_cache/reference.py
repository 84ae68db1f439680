"""Attention of one query over heads in few bits: dequantised, then the textbook's softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.kv_cache.ops import Heads, load


def attend(
    query: Tensor,
    keys: Heads,
    values: Heads,
    first: Tensor,
    *,
    scaling: float,
    length: int | Tensor,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Softmax attention, `kv_cache.attend`, computed in `dtype` from numbers dequantised to fp32."""
    batch, queries, _ = query.shape
    k, v = (load(heads, first, torch.float32).to(dtype) for heads in (keys, values))
    q = query.to(dtype).reshape(batch, k.shape[1], -1, keys.width)
    logits = scaling * (q @ k.mT)
    if mask is not None:
        here = mask[:, None, None, : keys.capacity]
        logits = logits.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else logits + here
    absent = torch.arange(keys.capacity, device=query.device) >= length
    logits = logits.masked_fill(absent, -torch.inf)
    return (logits.softmax(-1) @ v).reshape(batch, queries, values.width).to(query.dtype)
