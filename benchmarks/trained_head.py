"""What the head of a trained model is given on a text: the material of linear_cross_entropy.py --trained.

    python benchmarks/trained_head.py CHECKPOINT TEXT OUT.safetensors [--tokens 8192] [--window 1024]

Writes the head's weights [V, D], the last hidden states [N, D] of the first N tokens of the text, in windows
without overlap, and the tokens that they predict, int64 [N]. The model runs in fp32 on a CPU and as it is on
a GPU; what is written is bf16. `neuzip compress OUT.safetensors SMALLER.safetensors` makes a file that
linear_cross_entropy.py reads as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer


def main() -> None:
    """Run the model, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(arguments.checkpoint, None if device.type == "cuda" else torch.float32, device)
    tokenizer = load_tokenizer(arguments.checkpoint)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    if len(ids) <= arguments.tokens:
        parser.error(f"{arguments.text} has {len(ids):,} tokens, fewer than {arguments.tokens + 1:,}")
    tokens = torch.tensor(ids[: arguments.tokens + 1])
    with torch.inference_mode():
        parts = [
            model.base_model(input_ids=part[None].to(device)).last_hidden_state[0].bfloat16().cpu()
            for part in tokens[:-1].split(arguments.window)
        ]
    weight = model.get_output_embeddings().weight.detach().bfloat16().cpu().contiguous()
    save_file(
        {"hidden": torch.cat(parts), "weight": weight.clone(), "target": tokens[1:].clone()}, arguments.out
    )
    print(f"{arguments.out}: {len(tokens) - 1:,} tokens, a head of {weight.shape[0]:,} x {weight.shape[1]:,}")


if __name__ == "__main__":
    main()
