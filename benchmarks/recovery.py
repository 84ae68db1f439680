"""How near a model with ternary weights comes to its original in so many minutes of training on one GPU.

    python benchmarks/recovery.py SECTION... [--minutes N] [--minutes-a48 N] [--stop-after SECONDS]

    try    short courses of several settings, compared on the last tenth of wiki.valid; nothing is saved
    b158   the course with 8-bit inputs, compared with the original on wiki.test
    a48    the second stage, of 4-bit inputs, from the latent weights and moments of the first
    speed  tokens a second for several batches, and the peak of GPU memory

It trains on train-mix.jsonl.gz and the first nine tenths of wiki.valid, what wikilm-26m was trained on, and
never sees wiki.test. NEUZIP_DATA is where these lie. Work is kept in build/recovery: a section that was
stopped (--stop-after, or a signal) goes on when it is called again, and a48 needs what b158 left there.
Results are benchmarks/results/recovery.json, and recovery-SECTION.svg, the losses of each training run.
`curve` has POINTS comparisons on the last tenth of wiki.valid, made during training. Its minutes are those of
the training steps alone, while --minutes counts the comparisons too. With --name NAME the files are called
recovery-NAME.

    python benchmarks/recovery.py b158 --checkpoint smollm2-135m --name smollm2-135m --minutes 25
    python benchmarks/recovery.py b158 --checkpoint eval/demo/checkpoint --train my.txt --test demo \\
        --minutes 1 --length 128 --batch 8 --name demo              another model, on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from record import ROOT, Environment, Measurement, save_sections

from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import read_text
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.loop import picture_of_losses, read_log, run
from neuzip.train.recovery.course import Recovery
from neuzip.train.recovery.distill import LossWeights
from neuzip.train.recovery.latent import runnable
from neuzip.train.recovery.run import DRAWN, LOG, recover, thinned
from neuzip.train.recovery.settings import RecoverySettings
from neuzip.train.text import TrainingWindows

WHAT = "recovery of a model with ternary weights: perplexity against the original's"

STAGES = {
    "b158": RecoverySettings(activations="b1.58", lr=5e-4, noise=0.05, length=512, batch=32),
    "a48": RecoverySettings(activations="a4.8", lr=2e-4, noise=0.05, length=512, batch=32),
}
"""BitNet a4.8 goes on with about 2/3 of the first learning rate; here less, as the course is short."""

POINTS, POINT_TOKENS = 10, 32_768
"""Comparisons during a course, and the tokens of each."""

TRIES: dict[str, dict[str, Any]] = {
    "as b158": {},
    "rate 1e-3": {"lr": 1e-3},
    "rate 2e-4": {"lr": 2e-4},
    "a quarter of the batch": {"batch": 8},
    "four times the batch": {"batch": 128, "lr": 1e-3},
    "no noise": {"noise": 0.0},
    "noise 0.15": {"noise": 0.15},
    "temperature 2": {"loss": LossWeights(temperature=2.0)},
    "hidden states": {"loss": LossWeights(hidden=0.5)},
    "cross-entropy": {"loss": LossWeights(cross_entropy=0.1)},
    "a scale a row": {"group": "row"},
    "absmean, warmed up": {"scales": "absmean", "strength": 0.2},
    "SubLN": {"sub_norms": True},
}


def main() -> None:
    """Do the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=["try", "b158", "a48", "speed"])
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="of b158; of try, of all courses together"
    )
    parser.add_argument("--minutes-a48", type=float, default=5.0)
    parser.add_argument("--stop-after", type=float, help="seconds after which a course is stopped, to go on")
    parser.add_argument("--checkpoint", type=Path, help="the original; wikilm-26m if not given")
    parser.add_argument("--train", type=Path, nargs="+", help="texts")
    parser.add_argument("--test", help="text to compare on, as eval's --text")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--only", nargs="+", metavar="TRY", help="parts of the names of tries")
    parser.add_argument("--lr", type=float, help="of b158, in place of what stands here; a48 in proportion")
    parser.add_argument("--length", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--noise", type=float)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "recovery")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--name", help="of the result, recovery-NAME; recovery if not given")
    asked = parser.parse_args()
    asked.result = f"recovery-{asked.name}" if asked.name else "recovery"
    asked.work.mkdir(parents=True, exist_ok=True)
    _fill_in(asked)
    for section in asked.sections:
        if section == "try":
            tries(asked)
        elif section == "speed":
            speed(asked)
        else:
            stage(asked, section)


def _fill_in(asked: argparse.Namespace) -> None:
    """Give what was not asked for: wikilm-26m and its texts."""
    data = Path(os.environ["NEUZIP_DATA"]) if not (asked.checkpoint and asked.train) else Path()
    wiki = data / "wikitext-2"
    held_out = None
    if not asked.train:
        valid = (wiki / "wiki.valid.raw").read_text(encoding="utf-8")
        cut = valid.index("\n = ", len(valid) * 9 // 10) + 1  # an article begins there
        seen, held_out = asked.work / "valid-seen.txt", asked.work / "valid-held-out.txt"
        seen.write_text(valid[:cut], encoding="utf-8")
        held_out.write_text(valid[cut:], encoding="utf-8")
        asked.train = [data / "train-mix.jsonl.gz", seen]
    asked.checkpoint = asked.checkpoint or data / "wikilm-26m"
    asked.test = asked.test or str(wiki / "wiki.test.raw")
    asked.held_out = str(held_out or asked.test)
    asked.device = choose_device(asked.device)


def settings_of(asked: argparse.Namespace, section: str) -> RecoverySettings:
    """Those of a stage, with what was asked for."""
    base = STAGES[section]
    given = {"length": asked.length, "batch": asked.batch, "noise": asked.noise}
    lr = base.lr if asked.lr is None else asked.lr * base.lr / STAGES["b158"].lr
    return replace(base, lr=lr, **{name: value for name, value in given.items() if value is not None})


def windows_of(asked: argparse.Namespace, settings: RecoverySettings) -> TrainingWindows:
    """The training text, tokenised once."""
    if not hasattr(asked, "windows"):
        tokenizer = load_tokenizer(asked.checkpoint)
        asked.windows = TrainingWindows.of(tokenizer, asked.train, length=1, batch=1, seed=0)
    return replace(asked.windows, length=settings.length, per_batch=settings.batch, seed=settings.seed)


def teacher_of(asked: argparse.Namespace) -> Any:
    """The original, in bf16 on a GPU."""
    dtype = torch.float32 if asked.device.type == "cpu" else torch.bfloat16
    return load_model(asked.checkpoint, dtype, asked.device, attention=False)


def judge_of(asked: argparse.Namespace, text: str, max_tokens: int | None) -> BaselineComparison:
    """What compares with the original, in fp32."""
    return BaselineComparison(
        asked.checkpoint, read_text(text), max_tokens=max_tokens, device=asked.device.type, dtype="float32"
    )


def tries(asked: argparse.Namespace) -> None:
    """Short courses, each with the same time; a line for each."""
    chosen = {
        name: changes
        for name, changes in TRIES.items()
        if not asked.only or any(part in name for part in asked.only)
    }
    judge = judge_of(asked, asked.held_out, asked.max_tokens)
    seconds = 60 * asked.minutes / len(chosen)
    for name, changes in chosen.items():
        settings = replace(settings_of(asked, "b158"), **changes)
        windows = windows_of(asked, settings)
        course = Recovery.begin(asked.checkpoint, teacher_of(asked), windows, settings)
        steps = course.fit(seconds)
        figures = run(course.step, steps=steps, schedule=course.schedule(), budget_seconds=1.2 * seconds)
        found = judge.compare(quantised(course))
        taken = sum(one["seconds"] for one in figures)
        print(
            f"{name:24} ratio {found.perplexity_ratio.value:.4f}  divergence {found.kld.mean.value:.4f}"
            f"  last training loss {_mean_of_last(figures, 'kld'):.4f}  {len(figures)} steps,"
            f" {windows.epoch(len(figures)):.1f} epochs, {taken:.0f} s,"
            f" {sum(one['tokens'] for one in figures) / taken:,.0f} tokens/s",
            flush=True,
        )


def stage(asked: argparse.Namespace, section: str) -> None:
    """A whole course, its comparison, its log and its picture."""
    settings = settings_of(asked, section)
    work = asked.work
    first, state = work / "b158", work / "b158-state"
    src = asked.checkpoint if section == "b158" else first
    if section == "a48" and not state.exists():
        raise SystemExit(f"{state} is missing: do the section b158 first, with the same --work")
    windows = windows_of(asked, settings)
    course = Recovery.begin(src, teacher_of(asked), windows, settings)
    judge = judge_of(asked, asked.test, asked.max_tokens)
    curve = Curve(judge_of(asked, asked.held_out, POINT_TOKENS), work / f"{section}-curve.json")
    before: dict[str, Any] = {}
    began = time.monotonic()

    def start(course: Recovery, taken: int) -> None:
        if taken:
            print(f"going on after {taken} of {course.steps} steps", flush=True)
            curve.go_on(taken)
        else:
            before.update(figures_of(judge.compare(quantised(course))))
            (work / f"{section}-before.json").write_text(json.dumps(before))
            print(f"before: {before['ratio']:.4f} times the original's; {course.steps} steps", flush=True)
            curve.add(course, 0)

    def watch(number: int, figures: dict[str, float]) -> None:
        if (number + 1) % max(1, course.steps // POINTS) == 0:
            curve.add(course, number + 1)
        if number % 200 == 0:
            print(
                f"step {number} divergence {figures['kld']:.4f} {figures['tokens_per_second']:,.0f}/s",
                flush=True,
            )
        if asked.stop_after is not None and time.monotonic() - began > asked.stop_after:
            signal.raise_signal(signal.SIGINT)

    if (work / section).exists():  # an earlier course that came to its end
        shutil.rmtree(work / section)
    minutes = asked.minutes if section == "b158" else asked.minutes_a48
    found = recover(
        course, src, work / section, seconds=60 * minutes,
        from_state=None if section == "b158" else state, keep_state=state if section == "b158" else None,
        on_start=start, on_step=watch,
    )  # fmt: skip
    log = read_log(work / section / LOG)
    after = figures_of(judge.compare(HeadedModel(runnable(work / section, None, asked.device, judge.dtype))))
    seconds, tokens = (sum(one[name] for one in log) for name in ("seconds", "tokens"))
    result = {
        "checkpoint": asked.checkpoint.name,
        "train": [path.name for path in asked.train], "test": Path(asked.test).name,
        "tokens_compared": judge.tokens, "text_tokens": windows.tokens, "settings": asdict(settings),
        "minutes": minutes, "steps": len(log), "planned_steps": found.steps, "tokens": int(tokens),
        "epochs": tokens / windows.tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "peak_bytes": log[-1]["memory_bytes"], "last_divergence": _mean_of_last(log, "kld"),
        "before": json.loads((work / f"{section}-before.json").read_text()), "after": after,
        "curve": curve.timed(log), "curve_text": Path(asked.held_out).name,
    }  # fmt: skip
    if section == "a48":
        b158 = figures_of(judge.compare(HeadedModel(runnable(first, None, asked.device, judge.dtype))))
        result |= {"b158": b158, "ratio_to_b158": after["perplexity"] / b158["perplexity"]}
        print(f"a4.8 after b1.58: {result['ratio_to_b158']:.4f}")
    print(f"{section}: {after['ratio']:.4f} times the original's {after['original']:.2f}")
    results = ROOT / "benchmarks" / "results"
    picture_of_losses(thinned(log, DRAWN), results / f"{asked.result}-{section}.svg")
    packages = ("neuzip-toolkit", "torch", "transformers", "triton")
    environment = Environment.here(*packages, gpu=torch.cuda.is_available())
    print(f"saved {save_sections(asked.result, WHAT, {section: Measurement(environment, facts=result)})}")


def quantised(course: Recovery) -> HeadedModel:
    """The model in training, with weights and inputs as they will be stored and computed."""
    for layer in course.latent.values():
        layer.strength = 1.0
    return HeadedModel(course.student)


class Curve:
    """Comparisons with the original during a course, kept in a file, so that a stopped course goes on."""

    def __init__(self, judge: BaselineComparison, path: Path) -> None:
        self._judge, self._path = judge, path
        self._points: list[dict[str, float]] = []

    def go_on(self, taken: int) -> None:
        """Keep the points up to a step of a course that was stopped."""
        points = json.loads(self._path.read_text())
        self._points = [point for point in points if point["step"] <= taken]

    def add(self, course: Recovery, step: int) -> None:
        """Compare after a step."""
        found = figures_of(self._judge.compare(quantised(course)))
        self._points.append({"step": step, **{name: found[name] for name in ("ratio", "kld", "top_1")}})
        self._path.write_text(json.dumps(self._points))
        print(f"step {step}: {found['ratio']:.4f} times the original's, held out", flush=True)

    def timed(self, log: list[dict[str, float]]) -> list[dict[str, float]]:
        """The points, with minutes of training until then."""
        return [
            {"minutes": sum(one["seconds"] for one in log if one["step"] <= point["step"]) / 60, **point}
            for point in self._points
        ]


def speed(asked: argparse.Namespace) -> None:
    """Tokens a second of ten steps, for several batches."""
    for batch in (8, 16, 32, 64, 128):
        settings = replace(settings_of(asked, "b158"), batch=batch, scales="absmean")
        course = Recovery.begin(asked.checkpoint, teacher_of(asked), windows_of(asked, settings), settings)
        steps = course.fit(60)
        if asked.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        course.step(0, 0.0)
        peak = torch.cuda.max_memory_allocated() / 2**30 if asked.device.type == "cuda" else 0.0
        tokens = batch * settings.length
        print(f"{tokens:7} tokens a step: {steps * tokens / 60:,.0f} a second, {peak:.1f} GiB", flush=True)


def figures_of(comparison: Any) -> dict[str, Any]:
    """The figures of a comparison that are kept."""
    return {
        "original": math.exp(comparison.base_nll.value), "perplexity": math.exp(comparison.other_nll.value),
        "ratio": comparison.perplexity_ratio.value, "ratio_error": comparison.perplexity_ratio.standard_error,
        "kld": comparison.kld.mean.value, "top_1": comparison.top_1.value,
    }  # fmt: skip


def _mean_of_last(figures: list[dict[str, float]], name: str) -> float:
    last = figures[-50:]
    return sum(one[name] for one in last) / len(last)


if __name__ == "__main__":
    main()
