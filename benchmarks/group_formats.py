"""Plain round-to-nearest formats on one checkpoint: what a mantissa bit costs is judged beside them.

    python benchmarks/group_formats.py NAME CHECKPOINT TEXT [--max-tokens N] [--device D]

    python benchmarks/group_formats.py wikilm-26m $NEUZIP_DATA/wikilm-26m \\
        $NEUZIP_DATA/wikitext-2/wiki.test.raw --max-tokens 16384

The result is benchmarks/results/group_formats-NAME.json, of the same tokens as sweep-NAME.json where that
was made with the same --max-tokens. Every weight of two or more dimensions is rounded, embeddings and head
too, all else stays; nothing is calibrated and nothing entropy-coded. Sizes are what the codes and their fp16
scales and offsets take, all else at 16 bits; no file is written. `symmetric` is a scale for the largest
magnitude of a group, as llama.cpp's Q8_0 (8 bits, groups of 32); `asymmetric` a scale and an offset for its
range.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from record import Environment, Measurement, save
from torch import Tensor, nn

from neuzip.eval.measures.divergence import compare
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import EvaluationTask, prepare
from neuzip.eval.measures.texts import read_text
from neuzip.runtime.hf.load import load_model


@dataclass(frozen=True)
class Format:
    """Whole numbers of some bits; so many weights that follow each other share a scale, or a row (None)."""

    name: str
    bits: int
    group: int | None
    offset: bool

    def rounded(self, weight: Tensor) -> Tensor:
        """What is left of a weight [rows, ...], fp32. Raises ValueError where groups do not fill it."""
        width = self.group or weight.flatten(1).shape[1]
        if weight.numel() % width:
            raise ValueError(f"{weight.numel()} weights are not cut into groups of {width}")
        groups = weight.reshape(-1, width)
        least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        if self.offset:
            offset, codes = least.half().float(), 2**self.bits - 1
            scale, first = ((most - offset) / codes).half().float(), 0
        else:
            offset, codes = torch.zeros_like(least), 2 ** (self.bits - 1) - 1
            scale, first = (torch.maximum(most, -least) / codes).half().float(), -codes
        code = ((groups - offset) / scale.where(scale > 0, 1)).round().clamp(first, codes)
        return (code * scale + offset).reshape(weight.shape)

    def bits_of(self, weight: Tensor) -> float:
        """What it takes for a weight."""
        numbers = weight.numel() / (self.group or weight.flatten(1).shape[1])
        return self.bits * weight.numel() + 16 * (2 if self.offset else 1) * numbers


FORMATS = (
    Format("8 bits, groups of 32, symmetric (Q8_0)", 8, 32, False),
    Format("8 bits, a scale a row, symmetric", 8, None, False),
    Format("6 bits, groups of 64, asymmetric", 6, 64, True),
    Format("5 bits, groups of 64, asymmetric", 5, 64, True),
    Format("4 bits, groups of 64, asymmetric", 4, 64, True),
)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--window", type=int, help="tokens predicted in a window")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    task = prepare(
        [arguments.checkpoint], read_text(arguments.text), conventions=["token"],
        window=arguments.window, max_tokens=arguments.max_tokens, device=arguments.device, dtype="float32",
    )  # fmt: skip
    model, other = (load_model(task.paths[0], task.dtype, task.device) for _ in range(2))
    rows = []
    for format in FORMATS:
        rows.append(_measure(task, HeadedModel(model), HeadedModel(other), format))
        print(
            f"{format.name:40}{rows[-1]['bits_per_weight']:8.3f} bits  KLD {rows[-1]['kld']:.3e}", flush=True
        )
    on_gpu = model.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    reading = task.readings[0]
    facts = {
        "text": Path(task.text.name).name, "convention": reading.convention.rule,
        "tokens": reading.convention.tokens, "device": task.place,
    }  # fmt: skip
    what = "size and quality of plain round-to-nearest formats"
    path = save(f"group_formats-{arguments.name}", what, Measurement(environment, rows, facts))
    print(f"saved {path}")


def _measure(
    task: EvaluationTask, base: HeadedModel, other: HeadedModel, format: Format
) -> dict[str, object]:
    bits, weights = round_all(base.model, other.model, format)
    reading = task.readings[0]
    found = compare(base, other, reading.ids, reading.windows, reading.blocks).summary()
    return {
        "format": format.name,
        "bits_per_weight": bits / weights,
        "ratio": bits / weights / 16,
        "perplexity": exponential(found.other_nll).value,
        "nll_difference": found.nll_difference.value,
        "nll_difference_standard_error": found.nll_difference.standard_error,
        "perplexity_ratio": found.perplexity_ratio.value,
        "kld": found.kld.mean.value,
        "kld_standard_error": found.kld.mean.standard_error,
        "kld_p999": found.kld.p999,
        "top_1": found.top_1.value,
    }


@torch.no_grad()
def round_all(model: nn.Module, other: nn.Module, format: Format) -> tuple[float, int]:
    """Give `other` the weights of `model`, its matrices rounded; the bits of all, and how many they are."""
    bits, weights = 0.0, 0
    for one, rounded in zip(model.parameters(), other.parameters(), strict=True):
        weights += one.numel()
        if one.dim() < 2:
            bits += 16 * one.numel()
            continue
        bits += format.bits_of(one)
        rounded.copy_(format.rounded(one.float()))
    return bits, weights


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
