"""One call of attention: by our kernel, or why it is not, and by what a model has itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.attention_names import PACKED_CACHE
from neuzip.runtime.hf.masks import DeferredMask
from neuzip.runtime.hf.masks import seen as seen_by

Output = tuple[Tensor, Tensor | None]

LEAST_TOKENS = 2048
"""Fewer queries do not repay quantising all keys; fewer keys were never faster (benchmarks/attention.py)."""
LEAST_PRODUCTS = 10**11
"""Products of numbers, of queries with keys, over all heads. SDPA does fewer before our kernels are launched.

On an H200, with 32 heads of 128 and a causal mask, that is one text of 7,000 tokens, or eight of 2,500.
"""

HARMLESS = frozenset({
    "cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "sliding_window", "use_cache",
})  # fmt: skip
"""What layers hand on that attention has no use for. A sliding window is in the mask, as for SDPA."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention as transformers makes it, from queries [B, Hq, Nq, D] to [B, Nq, Hq, D]."""

    module: torch.nn.Module
    query: Tensor
    key: Any
    value: Any
    mask: Tensor | None
    dropout: float
    scaling: float | None
    is_causal: bool | None
    options: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether it is, if no mask says what is seen."""
        return getattr(self.module, "is_causal", True) if self.is_causal is None else self.is_causal

    def by(self, function: Callable[..., Output]) -> Output:
        """The result by another attention of transformers."""
        mask = self.mask.dense() if isinstance(self.mask, DeferredMask) else self.mask
        return function(
            self.module, self.query, self.key, self.value, mask,
            dropout=self.dropout, scaling=self.scaling, is_causal=self.is_causal, **self.options,
        )  # fmt: skip


def slower(call: AttentionCall) -> str | None:
    """Why SDPA is faster, in words that do not change with every token."""
    texts, heads, queries, width = call.query.shape
    keys = call.key.shape[2]
    if not call.query.is_cuda:
        return "on a CPU quantised attention is only simulated"
    if isinstance(call.mask, DeferredMask):  # a static cache has room for more
        keys = call.mask.seen.keys
    elif call.mask is None and call.causal:
        keys = min(keys, queries)
    if queries < LEAST_TOKENS or keys < LEAST_TOKENS:
        return f"with fewer than {LEAST_TOKENS:,} queries or keys it is faster"
    unseen = queries * min(queries, keys) // 2 if call.causal or call.mask is not None else 0
    few = texts * heads * width * (queries * keys - unseen) < LEAST_PRODUCTS
    return f"with fewer than {LEAST_PRODUCTS:.0e} products it is faster" if few else None


def quantized(call: AttentionCall, bits: int) -> Tensor | str:
    """The result by the kernel, [B, Nq, Hq, D], or what the call wants that it does not do, in words."""
    from neuzip.kernels.attention import sage_attention, sage_attention_packed, supported

    reason = _asks_for_more(call)
    if reason is not None:
        return reason
    query, key, value = call.query, call.key, call.value
    if key.shape[-1] != value.shape[-1]:
        return "its values are not as wide as its keys"
    seen = seen_by(call.mask, query, key, call.causal)
    if seen is None:
        return "its mask is none that the kernel knows"
    options: dict[str, Any] = {
        "bits": bits, "causal": seen.causal, "window": seen.window, "scale": call.scaling,
        "softcap": call.options.get("softcap"),
    }  # fmt: skip
    reason = supported(query, key, value, **options)
    if reason is not None:
        return reason
    key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
    if seen.tokens is None:
        output: Any = sage_attention(query, key, value, **options)
        return output.transpose(1, 2).contiguous()  # type: ignore[no-any-return]
    queries, keys = seen.tokens
    output = sage_attention_packed(
        queries.take(query), keys.take(key), keys.take(value), queries.starts, keys.starts,
        longest_q=queries.longest, longest_k=keys.longest, **options,
    )  # fmt: skip
    return queries.put(output, query.shape[2])


def _asks_for_more(call: AttentionCall) -> str | None:
    """What a call wants that the kernel has no argument for, in words."""
    unknown = sorted(
        name
        for name, value in call.options.items()
        if value is not None and value is not False and name not in HARMLESS and name != "softcap"
    )
    if unknown:
        return f"it comes with {unknown[0]}"
    if call.dropout:
        return "it drops out weights"
    return None if call.query.numel() and call.key.numel() else "there are no tokens"


def own_attention(call: AttentionCall) -> Callable[..., Output]:
    """The attention that a model has by itself: SDPA, or its eager one where SDPA lacks what the call wants.

    Raises NeuzipError for a model that has neither.
    """
    kind = type(call.module)
    wants_eager = any(call.options.get(name) is not None for name in ("softcap", "s_aux"))
    if not wants_eager and _takes_sdpa(kind.__module__):
        return sdpa_attention_forward
    eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    if eager is None:
        raise NeuzipError(
            f"{kind.__name__}: torch's SDPA cannot do its attention, and it has no eager one to fall back to",
            'call set_attn_implementation("eager")',
        )
    return functools.partial(_eager, eager)


_takes: dict[str, bool] = {}  # torch.compile dislikes functools.cache


def _takes_sdpa(file: str) -> bool:
    """Whether the models in the file of an attention layer say that they can use SDPA."""
    if file not in _takes:
        around = [m for m in vars(sys.modules[file]).values() if isinstance(m, type)]
        models = [m for m in around if issubclass(m, PreTrainedModel) and m.__module__ == file]
        _takes[file] = all(m._supports_sdpa for m in models)
    return _takes[file]


def _eager(
    eager: Callable[..., Output],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> Output:
    """A model's eager attention, with numbers for a mask, as eager masks of transformers have them."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and causal and query.shape[2] > 1:
        every = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = every.tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **options)


def packed_attention(*arguments: Any, **options: Any) -> Output:
    """Attention to keys and values that a KVCache hands out packed."""
    output: Output = ALL_ATTENTION_FUNCTIONS[PACKED_CACHE](*arguments, **options)
    return output
