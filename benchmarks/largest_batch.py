"""The largest batch with and without logits in memory, by arithmetic, as Cut Cross-Entropy's Figure 1.

    python benchmarks/largest_batch.py

The result is benchmarks/results/largest_batch.json, with a row for each model. Nothing is run: parameters are
counted from published shapes, without memory for weights. 16 GPUs of 75 GiB, which leaves 5 of 80 GiB free,
share all of it evenly. Assumed bytes; the paper names the three kinds of memory:

    a parameter   8: weight, gradient and two moments of AdamW, 16 bits each
    a token       2 * layers * width: the input of each layer, for activation checkpointing
    a token       4 * vocabulary: its log-probabilities in fp32, if they are kept

Figure 1 and Table A3: Cut Cross-Entropy (arXiv 2411.09009).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from record import Environment, Measurement, save
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedConfig

MEMORY = 16 * 75 * 2**30
"""Bytes of all GPUs."""

PARAMETER_BYTES, STATE_BYTES, LOGIT_BYTES = 8, 2, 4

MODELS: dict[str, PreTrainedConfig] = {
    "GPT-2": GPT2Config(),
    "Gemma 2 2B": Gemma2Config(
        vocab_size=256_000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True,
    ),
    "Llama 3 8B": LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "Llama 2 13B": LlamaConfig(
        vocab_size=32_000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=40,
    ),
}  # fmt: skip
"""Published shapes."""


def main() -> None:
    """Count, print, save."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = [row(name, config) for name, config in MODELS.items()]
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", needs_commit=True)
    facts = {
        "memory_bytes": MEMORY, "bytes_per_parameter": PARAMETER_BYTES, "bytes_per_logit": LOGIT_BYTES,
        "bytes_per_state": STATE_BYTES,
    }  # fmt: skip
    what = "the largest batch of training with and without logits in memory, by arithmetic"
    print(f"saved {save('largest_batch', what, Measurement(environment, rows, facts))}")


def row(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """The memory and the largest batches of a model; printed."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    states = STATE_BYTES * config.num_hidden_layers * config.hidden_size
    logits = LOGIT_BYTES * config.vocab_size
    room = MEMORY - PARAMETER_BYTES * parameters
    before, after = room // (states + logits), room // states
    print(f"{name:12} {parameters:14,} parameters {before:12,} {after:12,} tokens  {after / before:.2f}x")
    return {
        "model": name, "parameters": parameters, "state_bytes_per_token": states,
        "logit_bytes_per_token": logits, "tokens_with_logits": before, "tokens_without": after,
        "ratio": after / before,
    }  # fmt: skip


if __name__ == "__main__":
    main()
