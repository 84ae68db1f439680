"""SubLN: an RMSNorm more before o_proj and before down_proj, as models that are trained ternary have them.

    X' = X + W_o SubLN(heads)        X + W_down SubLN(act(W_gate X) * W_up X)

A Llama with these is transformers' `bitnet` model, which loads, compresses and generates as others do; other
architectures have no such form to be stored in. A norm is no identity, so the model changes: each begins with
the gain that its inputs had on a text. Source: BitNet Distillation (arXiv 2510.13998, section 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import BitNetConfig, BitNetForCausalLM

from neuzip.errors import NeuzipError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters",
    "attention_bias", "attention_dropout",
)  # fmt: skip
"""Entries that the configurations of Llama and BitNet share."""

FEW = 16
"""Windows of text from which gains are computed."""

NORMS = (("self_attn.attn_sub_norm", "self_attn.o_proj"), ("mlp.ffn_sub_norm", "mlp.down_proj"))
"""Norms, and the modules that read their output."""


def with_sub_norms(model: PreTrainedModel, windows: Tensor) -> PreTrainedModel:
    """A Llama's weights in a model that has them; `windows`, int64 [n, T], say how large its inputs are.

    Raises NeuzipError for other models, and for Llamas that such a model cannot be.
    """
    config = model.config
    if config.model_type != "llama":
        raise NeuzipError(
            f"{config.name_or_path}: a {config.model_type} model has no form with SubLN",
            "only Llamas can be stored with more norms; leave `sub_norms` out",
        )
    if config.mlp_bias or config.head_dim * config.num_attention_heads != config.hidden_size:
        raise NeuzipError(
            f"{config.name_or_path}: has biases in its MLPs, or heads that are not as wide as the model",
            "BitNet has neither; leave `sub_norms` out",
        )
    gains = _gains(model, windows[:FEW])
    with torch.device(model.device):
        bitnet = BitNetForCausalLM(BitNetConfig(**{name: getattr(config, name) for name in KEPT}))
    bitnet.load_state_dict(model.state_dict(), strict=False)
    for norm, gain in gains.items():
        nn.init.constant_(bitnet.get_submodule(norm).weight, gain)  # type: ignore[arg-type]
    bitnet.generation_config, bitnet.config.dtype = model.generation_config, config.dtype
    bitnet.config.name_or_path = config.name_or_path
    nn.Module.to(bitnet, dtype=model.dtype)
    return bitnet


@torch.no_grad()
def _gains(model: PreTrainedModel, windows: Tensor) -> dict[str, float]:
    """The root of the mean square of what each norm's reader gets, by the names of norms."""
    sums: dict[str, list[Tensor]] = {}
    hooks = []
    for number in range(model.config.num_hidden_layers):
        for norm, reader in NORMS:
            name = f"model.layers.{number}.{norm}"
            own = sums.setdefault(name, [])

            def keep(_: nn.Module, inputs: tuple[Any, ...], own: list[Tensor] = own) -> None:
                own.append(inputs[0].float().square().mean())

            module = model.get_submodule(f"model.layers.{number}.{reader}")
            hooks.append(module.register_forward_pre_hook(keep))
    try:
        for window in windows:
            model(window[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: float(torch.stack(own).mean().sqrt()) for name, own in sums.items()}
