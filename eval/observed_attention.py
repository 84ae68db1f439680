"""The attention of each layer as it runs: what it gets and returns, and whether it can be quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.runtime.hf import attention as runtime
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.registry import registered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED = 64
"""Tokens fed to find out which layers can be quantised."""


def layer_count(model: PreTrainedModel) -> int:
    """The number of layers in a model's config."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """A call of a layer's attention: q [B, Hq, N, D], k and v [B, Hkv, N, D], and options such as `causal`.

    `own` [B, Hq, N, D] is its output.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    options: dict[str, Any]


def refusals(model: PreTrainedModel, ids: Tensor) -> dict[int, str]:
    """Reasons why layers cannot be quantised, by their numbers. The model runs on `ids`, int64 [1, T]."""
    refused: dict[int, str] = {}
    with quantised(model, [8] * layer_count(model)):

        def seen(layer: int, before: dict[str, int]) -> None:
            now = runtime.uses(model)
            for how in now:
                if now[how] > before.get(how, 0) and not how.endswith(" bits"):
                    refused[layer] = how.partition(": ")[2] or how

        with _wrapped(model, lambda _: runtime.uses(model), lambda call, before: seen(call.layer, before)):
            run_body(model, ids)
    return refused


@contextmanager
def observed(model: PreTrainedModel, see: Callable[[ObservedAttention], None]) -> Iterator[None]:
    """Context in which `see` gets each call of attention at full precision."""
    with quantised(model, [None] * layer_count(model)), _wrapped(model, lambda _: None, lambda c, _: see(c)):
        yield


@contextmanager
def quantised(model: PreTrainedModel, bits: Sequence[int | None]) -> Iterator[None]:
    """Context in which layers attend in `bits` wherever they can, None for full precision."""
    runtime.patch_attention(model, bits, policy="always", warn=False)
    try:
        yield
    finally:
        runtime.unpatch_attention(model)


@contextmanager
def _wrapped(
    model: PreTrainedModel, before: Callable[[None], Any], after: Callable[[ObservedAttention, Any], None]
) -> Iterator[None]:
    """Call `before` ahead of the attention of each layer, and `after` with that and what came of it."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watch(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        noticed = before(None)
        output = attend(module, query, key, value, *rest, **options)
        if isinstance(layer, int):
            causal = options.get("is_causal")
            attention_options = {
                "causal": getattr(module, "is_causal", True) if causal is None else causal,
                "scale": options.get("scaling"),
                "window": options.get("sliding_window"),
                "softcap": options.get("softcap"),
            }
            after(
                ObservedAttention(layer, query, key, value, output[0].transpose(1, 2), attention_options),
                noticed,
            )
        return output

    with registered(ALL_ATTENTION_FUNCTIONS, name, watch):
        yield


@torch.inference_mode()
def run_body(model: PreTrainedModel, ids: Tensor) -> None:
    """Up to the hidden states: the head has nothing to do with attention."""
    body: Any = getattr(model, model.base_model_prefix, model)
    body(input_ids=ids.to(input_device(model)), use_cache=False)
