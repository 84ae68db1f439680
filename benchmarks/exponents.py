"""Entropies of sign, exponent and mantissa of trained and of random weights, as NeuZip's Figures 1 and 5.

    python benchmarks/exponents.py [NAME=CHECKPOINT ...]

    python benchmarks/exponents.py demo=eval/demo/checkpoint wikilm-26m=$NEUZIP_DATA/wikilm-26m

The result is benchmarks/results/exponents.json, with a row for each checkpoint of bf16 weights, and one for
the matrices of a layer of Llama-3 8B's shapes with the first weights that transformers draws. All weights of
matrices are counted, none sampled. `shares` has the exponents that at least one of 10,000 weights has.

Figures 1 and 5: NeuZip (arXiv 2410.20650), there of all parameters of Llama-3 8B.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from neuzip.eval.measures.histograms import Counts, bias
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime.load_file import load_file

BF16 = FORMATS["BF16"]
SEED = 0
LEAST_SHARE = 1e-4
"""The smallest share of an exponent that is written down."""

LAYER = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    num_hidden_layers=1, vocab_size=8,
)  # fmt: skip
"""One layer of Llama-3 8B, with next to no vocabulary."""


def main() -> None:
    """Count, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    arguments = parser.parse_args()
    rows = []
    for text in arguments.checkpoints:
        name, _, folder = text.partition("=")
        rows.append(row(name, "trained", trained(Path(folder))))
    rows.append(row("a layer of Llama-3 8B's shapes", "random", fresh()))
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", needs_commit=True)
    what = "entropies of the fields of bf16 weights, in bits, and shares of exponents"
    print(f"saved {save('exponents', what, Measurement(environment, rows, {'seed': SEED}))}")


def trained(folder: Path) -> Iterable[Tensor]:
    """All tensors of a checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).values()


def fresh() -> Iterable[Tensor]:
    """The first weights of the matrices of a layer."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM._from_config(LAYER, dtype=torch.bfloat16)
    return [parameter.detach() for parameter in model.model.layers.parameters()]


def row(name: str, kind: str, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Entropies and shares of the matrices among some tensors; printed."""
    counts = Counts.none(BF16)
    for tensor in tensors:
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
            counts += Counts.of(tensor.contiguous().flatten().view(torch.uint16).numpy(), BF16)
    entropies = counts.entropies
    shares = counts.exponents / counts.numel
    figures = {
        "model": name, "kind": kind, "weights": counts.numel,
        "sign_bits": entropies.sign, "exponent_bits": entropies.exponent, "mantissa_bits": entropies.mantissa,
        "shares": {str(i - bias(BF16)): float(s) for i, s in enumerate(shares) if s >= LEAST_SHARE},
    }  # fmt: skip
    print(
        f"{name:32} {counts.numel:12,} weights  sign {entropies.sign:.4f}"
        f"  exponent {entropies.exponent:.4f}  mantissa {entropies.mantissa:.4f}"
    )
    return figures


if __name__ == "__main__":
    main()
