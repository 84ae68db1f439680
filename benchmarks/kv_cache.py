"""Keys and values in few bits: perplexity, and divergence from the same model with them as they are.

    python benchmarks/kv_cache.py NAME CHECKPOINT TEXT
        [--max-tokens N] [--window N] [--bits 8,4] [--forms A B] [--device D] [--dtype T] [--parts P]
        [--kv-text TEXT] [--kv-window N] [--kv-tokens N] [--single-tokens N] [--about WORDS]

    python benchmarks/kv_cache.py demo eval/demo/checkpoint demo
    python benchmarks/kv_cache.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw
    python benchmarks/kv_cache.py smollm2-135m SMOLLM2 wiki.test.raw --max-tokens 32768 --forms all
    python benchmarks/kv_cache.py wikilm-26m-long WIKILM wiki.test.raw --window 2000 --parts 8
    python benchmarks/kv_cache.py wikilm-26m-auto WIKILM wiki.test.raw --bits auto:0.003 --kv-text VALID

The result is benchmarks/results/kv_cache-NAME.json, written anew after each row. Every token attends to
quantised keys and values, its own included; 16 stands for the checkpoint's own cache. Only the first N tokens
are predicted (10,000): the standard errors say what that is worth. "rotated" and "a4.8" are what --kv-form
takes; the others differ from "rotated" in what their names say. The bits of `auto:KLD` are chosen on
--kv-text, another text than TEXT, in windows of --kv-window tokens, of which --kv-tokens are read, and
--single-tokens for each layer alone. The bits of a number are stated as `stored_bits`: all that a text of one
window stores counts, with whole tokens in the checkpoint's dtype, whichever the model computes in here.
`kld_by_part` and `nll_by_part` are the mean divergences and losses of the tokens of each of P equal parts of
a window, in order: whether they drift with the position, for which the window should be long. `must` and
`stretch` are what a divergence should not exceed with so many stored bits. `about` says what CHECKPOINT is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from record import Environment, Measurement, save

from neuzip.compress.progress import unseen
from neuzip.eval.kv_calibration import KVCalibration, calibrate
from neuzip.eval.measures.comparison import RememberingModel
from neuzip.eval.measures.divergence import Paired, compare
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
from neuzip.runtime.kv_bits import KVBits, as_bits, auto_limit, in_short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BITS = (8, 6, 4, 3, 2)
WHAT = "quality of a model whose keys and values are kept in few bits"
ROTATED = NAMED_FORMS["rotated"]
FORMS: dict[str, HeadForm] = {
    **NAMED_FORMS,
    "groups of 16": replace(ROTATED, key_group=16, value_group=16),
    "groups of 32": replace(ROTATED, key_group=32, value_group=32),
    "groups of 64": replace(ROTATED, key_group=64, value_group=64),
    "no center": replace(ROTATED, still_wavelength=math.inf),
    "center that does not turn": replace(ROTATED, still_wavelength=4096.0, center_block=None),
    "center from a wavelength of 256": replace(ROTATED, still_wavelength=256.0, center_block=64),
    "center from a wavelength of 1,024": replace(ROTATED, still_wavelength=1024.0, center_block=256),
    "center from a wavelength of 4,096": replace(ROTATED, still_wavelength=4096.0, center_block=512),
    "no whole tokens": replace(ROTATED, whole=0, still_wavelength=math.inf),
    "4 whole tokens": replace(ROTATED, whole=4),
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
    arguments = _arguments()
    forms = list(FORMS) if arguments.forms == ["all"] else arguments.forms
    task = prepare(
        [arguments.checkpoint], read_text(arguments.text), conventions=["token"],
        window=arguments.window, max_tokens=arguments.max_tokens, device=arguments.device,
        dtype=arguments.dtype,
    )  # fmt: skip
    model = load_model(task.paths[0], task.dtype, task.device)
    base = RememberingModel(model)
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=base.device.type == "cuda")
    reading = task.compared
    facts = {
        "text": Path(task.text.name).name, "convention": reading.convention.rule,
        "tokens": reading.convention.tokens, "dtype": str(model.dtype).removeprefix("torch."),
        "device": task.place, **({"about": arguments.about} if arguments.about else {}),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    window = max(w.stop - w.start for w in reading.windows)
    own = load_config(task.paths[0]).dtype or model.dtype
    bits = arguments.bits.split(",")
    cases = [(b, form) for b in bits for form in (forms if auto_limit(b) is None else ["rotated"])]
    for b, form in cases:
        calibration = None if auto_limit(b) is None else _calibrated(arguments, model, b)
        chosen = as_bits(b) if calibration is None else calibration.bits
        other = HeadedModel(model, kv_bits=chosen, kv_form=FORMS[form])
        began = time.monotonic()
        paired = compare(base, other, reading.ids, reading.windows, reading.blocks)
        seconds = time.monotonic() - began
        if not rows:
            itself = replace(
                paired, other_nll=paired.base_nll, kld=0 * paired.kld, agrees=paired.agrees | True
            )
            rows.append({
                "bits": 16, "form": None, **_figures(task, itself, arguments.parts),
                "stored_bits": 8.0 * own.itemsize,
            })  # fmt: skip
        stored_bits = _stored_bits(other, window, own)
        rows.append({
            "bits": b if calibration else _in_row(chosen), "form": form,
            **_figures(task, paired, arguments.parts), "seconds": seconds, "stored_bits": stored_bits,
            **_aims(arguments.name, form, stored_bits),
            **({} if calibration is None else {"calibration": _told(calibration)}),
        })  # fmt: skip
        print("  ".join(f"{name} {_short(value)}" for name, value in rows[-1].items()), flush=True)
        path = save(f"kv_cache-{arguments.name}", WHAT, Measurement(environment, rows, facts))
    print(f"saved {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=10_000)
    parser.add_argument("--window", type=int, help="tokens predicted in a window")
    parser.add_argument(
        "--bits", default=",".join(map(str, BITS)), help="as --kv-bits takes them: 4,5/4,plan.json,auto:0.01"
    )
    parser.add_argument("--forms", nargs="+", default=list(NAMED_FORMS), help="names of forms, or all")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--dtype", default="auto", help="in which the model computes; on a CPU auto is float32"
    )
    parser.add_argument("--parts", type=int, default=4, help="parts of a window, for the loss by position")
    parser.add_argument("--kv-text", help="on which auto chooses bits")
    parser.add_argument("--kv-window", type=int, help="tokens of its windows")
    parser.add_argument("--kv-tokens", type=int, help="how many of its tokens are read")
    parser.add_argument("--single-tokens", type=int, help="how many are read for each layer alone")
    parser.add_argument("--about", help="what CHECKPOINT is")
    arguments = parser.parse_args()
    if "auto" in arguments.bits and arguments.kv_text is None:
        parser.error("--bits auto:KLD needs --kv-text")
    return arguments


def _calibrated(arguments: argparse.Namespace, model: PreTrainedModel, bits: str) -> KVCalibration:
    """The bits of `auto:KLD`, chosen on the text that --kv-text names."""
    limit = auto_limit(bits)
    assert limit is not None
    return calibrate(
        arguments.checkpoint, model, read_text(arguments.kv_text), limit, unseen,
        window=arguments.kv_window, max_tokens=arguments.kv_tokens, single_tokens=arguments.single_tokens,
    )  # fmt: skip


def _told(calibration: KVCalibration) -> dict[str, object]:
    """What a row says of the choice of its bits: those of keys and values of each layer, and the text."""
    facts, layers = calibration.facts(), calibration.bits.layers
    kept = ("max_kld", "kld", "text", "tokens", "window")
    return {
        **{key: facts[key] for key in kept}, "text": Path(calibration.text).name,
        "trials": calibration.trials, "seconds": calibration.seconds,
        "keys": " ".join("-" if pair is None else str(pair.keys) for pair in layers),
        "values": " ".join("-" if pair is None else str(pair.values) for pair in layers),
    }  # fmt: skip


def _figures(task: EvaluationTask, paired: Paired, parts: int) -> dict[str, Any]:
    found = paired.summary()
    perplexity = exponential(found.other_nll)
    return {
        "perplexity": perplexity.value,
        "perplexity_standard_error": perplexity.standard_error,
        "nll_difference": found.nll_difference.value,
        "nll_difference_standard_error": found.nll_difference.standard_error,
        "kld": found.kld.mean.value,
        "kld_standard_error": found.kld.mean.standard_error,
        "kld_p999": found.kld.p999,
        "top_1": found.top_1.value,
        "kld_by_part": _by_part(task.compared.windows, paired.kld, parts),
        "nll_by_part": _by_part(task.compared.windows, paired.other_nll, parts),
    }


def _in_row(bits: KVBits) -> int | str:
    """Bits as a row of the result has them: 4, "5/4", or the mean of a plan."""
    words = in_short(bits.layers)
    return int(words) if words.isdigit() else words


def _aims(name: str, form: str, stored_bits: float) -> dict[str, object]:
    """The target of a row, if it has one."""
    if form == "rotated":
        for more_than, most, must, stretch in TARGETS.get(name.removesuffix("-auto"), ()):
            if more_than < stored_bits <= most:
                return {"must": must, "stretch": stretch}
    return {}


def _by_part(windows: Sequence[TokenWindow], values: Values, parts: int) -> list[float]:
    """The mean over the tokens of each part of a window."""
    place = np.concatenate([np.arange(w.stop - w.start - w.scored, w.stop - w.start) for w in windows])
    part = place * parts // max(w.stop - w.start for w in windows)
    return [float(values[part == i].mean(dtype=np.float64)) for i in range(parts) if (part == i).any()]


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
