"""Keys and values in few bits: perplexity, and divergence from the same model with them as they are.

    python benchmarks/kv_cache.py NAME CHECKPOINT TEXT
        [--max-tokens N] [--window N] [--bits 8,4] [--forms A,B] [--device D] [--parts P]

    python benchmarks/kv_cache.py demo eval/demo/checkpoint demo
    python benchmarks/kv_cache.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw
    python benchmarks/kv_cache.py smollm2-135m SMOLLM2 wiki.test.raw --max-tokens 32768 --forms all
    python benchmarks/kv_cache.py wikilm-26m-long WIKILM wiki.test.raw --window 2000 --parts 8

The result is benchmarks/results/kv_cache-NAME.json, written anew after each row. Every token attends to
quantised keys and values, its own included; 16 stands for the checkpoint's own cache. Only the first N tokens
are predicted (10,000): the standard errors say what that is worth. "rotated" and "a4.8" are what --kv-form
takes; the others differ from "rotated" in what their names say. `stored_bits` are those of a key or value,
everything included that a text of one window stores, with whole tokens in the checkpoint's dtype, whichever
the model computes in here. `kld_by_part` are the mean divergences of the tokens of each of P equal parts of a
window, in order: whether the loss drifts with the position, for which the window should be long. `must` and
`stretch` are what a divergence should not exceed with so many stored bits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Environment, Measurement, save

from neuzip.eval.measures.comparison import RememberingModel
from neuzip.eval.measures.divergence import compare
from neuzip.eval.measures.estimates import Values, exponential
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import EvaluationTask, prepare
from neuzip.eval.measures.texts import read_text
from neuzip.eval.measures.windows import TokenWindow
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import FORMS as NAMED_FORMS
from neuzip.runtime.hf.kv_layers import HeadForm, KVLayer
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.kv_bits import KVBits, as_bits, in_short

BITS = (8, 6, 4, 3, 2)
ROTATED = NAMED_FORMS["rotated"]
FORMS: dict[str, HeadForm] = {
    **NAMED_FORMS,
    "groups of 16": replace(ROTATED, key_group=16, value_group=16),
    "groups of 32": replace(ROTATED, key_group=32, value_group=32),
    "groups of 64": replace(ROTATED, key_group=64, value_group=64),
    "no center": replace(ROTATED, still_wavelength=math.inf),
    "center of all channels": replace(ROTATED, still_wavelength=0.0),
    "center from a wavelength of 1,024": replace(ROTATED, still_wavelength=1024.0),
    "center from a wavelength of 16,384": replace(ROTATED, still_wavelength=16384.0),
    "no whole tokens": replace(ROTATED, whole=0, still_wavelength=math.inf),
    "8 whole tokens": replace(ROTATED, whole=8),
}

TARGETS: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "smollm2-135m": (
        (8.0, 8.5, 0.0006, 0.0003), (4.5, 5.0, 0.015, 0.010), (4.0, 4.5, 0.022, 0.014),
        (3.5, 4.0, 0.075, 0.050), (3.0, 3.5, 0.11, 0.07),
    ),
}  # fmt: skip
"""By name of a result: targets of "rotated" from above so many stored bits to so many, the most nats a token
and those of the stretch goal."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=10_000)
    parser.add_argument("--window", type=int, help="tokens predicted in a window")
    parser.add_argument(
        "--bits", default=",".join(map(str, BITS)), help="as --kv-bits takes them: 4,5/4,plan.json"
    )
    parser.add_argument("--forms", default=",".join(NAMED_FORMS), help="names of forms, or all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", type=int, default=4, help="parts of a window, for the loss by position")
    arguments = parser.parse_args()
    forms = list(FORMS) if arguments.forms == "all" else arguments.forms.split(",")
    bits = [int(b) if b.isdigit() else b for b in arguments.bits.split(",")]
    task = prepare(
        [arguments.checkpoint], read_text(arguments.text), conventions=["token"],
        window=arguments.window, max_tokens=arguments.max_tokens, device=arguments.device,
    )  # fmt: skip
    model = load_model(task.paths[0], task.dtype, task.device)
    base = RememberingModel(model)
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=base.device.type == "cuda")
    reading = task.compared
    facts = {
        "text": Path(task.text.name).name, "convention": reading.convention.rule,
        "tokens": reading.convention.tokens, "dtype": str(model.dtype).removeprefix("torch."),
        "device": task.place,
    }  # fmt: skip
    what = "quality of a model whose keys and values are kept in few bits"
    rows: list[dict[str, object]] = []
    window = max(w.stop - w.start for w in reading.windows)
    own = load_config(task.paths[0]).dtype or model.dtype
    cases = [(None, "rotated"), *((b, form) for b in bits for form in forms)]
    for b, form in cases:
        other = base if b is None else HeadedModel(model, kv_bits=as_bits(b), kv_form=FORMS[form])
        row = _measure(task, base, other, form, arguments.parts)
        row["stored_bits"] = _stored_bits(other, window, own)
        rows.append(row | _aims(arguments.name, form, row["stored_bits"]))
        print("  ".join(f"{name} {_short(value)}" for name, value in rows[-1].items()), flush=True)
        path = save(f"kv_cache-{arguments.name}", what, Measurement(environment, rows, facts))
    print(f"saved {path}")


def _measure(
    task: EvaluationTask, base: HeadedModel, other: HeadedModel, form: str, parts: int
) -> dict[str, Any]:
    reading = task.compared
    began = time.monotonic()
    paired = compare(base, other, reading.ids, reading.windows, reading.blocks)
    found = paired.summary()
    perplexity = exponential(found.other_nll)
    return {
        "bits": _in_row(other.kv_bits) if isinstance(other.kv_bits, KVBits) else 16,
        "form": form if other.kv_bits else None,
        "perplexity": perplexity.value,
        "perplexity_standard_error": perplexity.standard_error,
        "nll_difference": found.nll_difference.value,
        "nll_difference_standard_error": found.nll_difference.standard_error,
        "kld": found.kld.mean.value,
        "kld_standard_error": found.kld.mean.standard_error,
        "kld_p999": found.kld.p999,
        "top_1": found.top_1.value,
        "kld_by_part": _by_part(reading.windows, paired.kld, parts),
        "seconds": time.monotonic() - began,
    }


def _in_row(bits: KVBits) -> int | str:
    """Bits as a row of the result has them: 4, "5/4", or the mean of a plan."""
    words = in_short(bits.layers)
    return int(words) if words.isdigit() else words


def _aims(name: str, form: str, stored_bits: float) -> dict[str, object]:
    """The target of a row, if it has one."""
    if form == "rotated":
        for more_than, most, must, stretch in TARGETS.get(name, ()):
            if more_than < stored_bits <= most:
                return {"must": must, "stretch": stretch}
    return {}


def _by_part(windows: Sequence[TokenWindow], kld: Values, parts: int) -> list[float]:
    """The mean divergence of the tokens of each part of a window."""
    place = np.concatenate([np.arange(w.stop - w.start - w.scored, w.stop - w.start) for w in windows])
    part = place * parts // max(w.stop - w.start for w in windows)
    return [float(kld[part == i].mean(dtype=np.float64)) for i in range(parts) if (part == i).any()]


@torch.inference_mode()
def _stored_bits(model: HeadedModel, window: int, own: torch.dtype) -> float:
    """What a cache for the tokens of a window takes, by its numbers, if states have the dtype `own`."""
    if model.kv_bits is None:
        return 8.0 * own.itemsize
    cache = KVCache(model.model.config, model.kv_bits, form=model.kv_form, max_length=window)
    model.model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache)
    held = [heads for layer in cache.layers if isinstance(layer, KVLayer) for heads in layer.heads]
    whole = sum(heads.first.nbytes for heads in held if heads.first is not None)
    nbytes = cache.nbytes - whole + whole * own.itemsize / model.dtype.itemsize
    return 8 * nbytes / sum(math.prod(heads.words.shape[:3]) * heads.width for heads in held)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    torch.set_num_threads(min(2, torch.get_num_threads()))
    main()
