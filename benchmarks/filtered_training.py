"""Training with and without the filter of gradients, as Figure 4 of Cut Cross-Entropy, in small and on a CPU.

    python benchmarks/filtered_training.py [--cases scratch demo] [--seeds 0,1,2] [--steps 60]

The result is benchmarks/results/filtered_training.json. Two small Llamas are trained in fp32 on text, with
AdamW and 2 windows of 256 tokens a step. Each is trained by torch's cross-entropy, and from the same first
weights and in the same order of windows by `filtered_loss`, whose gradients leave out tiles as neuzip's
kernels do on a GPU.

scratch  2 layers of width 64 and the 8,192 tokens of wikilm-26m's tokenizer, random first weights
demo     the demo checkpoint, a vocabulary of 1,024

neuzip itself filters no gradients on a CPU. So the filter here is plain torch, with the rule of
kernels/linear_cross_entropy/triton/candidates.py: of tiles of 128 tokens by 128 entries, those stay that hold
a target or a probability of at least `filter_eps`. The threshold 2^-12 is neuzip's for bf16 and the paper's;
2^-6 is there to show a filter that changes losses. Rows have the share of tiles that stay, the losses, and
the largest difference of a step's loss to torch's. The paper fine-tunes Gemma 2 2B and Phi 3.5 Mini.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import Environment, Measurement, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from neuzip.eval.demo import CHECKPOINT
from neuzip.kernels.linear_cross_entropy.triton.candidates import COLUMNS, ROWS
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.text import TrainingWindows, read_documents, tokenise

LENGTH, BATCH = 256, 2
LR = 1e-3
THRESHOLDS = (2.0**-12, 2.0**-6)
CASES = ("scratch", "demo")


def main() -> None:
    """Train, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    data = Path(os.environ.get("NEUZIP_DATA", "NEUZIP_DATA-is-not-set"))
    parser.add_argument("--text", type=Path, default=data / "wikitext-2" / "wiki.valid.raw")
    parser.add_argument("--tokenizer", type=Path, default=data / "wikilm-26m")
    arguments = parser.parse_args()
    rows = []
    for case in arguments.cases:
        folder = CHECKPOINT if case == "demo" else arguments.tokenizer
        tokenizer = load_tokenizer(folder)
        ids = tokenise(tokenizer, read_documents(arguments.text))
        for seed in map(int, arguments.seeds.split(",")):
            windows = TrainingWindows.of(ids, length=LENGTH, batch=BATCH, seed=seed)
            plain = train(made(case, len(tokenizer), seed), windows, arguments.steps, None)
            for eps in THRESHOLDS:
                filtered = train(made(case, len(tokenizer), seed), windows, arguments.steps, eps)
                rows.append({"case": case, "seed": seed, "filter_eps": eps, **compared(plain, filtered)})
                print(
                    {key: value for key, value in rows[-1].items() if not isinstance(value, list)}, flush=True
                )
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", needs_commit=True)
    facts = {"text": arguments.text.name, "steps": arguments.steps, "tokens_a_step": LENGTH * BATCH, "lr": LR}
    what = "losses of training with gradients of the head filtered, and not"
    print(f"saved {save('filtered_training', what, Measurement(environment, rows, facts))}")


def made(case: str, vocabulary: int, seed: int) -> PreTrainedModel:
    """A model in fp32 before training; the demo checkpoint is the same for all seeds."""
    if case == "demo":
        return load_model(CHECKPOINT, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=172, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=LENGTH,
    ))  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Losses by step, in nats per token, and the shares of tiles that stay; no shares without a filter."""

    losses: list[float]
    kept: list[float]


def train(model: PreTrainedModel, windows: TrainingWindows, steps: int, eps: float | None) -> Run:
    """Train a model in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model.train()
    losses, kept = [], []
    for number in range(steps):
        ids = windows.batch(number)
        hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        weight, target = model.get_output_embeddings().weight, ids[:, 1:].flatten()
        if eps is None:
            loss = F.cross_entropy(F.linear(hidden, weight), target)
        else:
            loss = filtered_loss(hidden, weight, target, eps)
            kept.append(float(kept_tiles(hidden.detach(), weight.detach(), target, eps).float().mean()))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, kept)


def compared(plain: Run, filtered: Run) -> dict[str, Any]:
    """What a row says of two runs."""
    apart = [abs(one - other) for one, other in zip(plain.losses, filtered.losses, strict=True)]
    tenth = max(1, len(apart) // 10)
    return {
        "kept_tiles": statistics.fmean(filtered.kept), "kept_first": filtered.kept[0],
        "kept_last": filtered.kept[-1], "first_loss": plain.losses[0],
        "last_loss": statistics.fmean(plain.losses[-tenth:]),
        "last_loss_filtered": statistics.fmean(filtered.losses[-tenth:]),
        "largest_difference": max(apart), "losses": plain.losses, "losses_filtered": filtered.losses,
    }  # fmt: skip


class _Filtered(torch.autograd.Function):
    """The mean cross-entropy of logits [N, V]; its gradient is 0 in tiles that the filter leaves out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(logits, target)
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, target = ctx.saved_tensors
        p = logits.softmax(1)
        kept = _kept(p, target, ctx.eps)
        p[torch.arange(len(p)), target] -= 1
        spread = kept.repeat_interleave(ROWS, 0)[: len(p)].repeat_interleave(COLUMNS, 1)[:, : p.shape[1]]
        return p * spread * (grads[0] / len(p)), None, None


def filtered_loss(hidden: Tensor, weight: Tensor, target: Tensor, eps: float) -> Tensor:
    """The mean loss of a head, hidden states [N, D] and weights [V, D], with filtered gradients."""
    loss: Tensor = _Filtered.apply(F.linear(hidden, weight), target, eps)
    return loss


def kept_tiles(hidden: Tensor, weight: Tensor, target: Tensor, eps: float) -> Tensor:
    """Which tiles have gradients: bool [rows of tiles, columns of tiles]."""
    return _kept(F.linear(hidden, weight).softmax(1), target, eps)


def _kept(p: Tensor, target: Tensor, eps: float) -> Tensor:
    kept = torch.zeros(math.ceil(p.shape[0] / ROWS), math.ceil(p.shape[1] / COLUMNS), dtype=torch.bool)
    for row, column, tile in _tiles(p):
        kept[row, column] = bool((tile >= eps).any())
    kept[torch.arange(len(p)) // ROWS, target // COLUMNS] = True
    return kept


def _tiles(p: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    for row, part in enumerate(p.split(ROWS)):
        for column, tile in enumerate(part.split(COLUMNS, 1)):
            yield row, column, tile


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
