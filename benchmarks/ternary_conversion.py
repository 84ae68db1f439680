"""What a model loses when its linear weights become ternary without training, step by step.

    python benchmarks/ternary_conversion.py NAME CHECKPOINT TEXT --calibration TEXT [--max-tokens N]

    python benchmarks/ternary_conversion.py demo eval/demo/checkpoint demo --calibration train
    python benchmarks/ternary_conversion.py wikilm-26m $NEUZIP_DATA/wikilm-26m \\
        $NEUZIP_DATA/wikitext-2/wiki.test.raw --calibration $NEUZIP_DATA/wikitext-2/wiki.valid.raw

From absmean, as BitNet b1.58 trains with, to group scales, error feedback and rotation: perplexity,
divergence from the original and agreement on TEXT, and the bits of a ternary weight, five codes a byte and
fp32 scales. Error feedback sees the calibration text (`train`: the demo's training text). The result is
benchmarks/results/ternary-conversion-NAME.json.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save
from sweep import calibration

from neuzip.eval.measures.comparison import BaselineComparison, read_tokens
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import read_text
from neuzip.runtime.hf.load import load_model
from neuzip.train.recovery.rotation import rotate
from neuzip.train.recovery.ternary import TernaryRecipe, convert

STEPS: list[tuple[bool, TernaryRecipe]] = [
    (False, TernaryRecipe("absmean", None)),
    (False, TernaryRecipe("least-squares", None)),
    (False, TernaryRecipe("least-squares", "row")),
    (False, TernaryRecipe("least-squares", 128)),
    (False, TernaryRecipe("error-feedback", None)),
    (False, TernaryRecipe("error-feedback", "row")),
    (False, TernaryRecipe("error-feedback", 128)),
    (False, TernaryRecipe("error-feedback", 64)),
    (True, TernaryRecipe("absmean", None)),
    (True, TernaryRecipe("least-squares", None)),
    (True, TernaryRecipe("error-feedback", "row")),
    (True, TernaryRecipe("error-feedback", 128)),
]
"""Whether the model is rotated first, and how its weights are rounded."""

WINDOW = 512
"""Tokens of a window of the calibration text, at most."""


def main() -> None:
    """Convert, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    judge = BaselineComparison(
        arguments.checkpoint, read_text(arguments.text), max_tokens=arguments.max_tokens,
        device=arguments.device, dtype="float32",
    )  # fmt: skip
    seen = read_tokens(arguments.checkpoint, calibration(arguments.calibration))
    window = min(WINDOW, judge.model.config.max_position_embeddings)
    windows = seen.rows(window, arguments.calibration_tokens)
    results = []
    for rotated, recipe in STEPS:
        row = step(judge, arguments.checkpoint, rotated, recipe, windows)
        results.append(row)
        print(
            f"{row['step']:44} perplexity {row['perplexity']:10.2f}  divergence {row['kld']:.4f}  "
            f"same first choice {row['top_1']:.1%}  {row['bits']:.2f} bits  {row['seconds']:.0f} s",
            flush=True,
        )
    on_gpu = judge.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    facts = {
        "text": Path(arguments.text).name,
        "tokens": judge.tokens,
        "calibration": Path(arguments.calibration).name,
        "calibration_tokens": windows.numel(),
        "device": judge.device.type,
        "original": {"perplexity": results[0]["original"]},
    }
    what, measurement = (
        "ternary weights without training, step by step",
        Measurement(environment, results, facts),
    )
    print(f"saved {save(f'ternary-conversion-{arguments.name}', what, measurement)}")


def step(
    judge: BaselineComparison, checkpoint: Path, rotated: bool, recipe: TernaryRecipe, windows: torch.Tensor
) -> dict[str, Any]:
    """One row."""
    model = load_model(checkpoint, torch.float32, judge.device)
    began = time.perf_counter()
    if rotated:
        rotate(model)
    found = convert(model, recipe, windows)
    seconds = time.perf_counter() - began
    comparison = judge.compare(HeadedModel(model))
    weights = sum(t.codes.numel() for t in found.values())
    scales = sum(t.scale.numel() for t in found.values())
    group = {None: "a scale a tensor", "row": "a scale a row"}.get(
        recipe.group if not isinstance(recipe.group, int) else "", f"a scale for {recipe.group}"
    )
    return {
        "step": f"{'rotated, ' if rotated else ''}{recipe.quantizer}, {group}",
        "rotated": rotated, "quantizer": recipe.quantizer, "group": recipe.group,
        "perplexity": math.exp(comparison.other_nll.value), "kld": comparison.kld.mean.value,
        "top_1": comparison.top_1.value, "bits": 8 / 5 + 32 * scales / weights, "seconds": seconds,
        "original": math.exp(comparison.base_nll.value),
    }  # fmt: skip


if __name__ == "__main__":
    main()
