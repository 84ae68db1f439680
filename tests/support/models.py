"""Models so small that a test takes milliseconds: their sizes, and the architectures that decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.quantizers.base import HfQuantizer

from neuzip.runtime.decode.agreement import agreement
from neuzip.runtime.residency import compress_parameters

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


EXPERTS = 8
"""Experts of a layer of `mixture`; each token is for two of them."""

LAYOUTS = ("qwen3", "mixtral", "gpt-oss", "deepseek")
"""Mixtures of experts: `gpt-oss` interleaves gate and up, stores [in, out] and has biases; `deepseek` chooses
among groups, and has experts that all tokens share, and a dense layer."""


def mixture(layout: str, hidden: int = 64, inner: int = 128, layers: int = 2) -> PreTrainedModel:
    """A bf16 model of random weights of one of LAYOUTS, large enough that its experts are packed.

    Its routers are sure of their choice: a rounding does not change it.
    """
    torch.manual_seed(5)
    sizes: dict[str, Any] = SIZES | {
        "hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 256,
        "intermediate_size": inner, "moe_intermediate_size": inner, "num_key_value_heads": 2,
        "head_dim": hidden // 4, "num_experts_per_tok": 2, "initializer_range": 0.8 / hidden**0.5,
    }  # fmt: skip
    model: PreTrainedModel
    if layout == "qwen3":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=EXPERTS, norm_topk_prob=True))
    elif layout == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=EXPERTS))
    elif layout == "gpt-oss":
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
        model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=EXPERTS, sliding_window=32))
    else:
        groups = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
        widths = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16)
        widths |= {"q_lora_rank": 32, "kv_lora_rank": 32}
        sizes |= {"num_key_value_heads": 4, "first_k_dense_replace": 1, **groups, **widths}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    _decide(model)
    return model.bfloat16().eval()


def _decide(model: PreTrainedModel) -> None:
    """Give tokens two directions each, of lengths 8 and 4, and routers an expert for each direction."""
    embeddings = model.get_input_embeddings().weight
    words, hidden = embeddings.shape
    directions = torch.linalg.qr(torch.randn(hidden, EXPERTS))[0].T
    number = torch.arange(words)
    first = number % EXPERTS
    second = (first + 1 + number // EXPERTS % (EXPERTS - 1)) % EXPERTS
    with torch.no_grad():
        embeddings.add_(8 * directions[first] + 4 * directions[second])
        for name, parameter in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.copy_(directions / 2)
            elif name.endswith("proj_bias"):
                parameter.normal_(std=0.3)


def packed_mixture(layout: str, device: torch.device | str = "cpu", **sizes: int) -> PreTrainedModel:
    """A `mixture` with packed weights, whose experts neuzip computes."""
    model = mixture(layout, **sizes).to(device)
    compress_parameters(model, "packed")
    model.set_experts_implementation("neuzip")
    return model


def assert_as_near(mine: torch.Tensor, theirs: torch.Tensor, reference: torch.Tensor) -> None:
    """A result is about as near to a reference in fp64 as another one that has the same roundings."""

    def error(result: torch.Tensor) -> float:
        return ((result - reference).norm() / reference.norm()).item()

    assert error(mine) <= 1.25 * error(theirs), f"{error(mine)} after {error(theirs)}"


def assert_tied_at_most(original: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor, ties: int):
    """All tokens are the original's own choice, or tied with it, as sums in another order may decide."""
    judged = agreement(original, ids, tokens)
    assert judged.chosen + judged.tied == judged.tokens, judged
    assert judged.tied <= ties, judged
