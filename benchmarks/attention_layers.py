"""Codes of queries before and after smoothing, and closeness by layer, as SageAttention2's Figures 5 and 7.

    python benchmarks/attention_layers.py NAME CHECKPOINT TEXT [--windows 4] [--window 256] [--device D]

The result is benchmarks/results/attention_layers-NAME.json, with a row for each layer: entropies in bits of
the INT4 codes of its queries, plain and smoothed, with a scale for each query as the kernels have; and mean
and standard deviation over windows of the score cosine * (1 - relative L1) of attention in 4 bits (Q, K INT4
smoothed, P, V E4M3), by the reference. `plain` and `smoothed` have the shares of the codes -7 to 7 over all
layers.

Figures 5 and 7: SageAttention2 (arXiv 2411.10958), there of CogVideoX and Llama 3.1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_accuracy import Call, Form, called
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.entropies import entropy
from neuzip.eval.measures.texts import read_text
from neuzip.kernels.attention.reference import quantize, query_groups, query_means

LARGEST = 7
"""Of INT4 codes."""

FOUR_BITS = Form("by layer", "4 bit", {"bits": 4})


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    baseline = BaselineComparison(
        arguments.checkpoint, read_text(arguments.text), window=arguments.window,
        max_tokens=arguments.windows * arguments.window, device=arguments.device,
    )  # fmt: skip
    calls = [called(baseline.model, baseline.reading, number) for number in range(arguments.windows)]
    totals = {name: torch.zeros(2 * LARGEST + 1, dtype=torch.int64) for name in ("plain", "smoothed")}
    rows = [layer(number, [window[number] for window in calls], totals) for number in range(len(calls[0]))]
    gpu = baseline.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=gpu, needs_commit=True)
    facts = {
        "text": Path(arguments.text).name, "windows": arguments.windows, "window": arguments.window,
        "device": str(baseline.device),
        **{name: (counts / counts.sum()).tolist() for name, counts in totals.items()},
    }  # fmt: skip
    what = "codes of queries, and closeness of attention in 4 bits, by layer"
    print(f"saved {save(f'attention_layers-{arguments.name}', what, Measurement(environment, rows, facts))}")


def layer(number: int, calls: Sequence[Call], totals: dict[str, Tensor]) -> dict[str, Any]:
    """The figures of a layer, whose codes are added to the totals; printed."""
    bits = {}
    for name, total in totals.items():
        counts = sum((histogram(call.q, name == "smoothed") for call in calls), torch.zeros_like(total))
        total += counts
        bits[f"{name}_bits"] = entropy(counts.numpy())
    scores = [call.similarity(FOUR_BITS).score for call in calls]
    figures = {**bits, "score": statistics.fmean(scores), "score_sd": statistics.stdev(scores)}
    print(number, *(f"{key} {value:.4f}" for key, value in figures.items()), sep="  ", flush=True)
    return {"layer": number, **figures}


def histogram(q: Tensor, smooth: bool) -> Tensor:
    """How often queries have each INT4 code."""
    x = q.float() - query_means(q) if smooth else q.float()
    codes, _ = quantize(x, 4, query_groups(q.shape[2], "thread", q.device))
    return torch.bincount((codes + LARGEST).long().flatten().cpu(), minlength=2 * LARGEST + 1)


if __name__ == "__main__":
    main()
