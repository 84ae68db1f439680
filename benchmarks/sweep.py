"""Every scheme and yardstick on one checkpoint, and plans of mantissa bits by target.

    python benchmarks/sweep.py NAME CHECKPOINT TEXT --calibration TEXT [--max-tokens N] [--out DIR]

    python benchmarks/sweep.py demo eval/demo/checkpoint demo --calibration train
    python benchmarks/sweep.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw \\
        --calibration $NEUZIP_DATA/wikitext-2/wiki.valid.raw

The result is benchmarks/results/sweep-NAME.json, with its picture in sweep-NAME.svg. Quantised weights are
calibrated on the calibration text (`train`: the demo's training text), and all is measured on TEXT. For each
yardstick it is shown how much smaller quantised weights of its divergence are, and whether that is as much as
they must be. For each of --mantissa-bits one plan of mantissa bits is made of the size that rounding all to
them takes, and one with the divergence that this brings, both on the calibration text. With --out a second
run goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from record import ROOT, Environment, Measurement, save

from neuzip.choices import SWEEP_SCHEMES
from neuzip.compress import compress
from neuzip.eval.demo import split_topics
from neuzip.eval.figure_files import svg
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import Document, Text, read_text
from neuzip.eval.plans.calibration_text import COMPARED
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.plan_search import find_plan
from neuzip.eval.plans.target_values import max_kld, target_size
from neuzip.eval.sweep.picture import draw
from neuzip.eval.sweep.rows import SweepRow
from neuzip.eval.sweep.run import sweep
from neuzip.eval.sweep.savings import Saving
from neuzip.eval.sweep.setting import SweepSetting, with_calibration
from neuzip.eval.sweep.setup import parse_schemes

TARGETS = {"q8_0": (0.10, 0.14)}
"""Shares by which quantised weights must be smaller than a yardstick at its divergence, and should be."""

TARGET = (0.15, 0.22)
"""The same shares for all other yardsticks."""


def main() -> None:
    """Sweep, make plans, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--schemes", default=SWEEP_SCHEMES)
    parser.add_argument("--yardsticks", default="all")
    parser.add_argument("--blocks", default="32,64,128,256,512")
    parser.add_argument("--methods", nargs="*", default=["fisher", "measured"])
    parser.add_argument("--mantissa-bits", type=int, nargs="*", default=[3, 2, 1])
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--window", type=int, help="tokens predicted in a window")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    text = replace(text, name=Path(text.name).name)  # not where it lies on this machine
    with tempfile.TemporaryDirectory() as folder:
        setting = SweepSetting(
            arguments.checkpoint, text, window=arguments.window, max_tokens=arguments.max_tokens,
            device=arguments.device,
        )  # fmt: skip
        source = "auto" if arguments.calibration == "train" else arguments.calibration
        setting = with_calibration(setting, arguments.text, source)
        schemes = parse_schemes(arguments.schemes, arguments.blocks, arguments.yardsticks)
        found = sweep(setting, schemes, arguments.out or Path(folder) / "sweep", stage)
        for row in found.rows:
            print(f"{row.scheme:10}{row.ratio:8.2%}{row.bits_per_weight:8.2f}{row.perplexity.value:10.3f}"
                  f"{row.comparison.kld.mean.value:12.3e}")  # fmt: skip
        savings = [_saving(saving) for saving in found.savings]
        uniform = {f"k{k}": k for k in arguments.mantissa_bits}
        rows = {uniform[row.scheme]: row for row in found.rows if row.scheme in uniform}
        plans = _plans(arguments, rows, text, Path(folder))
    picture = ROOT / "benchmarks" / "results" / f"sweep-{arguments.name}.svg"
    picture.write_bytes(svg(draw(found, arguments.name)))
    on_gpu = found.device != "cpu"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    facts = {
        "text": found.text, "convention": found.rule, "device": found.device, "front": list(found.front),
        "calibration": Path(arguments.calibration).name, "savings": savings, "plans": plans,
    }  # fmt: skip
    path = save(
        f"sweep-{arguments.name}",
        "size, quality, memory and speed by scheme and yardstick, and plans by target",
        Measurement(environment, list(map(_without_versions, found.rows)), facts),
    )
    print(f"saved {path} and {picture}")


def _saving(saving: Saving) -> dict[str, Any]:
    """Quantised weights compared with a yardstick, and how much smaller they must and should be; printed."""
    must, stretch = TARGETS.get(saving.yardstick, TARGET)
    if saving.saved is None:
        verdict = "outside of the curve"
    else:
        verdict = "stretch" if saving.saved >= stretch else "met" if saving.saved >= must else "missed"
        verdict = f"{saving.quantized_bits:.3f} bits, {saving.saved:.1%} smaller: {verdict}"
    print(f"{saving.yardstick:10}{saving.bits:8.3f} bits{saving.kld:12.3e}  quantised: {verdict}")
    return {**asdict(saving), "saved": saving.saved, "must": must, "stretch": stretch}


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[Any]:
    """Say what was done, and how long it took."""
    began = time.monotonic()
    yield lambda count: None
    print(f"    {label}: {total:,} {unit} in {time.monotonic() - began:.1f} s", flush=True)


def _without_versions(row: SweepRow) -> dict[str, Any]:
    return {name: value for name, value in row.to_json().items() if name not in ("schema", "depends_on")}


def _plans(
    arguments: argparse.Namespace, rows: dict[int, SweepRow], text: Text, folder: Path
) -> list[dict[str, object]]:
    """Plans of the sizes and of the divergences of the same number of bits everywhere, on a text unseen."""
    device = arguments.device
    calibrated = BaselineComparison(
        arguments.checkpoint, calibration(arguments.calibration), max_tokens=COMPARED, device=device
    )
    judge = BaselineComparison(
        arguments.checkpoint, text, window=arguments.window, max_tokens=arguments.max_tokens, device=device
    )
    results: list[dict[str, object]] = []
    for k, row in rows.items():
        divergence = _uniform_divergence(arguments.checkpoint, k, calibrated, folder / f"uniform-{k}")
        for method in arguments.methods:
            for target in (target_size(f"{row.bytes}B", 0), max_kld(f"{divergence:.6g}")):
                dst = folder / f"{method}-{k}-{target.kind}"
                request = TargetRequest(arguments.checkpoint, dst, target, method)
                results.append(_plan(request, row, calibrated, judge))
    return results


def _plan(
    request: TargetRequest, uniform: SweepRow, calibrated: BaselineComparison, judge: BaselineComparison
) -> dict[str, object]:
    """One plan by target, beside the same number of bits everywhere."""
    began = time.monotonic()
    plan = find_plan(request, calibrated, stage)
    seconds = time.monotonic() - began
    report = compress(request.src, request.dst, plan.rules)
    measured = judge.run(request.dst).comparison
    kld, uniform_kld = measured.kld.mean, uniform.comparison.kld.mean
    last = plan.trials[-1].comparison
    print(
        f"{request.method:9} {uniform.scheme} {request.target.kind:12}"
        f"{report.stored_weight_bytes / uniform.bytes:8.2%} of the bytes, KLD {kld.value:.3e},"
        f" {kld.value / uniform_kld.value:.2f} of that of the same bits everywhere",
        flush=True,
    )
    return {
        "method": request.method,
        "target": str(request.target),
        "of": uniform.scheme,
        "bytes": report.stored_weight_bytes,
        "uniform_bytes": uniform.bytes,
        "bits_per_weight": report.bits_per_weight,
        "uniform_bits_per_weight": uniform.bits_per_weight,
        "kld": kld.value,
        "kld_standard_error": kld.standard_error,
        "uniform_kld": uniform_kld.value,
        "uniform_kld_standard_error": uniform_kld.standard_error,
        "nll_difference": measured.nll_difference.value,
        "nll_difference_standard_error": measured.nll_difference.standard_error,
        "predicted_kld": plan.predicted_kld,
        "calibration_kld": None if last is None else last.kld.mean.value,
        "trials": len(plan.trials),
        "schemes": dict(plan.schemes),
        "seconds": seconds,
    }


def _uniform_divergence(checkpoint: Path, k: int, baseline: BaselineComparison, dst: Path) -> float:
    """The divergence of k bits everywhere on the calibration text: the target of a plan."""
    (scheme,) = parse_schemes(f"k{k}", "")
    compress(checkpoint, dst, scheme.rules, verify=False)
    return baseline.run(dst).comparison.kld.mean.value


def calibration(source: str) -> Text:
    """The text that is calibrated with."""
    if source != "train":
        return read_text(source)
    topics = split_topics()[0]
    return Text("the demo's training text", tuple(Document(f"topic {i}", t) for i, t in enumerate(topics)))


if __name__ == "__main__":
    main()
