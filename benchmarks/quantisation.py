"""The bits a weight that quantised models take at stated divergences, beside what they should take.

    python benchmarks/quantisation.py wikilm-26m CHECKPOINT TEXT --calibration train-mix.jsonl.gz [--tokens N]
    python benchmarks/quantisation.py SmolLM2-135M CHECKPOINT TEXT --calibration train-mix.jsonl.gz

The name says which rows of the table are measured. Weights are calibrated on one text, and the divergence is
measured on TEXT, which calibration has not seen. For each row the mean step is searched until the divergence
is at most the stated one and at least 97 % of it. Then the checkpoint is compressed with these codes: bits
are those of the whole weight files. A JSONL calibration text has a key `text` in each line. The result is the
section of that name in benchmarks/results/quantisation.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save_sections

from neuzip.compress import compress, make_plan
from neuzip.compress.rules import LOSSLESS, Rule
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import read_text
from neuzip.eval.plans.held_codes import HeldCodes
from neuzip.eval.plans.quantized_matrices import QuantizedMatrices
from neuzip.eval.plans.trial_model import TrialModel
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import find_parameters
from neuzip.eval.quantize.quantizer import Quantizer
from neuzip.eval.quantize.settings import CalibrationSettings
from neuzip.runtime.hf.bos import bos_in_front
from neuzip.runtime.hf.tokenizer import load_tokenizer

CLOSE, AIM = 0.97, 0.985
"""Share of a divergence that ends the search, and at which it aims."""


@dataclass(frozen=True)
class TableRow:
    """A divergence, in nats a token, and bits a weight: at most, and hoped for."""

    divergence: float
    must: float
    stretch: float


TABLE = {
    "wikilm-26m": (
        TableRow(0.0016, 5.25, 5.05),
        TableRow(0.0125, 3.78, 3.6),
        TableRow(0.05, 2.85, 2.65),
    ),
    "SmolLM2-135M": (TableRow(0.034, 4.95, 4.7), TableRow(0.25, 3.6, 3.3)),
}


def main() -> None:
    """Calibrate, search, compress, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TABLE)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--calibration", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens on which divergences are measured")
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=256, help="tokens of a window of calibration")
    parser.add_argument("--nearest", action="store_true", help="round to nearest, without feedback")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    judge = BaselineComparison(
        options.checkpoint, read_text(options.text), max_tokens=options.tokens, device=options.device
    )
    with FolderSource(options.checkpoint) as source, Workers() as workers:
        matrices = QuantizedMatrices.of(
            source, make_plan(source, [Rule("*", LOSSLESS)], workers, predict=True)
        )
        began = time.perf_counter()
        windows = calibration_windows(options)
        settings = CalibrationSettings(feedback=not options.nearest)
        names = [tensor.name for tensor in matrices.tensors]
        places = find_parameters(judge.model, source, matrices.tensors)
        quantizer = Quantizer.prepare(judge.model, source, names, windows, settings, places=places)
        seconds = time.perf_counter() - began
        print(f"calibrated on {windows.tokens:,} tokens in {seconds:.0f} s", flush=True)
        trials = TrialModel(judge.model, matrices.tensors, places)
        results = []
        for row in TABLE[options.name]:
            results.append(measured(row, options.checkpoint, judge, matrices, quantizer, trials, workers))
            print(line(results[-1]), flush=True)
    on_gpu = judge.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    facts = {
        "text": Path(options.text).name, "tokens": judge.tokens, "calibration": options.calibration.name,
        "calibration_tokens": windows.tokens, "feedback": settings.feedback,
        "calibration_s": round(seconds, 1), "threads": torch.get_num_threads(), "device": judge.device.type,
    }  # fmt: skip
    section = options.name + (" nearest" if options.nearest else "")
    what = "bits a weight of the whole model, everything included, at stated KL divergences"
    print(save_sections("quantisation", what, {section: Measurement(environment, results, facts)}))


def calibration_windows(options: argparse.Namespace) -> CalibrationWindows:
    """The first tokens of the calibration text, document by document, in windows."""
    tokenizer = load_tokenizer(options.checkpoint)
    opened = gzip.open if options.calibration.suffix == ".gz" else open
    ids: list[int] = []
    with opened(options.calibration, "rt", encoding="utf-8") as lines:
        for text in lines:
            ids += tokenizer(json.loads(text)["text"], add_special_tokens=False)["input_ids"]
            if len(ids) > options.calibration_tokens:
                break
    kept = torch.tensor(ids[: options.calibration_tokens + 1])
    return CalibrationWindows.of(kept, options.window, bos_in_front(tokenizer))


def measured(
    row: TableRow,
    checkpoint: Path,
    judge: BaselineComparison,
    matrices: QuantizedMatrices,
    quantizer: Quantizer,
    trials: TrialModel,
    workers: Workers,
) -> dict[str, Any]:
    """The bits of a checkpoint at the divergence of a row."""
    assert quantizer.curvature is not None
    step, tried, began = math.sqrt(row.divergence / quantizer.curvature), 0, time.perf_counter()
    while True:
        tried += 1
        codes = HeldCodes.of(quantizer.at(step), matrices.tensors, workers, lambda count: None)
        trials.take(codes)
        kld = judge.compare(trials.headed).kld.mean
        if CLOSE * row.divergence <= kld.value <= row.divergence:
            break
        step *= math.sqrt(AIM * row.divergence / kld.value)
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        rules = matrices.rules(codes.grids, [Rule("*", LOSSLESS)])
        report = compress(checkpoint, Path(folder) / "small", rules, prepared=codes)
    weights = sum(tensor.info.numel for tensor in matrices.source.tensors())
    bits = 8 * report.stored_weight_bytes / weights
    predicted = 8 * (matrices.fixed + quantizer.expected_bytes(step)) / weights
    return {
        "divergence": row.divergence, "kld": kld.value, "standard_error": kld.standard_error,
        "bits": round(bits, 4), "predicted_bits": round(predicted, 4),
        "must": row.must, "stretch": row.stretch, "step": step, "trials": tried,
        "predicted_kld": quantizer.curvature * step**2, "trials_s": round(seconds, 1),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row as a line of text, with whether it is within what was asked."""
    verdict = (
        "stretch" if row["bits"] <= row["stretch"] else "must" if row["bits"] <= row["must"] else "MISSED"
    )
    return (
        f"divergence {row['divergence']:<7} measured {row['kld']:.5f} +- {row['standard_error'] or 0:.5f}  "
        f"bits {row['bits']:.3f} (predicted {row['predicted_bits']:.3f})  must {row['must']}  "
        f"stretch {row['stretch']}: {verdict}  "
        f"{row['trials']} trials, {row['trials_s']:.0f} s"
    )


if __name__ == "__main__":
    main()
