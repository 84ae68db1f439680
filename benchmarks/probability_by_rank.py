"""The mean probability of the i-th most likely next token, as Cut Cross-Entropy's Figure 3.

    python benchmarks/probability_by_rank.py TEXT NAME=CHECKPOINT ... [--tokens 1024] [--window 512]

The result is benchmarks/results/probability_by_rank.json, with a section for each checkpoint. Models run in
fp32 on windows of the text without overlap. The probabilities of each token are sorted, then averaged by
rank over the tokens, in fp64. Rows have the ranks 1, 2, 5, 10 and so on, and the last one. `below` has the
first rank whose mean is below a number: 2^-12, from which on gradients are filtered, and the smallest normal
number of fp16, 2^-14.

Figure 3: Cut Cross-Entropy (arXiv 2411.09009).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from record import Environment, Measurement, save_sections
from torch import Tensor

from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer

STEPS = (1, 2, 5)
"""Ranks of each power of ten that are written down."""

LIMITS = {"2^-12": 2.0**-12, "2^-14": 2.0**-14}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=512)
    arguments = parser.parse_args()
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", needs_commit=True)
    sections = {}
    for text in arguments.checkpoints:
        name, _, folder = text.partition("=")
        means = mean_by_rank(Path(folder), arguments.text, arguments.tokens, arguments.window)
        rows = [{"rank": rank, "probability": means[rank - 1].item()} for rank in ranks(len(means))]
        below = {limit: first_below(means, value) for limit, value in LIMITS.items()}
        print(f"{name}: {len(means):,} tokens of vocabulary; first rank below " + ", ".join(
            f"{limit}: {rank}" for limit, rank in below.items()))  # fmt: skip
        facts = {
            "text": arguments.text.name, "tokens": arguments.tokens, "window": arguments.window,
            "vocabulary": len(means), "below": below,
        }  # fmt: skip
        sections[name] = Measurement(environment, rows, facts)
    what = "the mean probability of the i-th most likely next token"
    print(f"saved {save_sections('probability_by_rank', what, sections)}")


@torch.inference_mode()
def mean_by_rank(checkpoint: Path, text: Path, tokens: int, window: int) -> Tensor:
    """The mean over tokens of the sorted probabilities, fp64 [vocabulary]."""
    device = torch.device("cpu")
    model = load_model(checkpoint, torch.float32, device)
    ids = load_tokenizer(checkpoint)(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    total = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    for part in torch.tensor(ids[:tokens]).split(window):
        hidden = model.base_model(input_ids=part[None]).last_hidden_state[0]
        for rows in hidden.split(64):
            probabilities = model.get_output_embeddings()(rows).double().softmax(-1)
            total += probabilities.sort(-1, descending=True).values.sum(0)
    return total / tokens


def ranks(vocabulary: int) -> list[int]:
    """The ranks that are written down: 1, 2, 5, 10, ... and the last."""
    found = [step * 10**power for power in range(len(str(vocabulary))) for step in STEPS]
    return [rank for rank in found if rank < vocabulary] + [vocabulary]


def first_below(means: Tensor, limit: float) -> int | None:
    """The first rank whose mean is below a limit; None if none is."""
    small = (means < limit).nonzero()
    return int(small[0]) + 1 if len(small) else None


if __name__ == "__main__":
    main()
