"""Mixtures of experts that benchmarks and tests run: shapes of published models, and a trained small one.

`made_up` has weights of a law, made where they lie. `upcycled` makes experts of the MLPs of a trained Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from expert_cases import MIXTRAL, QWEN
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.initialization import no_init_weights
from weight_laws import LAWS, generator_on

Tensor = torch.Tensor

DTYPE = torch.bfloat16

EMBEDDING_SCALE = 128
"""What made-up embeddings are multiplied by, so that a token still tells in deep layers which token it is.

Otherwise attention of made-up weights, a mean of many values, makes the tokens of a text alike, and most go
to the same few experts: of a prompt of 512 tokens to 40 to 60 of 128 in layer 4, with this to 120. A power of
two changes no mantissa, so the packed form is as large.
"""

PERTURBATION = 0.1
"""Standard deviation of what the weights of an upcycled expert differ by, as a share of each weight."""

COMMON: dict[str, Any] = {
    "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def qwen(layers: int) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B with some of its layers: 128 experts of 768, 8 a token."""
    return Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, **COMMON,
    )  # fmt: skip


def mixtral(layers: int) -> MixtralConfig:
    """Mixtral 8x7B with some of its layers: 8 experts of 14336, 2 a token."""
    return MixtralConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6, sliding_window=None, **COMMON,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[int], Qwen3MoeConfig | MixtralConfig]] = {QWEN: qwen, MIXTRAL: mixtral}
"""The config of a model with so many layers, by the model's name."""


def reduced(config: Qwen3MoeConfig | MixtralConfig) -> Qwen3MoeConfig | MixtralConfig:
    """The config of a model of the same layout that a CPU runs in milliseconds."""
    sizes = {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    return type(config)(**{**config.to_dict(), **sizes, "num_hidden_layers": 2})


def made_up(
    config: Qwen3MoeConfig | MixtralConfig, law: str, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A bf16 model on `device` whose matrices, one an expert, have weights of a law of LAWS; norms are 1."""
    model = _without_values(config, device)
    generator = generator_on(device, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            for matrix in matrices_of(parameter):
                matrix.copy_(LAWS[law](*matrix.shape, generator, DTYPE))
        model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    return model


def matrices_of(parameter: Tensor) -> list[Tensor]:
    """The matrices of a parameter, those of experts one by one; none of a vector."""
    return [] if parameter.dim() < 2 else list(parameter) if parameter.dim() == 3 else [parameter]


def upcycled(
    folder: Path, device: torch.device, *, experts: int = 8, layers: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model of Mixtral's layout made of a trained Llama in `folder`, in bf16 on `device`.

    Each expert is the MLP of its layer, every weight multiplied by 1 + N(0, PERTURBATION). Routers are random
    and take 2 experts a token. All else is the Llama's; `layers` are the first ones, None all.
    """
    llama: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(device).eval()
    sizes = llama.config.to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    config = MixtralConfig(
        **{name: sizes[name] for name in names} | ({} if layers is None else {"num_hidden_layers": layers}),
        num_local_experts=experts, num_experts_per_tok=2, sliding_window=None,
    )  # fmt: skip
    model = _without_values(config, device)
    trained, generator = llama.state_dict(), generator_on(device, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                mlp = name.partition("experts.")[0]
                parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                weight = torch.cat([trained[f"{mlp}{part}.weight"] for part in parts])
                for expert in parameter:
                    expert.copy_(weight * (1 + PERTURBATION * _normal(weight, generator)))
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(_normal(parameter, generator) * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(trained[name])
    return model


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers in fp32, in the shape of a tensor."""
    return torch.empty(like.shape, device=generator.device).normal_(generator=generator)


def _without_values(config: Qwen3MoeConfig | MixtralConfig, device: torch.device) -> PreTrainedModel:
    """A model of a config in evaluation mode, its parameters uninitialised memory on `device`."""
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return model.eval()
