"""A Llama-shaped model of random weights, on disk and loaded in every form that benchmarks compare."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from model_results import LOSSLESS
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from weight_laws import LAWS, generator_on

from neuzip.compress import compress
from neuzip.compress.device import CPU, choose
from neuzip.compress.rules import rules_of_options
from neuzip.runtime.decode.benchmark import synchronize
from neuzip.runtime.hf.load import load_model

Tensor = torch.Tensor

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RESIDENCIES = {"dense": "dense", "packed": "packed", "ans": "ans", "rounded": "packed"}
FORMS = ("bf16", *RESIDENCIES)
KEPT = 3  # mantissa bits of `rounded`
SHARD = 4 << 30


def made(
    arguments: argparse.Namespace, forms: Sequence[str], folder: Path, law: str = "gaussian"
) -> dict[str, Path]:
    """The checkpoint with weights of a law, plain and compressed: what forms need and is missing."""
    paths = {name: folder / f"{law}-{name}" for name in ("plain", "small", "rounded")}
    if not paths["plain"].exists():
        with timed("written, plain"):
            write_model(paths["plain"], arguments, law)
    device = choose("cuda", nbytes_of(paths["plain"])) if DEVICE.type == "cuda" else CPU
    if set(forms) & set(LOSSLESS) and not paths["small"].exists():
        with timed("compressed, lossless"):
            compress(paths["plain"], paths["small"], verify=False, device=device)
    if "rounded" in forms and not paths["rounded"].exists():
        with timed(f"compressed, {KEPT} mantissa bits"):
            rules = rules_of_options(KEPT, "none")
            compress(paths["plain"], paths["rounded"], rules, verify=False, device=device)
    return paths


def nbytes_of(folder: Path) -> int:
    """Of the weights of a checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def config_of(arguments: argparse.Namespace) -> LlamaConfig:
    """Llama-3-8B's configuration with the sizes that the arguments give."""
    return LlamaConfig(
        vocab_size=arguments.words,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 7 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 512),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        dtype=torch.bfloat16,
        bos_token_id=0,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )


def write_model(folder: Path, arguments: argparse.Namespace, law: str) -> None:
    """Write a checkpoint of shards as `save_pretrained` would, with weights of a law."""
    config = config_of(arguments)
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = generator_on(DEVICE)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        if len(shape) == 1:
            values = torch.ones(shape, dtype=torch.bfloat16)
        else:
            values = LAWS[law](*shape, generator, torch.bfloat16).cpu()
        if shard and sum(t.nbytes for t in shard.values()) + values.nbytes > SHARD:
            flush()
        shard[name] = values
        total += values.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(form: str, folders: dict[str, Path]) -> PreTrainedModel:
    """A form of the model."""
    if form == "bf16":
        return from_pretrained(folders["plain"])
    path = folders["rounded" if form == "rounded" else "small"]
    return load_model(path, device=DEVICE, residency=RESIDENCIES[form])


def from_pretrained(path: Path) -> PreTrainedModel:
    """As transformers loads a plain folder; on a GPU by way of accelerate, straight onto it."""
    placed = {"device_map": {"": DEVICE}} if DEVICE.type == "cuda" else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **placed)
    return model.eval()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long something took."""
    synchronize(DEVICE)
    began = time.perf_counter()
    yield
    synchronize(DEVICE)
    print(f"  {what} in {time.perf_counter() - began:.1f} s", flush=True)
