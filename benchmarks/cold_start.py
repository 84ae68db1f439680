"""Measure the first token of `neuzip generate` on a GPU, with an empty cache of kernels and a filled one.

    python benchmarks/cold_start.py [FOLDER] [--rounds 1] [--residency packed dense]

FOLDER is a checkpoint, plain or compressed. Without it, the model has the shape of SmolLM2-135M and random
weights. For each residency, a process loads it and generates 16 tokens with an empty
TRITON_CACHE_DIR, and then once more with what that run left there.

Writes benchmarks/results/cold_start.json. Aims, for the first token of the packed model: 8 seconds with an
empty cache and 1.5 with a filled one; better 5 and 1. The figure is that of `generate`: from a loaded model
on. Seconds of loading, and of the whole command with all imports, stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Environment, Measurement, save

NEUZIP = [sys.executable, "-P", "-m", "neuzip"]
PROMPT = "The world is"
AIMS = {"cold": (8.0, 5.0), "filled": (1.5, 1.0)}
"""Seconds to the first token of the packed model: what must be, and what would be better."""

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "rope_theta": 100_000.0,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint with a tokenizer")
    parser.add_argument("--rounds", type=int, default=1, help="empty caches for each residency")
    parser.add_argument("--residency", nargs="+", default=["packed", "dense"], help="of the model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = arguments.folder or random_model(Path(work) / "model")
        model = str(arguments.folder or "random weights in the shape of SmolLM2-135M")
        rows = [
            row
            for number in range(arguments.rounds)
            for residency in arguments.residency
            for row in cold_and_filled(folder, residency, Path(work) / f"{residency}{number}")
        ]
    for row in rows:
        print(said(row, model))
    what = "seconds to the first token of `neuzip generate` on a GPU, by its cache of kernels"
    environment = Environment.here("torch", "triton", "transformers", gpu=True)
    print(save("cold_start", what, Measurement(environment, rows, facts={"model": model})))


def random_model(folder: Path) -> Path:
    """A compressed model in the shape of SmolLM2-135M, of random weights, with a tokenizer of 256 bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import neuzip

    torch.manual_seed(0)
    plain = folder.with_name("plain")
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).to(torch.bfloat16).save_pretrained(plain)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(plain)
    neuzip.compress_checkpoint(plain, folder)
    return folder


def cold_and_filled(folder: Path, residency: str, cache: Path) -> list[dict[str, Any]]:
    """A row for an empty cache, and one for what it holds then."""
    rows = []
    for state in AIMS:
        before = kernels_in(cache)
        began = time.perf_counter()
        run = subprocess.run(
            [*NEUZIP, "generate", str(folder), PROMPT, "--max-new-tokens", "16", "--residency", residency,
             "--json"],
            env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True,
        )  # fmt: skip
        wall = time.perf_counter() - began
        if run.returncode:
            sys.exit(f"{residency}, {state}: {run.stderr[-2000:]}")
        answer = json.loads(run.stdout)
        rows.append(
            {
                "residency": residency, "cache": state, "kernels_compiled": kernels_in(cache) - before,
                "load_s": round(answer["load_seconds"], 2),
                "first_token_s": round(answer["first_token_seconds"], 2), "command_s": round(wall, 2),
            }
        )  # fmt: skip
    return rows


def kernels_in(cache: Path) -> int:
    """Compiled kernels in a cache of Triton."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


def said(row: dict[str, Any], model: str) -> str:
    """A row as a line, with what was aimed at."""
    line = (
        f"{row['residency']}, cache {row['cache']}: first token {row['first_token_s']} s,"
        f" load {row['load_s']} s, command {row['command_s']} s,"
        f" {row['kernels_compiled']} kernels compiled ({model})"
    )
    if row["residency"] != "packed":
        return line
    for name, aim in zip(("must", "stretch"), AIMS[row["cache"]], strict=True):
        line += f"; {name} {aim} s {'met' if row['first_token_s'] <= aim else 'missed'}"
    return line


if __name__ == "__main__":
    main()
