"""Models so small that a test takes milliseconds: their sizes, and the architectures that decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from transformers.quantizers.base import HfQuantizer

from neuzip.runtime.decode.agreement import agreement

HAS_VERSION_5 = hasattr(HfQuantizer, "get_quantize_ops")
"""Whether transformers is version 5 or later."""

needs_version_5 = pytest.mark.skipif(
    not HAS_VERSION_5, reason="transformers 4 has the residency 'dense' only"
)


def llama(seed: int | None = None, **config: Any) -> LlamaForCausalLM:
    """A Llama of random weights in fp32; without a seed they follow from what was drawn before."""
    if seed is not None:
        torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**config))


SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


GROUPED: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)),
}


def single_experts() -> PreTrainedModel:
    model = MODELS["experts"]().eval()
    model.set_experts_implementation("eager")
    return model


def assert_tied_at_most(original: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor, ties: int):
    """All tokens are the original's own choice, or tied with it, as sums in another order may decide."""
    judged = agreement(original, ids, tokens)
    assert judged.chosen + judged.tied == judged.tokens, judged
    assert judged.tied <= ties, judged
