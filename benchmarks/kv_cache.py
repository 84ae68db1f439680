"""Keys and values in 8, 4 and 3 bits: perplexity, and divergence from the same model with them as they are.

    python benchmarks/kv_cache.py NAME CHECKPOINT TEXT [--max-tokens N] [--device D]

    python benchmarks/kv_cache.py demo eval/demo/checkpoint demo
    python benchmarks/kv_cache.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw

The result is benchmarks/results/kv_cache-NAME.json. Every token attends to quantised keys and values, its own
included; 16 stands for the checkpoint's own cache. Both spans of the codes are measured: "absmax", a scale a
token and head, and "minmax", which keeps a second number. Only the first N tokens are predicted (10,000): the
standard errors say what that is worth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import get_args

import torch
from record import Environment, Measurement, save

from neuzip.eval.measures.divergence import compare
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import EvaluationTask, prepare
from neuzip.eval.measures.texts import read_text
from neuzip.kernels import kv_cache
from neuzip.kernels.quantizers.kv import Range
from neuzip.runtime.hf.load import load_model

BITS = (8, 4, 3)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=10_000)
    parser.add_argument("--window", type=int, help="tokens predicted in a window")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    task = prepare(
        [arguments.checkpoint], read_text(arguments.text), conventions=["token"],
        window=arguments.window, max_tokens=arguments.max_tokens, device=arguments.device,
    )  # fmt: skip
    model = load_model(task.paths[0], task.dtype, task.device)
    base = HeadedModel(model)
    rows = []
    for bits, span in [(None, "absmax"), *((b, s) for b in BITS for s in get_args(Range))]:
        rows.append(_measure(task, base, HeadedModel(model, kv_bits=bits, kv_span=span)))
        print("  ".join(f"{name} {_short(value)}" for name, value in rows[-1].items()), flush=True)
    on_gpu = base.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    reading = task.compared
    facts = {
        "text": Path(task.text.name).name, "convention": reading.convention.rule,
        "tokens": reading.convention.tokens, "dtype": str(model.dtype).removeprefix("torch."),
        "device": task.place,
    }  # fmt: skip
    what = "quality of a model whose keys and values are kept in few bits"
    path = save(f"kv_cache-{arguments.name}", what, Measurement(environment, rows, facts))
    print(f"saved {path}")


def _measure(task: EvaluationTask, base: HeadedModel, other: HeadedModel) -> dict[str, object]:
    reading = task.compared
    began = time.monotonic()
    found = compare(base, other, reading.ids, reading.windows, reading.blocks).summary()
    perplexity = exponential(found.other_nll)
    return {
        "bits": other.kv_bits or 16,
        "span": other.kv_span if other.kv_bits else None,
        "bits_per_number": _bits_per_number(other),
        "perplexity": perplexity.value,
        "perplexity_standard_error": perplexity.standard_error,
        "nll_difference": found.nll_difference.value,
        "nll_difference_standard_error": found.nll_difference.standard_error,
        "kld": found.kld.mean.value,
        "kld_standard_error": found.kld.mean.standard_error,
        "kld_p999": found.kld.p999,
        "top_1": found.top_1.value,
        "seconds": time.monotonic() - began,
    }


def _bits_per_number(model: HeadedModel) -> float:
    """Of a key or value in the cache, its share of the scale included; not that of a text's first token."""
    if model.kv_bits is None:
        return 16.0
    config = model.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = kv_cache.empty((1, 1, 1, width), model.kv_bits, span=model.kv_span)
    first = 0 if heads.first_bits is None else heads.first_bits.nbytes
    return 8 * (heads.nbytes - first) / width


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
