"""The work of `neuzip recover`: trains a ternary model, and compares it with the original."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.choices import Activations, DeviceName, ScaleTraining, WholeGroup
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.recovery import show_comparison, show_recovery, warn_if_worse
from neuzip.cli.source import resolved_model
from neuzip.cli.text import count_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.requirements import require_device

if TYPE_CHECKING:
    from torch import device as Device
    from transformers import PreTrainedModel

    from neuzip.eval.measures.comparison import BaselineComparison
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.texts import Text
    from neuzip.train.recovery.course import Recovery
    from neuzip.train.recovery.settings import RecoverySettings
    from neuzip.train.text import TrainingWindows

WINDOW = 512
"""Tokens of a window, if the model has so many positions."""

UNITS = {"s": 1, "m": 60, "h": 3600}
"""Seconds of a unit of time."""


@dataclass(frozen=True)
class RecoverOptions:
    """What `neuzip recover` was started with: its options, by the names of their parameters."""

    src: str
    text: list[Path]
    output: Path
    original: str | None
    budget: str | None
    steps: int | None
    activations: Activations
    ternary_group: WholeGroup
    scales: ScaleTraining
    sub_norms: bool
    strength: float
    lr: float
    window: int | None
    batch: int
    kld: float
    hidden: float
    cross_entropy: float
    temperature: float
    noise: float
    seed: int
    from_state: Path | None
    keep_state: Path | None
    eval_text: str | None
    max_tokens: int
    device: DeviceName
    overwrite: bool

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that do not go together."""
        if (self.budget is None) == (self.steps is None):
            raise UsageError("recover needs either --budget or --steps", "give --budget TIME or --steps N")
        if self.original is not None and self.ternary_group != "tensor":
            raise UsageError(
                f"--ternary-group {self.ternary_group} has no effect with --original: {self.src} is ternary"
                " already",
                "leave out --ternary-group",
            )
        if self.kld == 0 and self.temperature != 1:
            raise UsageError(
                f"--temperature {self.temperature:g} has no effect with --kld 0", "leave one of them out"
            )

    def settings(self, length: int) -> RecoverySettings:
        """The settings of the training, with windows of `length` tokens."""
        from neuzip.train.recovery.distill import LossWeights
        from neuzip.train.recovery.settings import RecoverySettings

        return RecoverySettings(
            activations=self.activations, group=self.ternary_group, scales=self.scales,
            sub_norms=self.sub_norms, lr=self.lr, strength=self.strength,
            loss=LossWeights(self.kld, self.cross_entropy, self.hidden, self.temperature),
            noise=self.noise, length=length, batch=self.batch, seed=self.seed,
        )  # fmt: skip


def run(out: Output, options: RecoverOptions) -> None:
    """Train as the options say, and report. Raises NeuzipError."""
    require_device(options.device)
    options.refuse_contradictions()
    seconds = None if options.budget is None else seconds_of(options.budget)
    let_threads_sleep()
    out.loading()
    path, original, document = _read_sources(out, options)
    import_large()
    from neuzip.runtime.devices import choose_device
    from neuzip.runtime.hf.tokenizer import load_tokenizer
    from neuzip.train.recovery import course as recovery
    from neuzip.train.recovery import run
    from neuzip.train.recovery.latent import runnable
    from neuzip.train.text import TrainingWindows

    run.require_room(path, options.output, options.overwrite, options.keep_state, options.from_state)
    length = _window(options.window, original)
    settings = options.settings(length)
    device = choose_device(options.device)
    windows = TrainingWindows.of(
        load_tokenizer(original), options.text, length=length, batch=options.batch, seed=options.seed
    )
    baseline, teacher = _load_teacher(original, document, options, device)
    course = recovery.Recovery.begin(path, teacher, windows, settings)
    comparisons: dict[str, Comparison] = {}

    def compare(when: str, model: PreTrainedModel) -> None:
        if baseline is not None:
            comparisons[when] = _compare(out, baseline, when, model)

    def start(course: Recovery, taken: int) -> None:
        _show_start(out, course, windows, taken)
        for layer in course.latent.values():
            layer.strength = 1.0
        compare("before", course.student)

    with out.progress("recover", options.steps, unit="steps") as advance:
        result = run.recover(
            course, path, options.output, steps=options.steps, seconds=seconds,
            from_state=options.from_state, keep_state=options.keep_state, overwrite=options.overwrite,
            on_start=start, on_step=lambda *_: advance(1),
        )  # fmt: skip
    if baseline is not None:
        compare("after", runnable(options.output, None, device, baseline.dtype))
        warn_if_worse(out, comparisons["before"], comparisons["after"])
    figures = show_recovery(out, options.output, result, windows)
    out.result(
        {
            "src": path, "original": original, "dst": options.output, "settings": settings, **figures,
            "before": comparisons.get("before"), "after": comparisons.get("after"),
            "special_tokens": windows.special_tokens, "device": str(device),
        },
        quiet=[options.output],
    )  # fmt: skip


def _read_sources(out: Output, options: RecoverOptions) -> tuple[Path, Path, Text | None]:
    """The folders of SRC and of the original, and the text to compare on; refuses what cannot be written."""
    from neuzip.compress.overwrite_guard import refuse_existing, refuse_nesting, require_free
    from neuzip.eval.measures.texts import read_text

    for file in options.text:
        if not file.exists():
            raise NeuzipError(f"--text {file}: no such file", "give a UTF-8 text, a .jsonl or a .jsonl.gz")
    if not options.overwrite:
        refuse_existing(options.output, options.overwrite)
    document = None if options.eval_text is None else read_text(options.eval_text)
    path = resolved_model(out, options.src)
    original = path if options.original is None else resolved_model(out, options.original)
    require_free(path, options.output, options.overwrite)
    refuse_nesting(original, options.output)
    return path, original, document


def _window(window: int | None, original: Path) -> int:
    """Tokens of a window of the original. Raises UsageError for more than its positions."""
    from neuzip.runtime.hf.config import load_config
    from neuzip.runtime.hf.decoder import positions

    most = positions(load_config(original))
    if window is not None and most is not None and window > most:
        raise UsageError(f"--window {window}: {original} has {most} positions", f"give at most {most}")
    return window or min(WINDOW, most or WINDOW)


def _load_teacher(
    original: Path, document: Text | None, options: RecoverOptions, device: Device
) -> tuple[BaselineComparison | None, PreTrainedModel]:
    """The original to learn from, and what compares models with it if there is a text to compare on."""
    import torch

    from neuzip.eval.measures.comparison import BaselineComparison
    from neuzip.runtime.hf.load import load_model

    if document is not None:
        baseline = BaselineComparison(
            original, document, max_tokens=options.max_tokens, device=options.device
        )
        return baseline, baseline.model
    dtype = torch.float32 if device.type == "cpu" else None
    return None, load_model(original, dtype, device, attention=False)


def _compare(out: Output, baseline: BaselineComparison, when: str, model: PreTrainedModel) -> Comparison:
    """Compare a model with the original, and show the result."""
    from neuzip.eval.measures.head import HeadedModel

    with out.progress(f"evaluate {when}", baseline.tokens, unit="tokens") as advance:
        comparison = baseline.compare(HeadedModel(model), advance)
    show_comparison(out, when, comparison)
    return comparison


def _show_start(out: Output, course: Recovery, windows: TrainingWindows, taken: int) -> None:
    resumed = f", {taken} of them done already" if taken else ""
    out.status(f"{count_text(course.steps, 'step')} of {windows.per_batch * windows.length} tokens{resumed}")


def seconds_of(text: str) -> float:
    """A time such as 90s, 30m or 1.5h in seconds. Raises UsageError.

    >>> seconds_of("90s"), seconds_of("1.5h")
    (90.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or not float(match[1]):
        raise UsageError(f"--budget {text}: not a time", "give a number and s, m or h, such as 30m")
    return float(match[1]) * UNITS[match[2]]
