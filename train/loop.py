"""The loop around training steps: learning rates, a log, checkpoints, a time budget, stops, a picture."""

from __future__ import annotations

import io
import json
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from neuzip.compress.workspace import write_file, writing
from neuzip.errors import NeuzipError, UsageError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

Figures = dict[str, float]
"""Figures of a step: step, loss, lr, tokens, seconds, tokens_per_second, memory_bytes, and more.

Steps are counted from 1 here, as people do, and from 0 where functions are given their number.
"""

Shape = Literal["cosine", "linear", "constant"]
SHAPES: tuple[Shape, ...] = ("cosine", "linear", "constant")

OVER = 1
"""The reason to stop if the time budget is used up. Signals, the other reasons, have larger numbers."""


@dataclass(frozen=True)
class Schedule:
    """Learning rates: from 0 up to `peak` in `warm_up` steps, then down to `least` times `peak` at the end.

    Step `warm_up` - 1 has the peak, step `steps` - 1 the least. With a `cooldown_peak`, the steps from
    `cooldown_start` on have this peak instead, so that the rate falls at once, and no weight decay.
    """

    peak: float
    steps: int
    warm_up: int = 0
    least: float = 0.1
    shape: Shape = "cosine"
    cooldown_peak: float | None = None
    cooldown_start: int = 0

    def __post_init__(self) -> None:
        if not (self.peak >= 0 and 0 <= self.least <= 1 and self.warm_up >= 0):
            raise UsageError(
                f"a schedule with lr {self.peak}, min_lr_ratio {self.least}, warmup_steps {self.warm_up}",
                "give lr and warmup_steps of at least 0, min_lr_ratio between 0 and 1",
            )
        if self.shape not in SHAPES:
            raise UsageError(f"there is no schedule {self.shape!r}", f"choose from {', '.join(SHAPES)}")

    def __call__(self, step: int) -> float:
        peak = self.peak if self.cooldown_peak is None or self.decays(step) else self.cooldown_peak
        return peak * self._share(step)

    def decays(self, step: int) -> bool:
        """Whether a step has weight decay."""
        return self.cooldown_peak is None or step < self.cooldown_start

    def _share(self, step: int) -> float:
        """The rate of a step as a share of the peak."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        if self.shape == "constant":
            return 1.0
        first = max(0, self.warm_up - 1)
        done = min(1.0, (step - first) / max(1, self.steps - 1 - first))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.least + (1 - self.least) * left


def run(
    step: Callable[[int, float], Figures],
    *,
    steps: int,
    schedule: Callable[[int], float],
    log: Path | None = None,
    start: int = 0,
    every: int | None = None,
    checkpoint: Callable[[int], None] | None = None,
    progress: Callable[[int, Figures], None] = lambda step, figures: None,
    budget_seconds: float | None = None,
    device: torch.device | None = None,
    agree: Callable[[int], int] = lambda reason: reason,
    stopped: Callable[[int], None] = lambda taken: None,
) -> list[Figures]:
    """Take the steps from `start` to `steps`: the figures of all, those of earlier runs from the log before.

    step        step(number, lr) trains and returns at least "loss"; of "tokens" the speed is derived
    log         JSON, a line a step; on resuming the lines from `start` on are written again
    checkpoint  called with the number of steps taken, after `every` so many, and when the run is stopped;
                not at its regular end, which is the caller's
    budget_seconds  no step begins later
    device      where it trains, and the memory is that is reported; the host if not given
    agree       gives the largest of the numbers that it is called with by all processes that train together,
                before every step: 0 to go on, otherwise why one of them stops
    stopped     called with the number of steps taken when a signal ends them, after the checkpoint

    SIGINT and SIGTERM let the step end and a checkpoint be written, and then take the effect they usually
    have; a second one has it at once. Raises NeuzipError when a loss or a norm is not finite, before such
    weights could become a checkpoint.
    """
    earlier = _earlier(log, start)
    records = list(earlier)
    began = time.monotonic()
    saved, why = start, 0
    with _log(log, earlier) as note, _signals() as caught:
        for number in range(start, steps):
            over = budget_seconds is not None and time.monotonic() - began >= budget_seconds
            why = agree(caught[0] if caught else OVER if over else 0)
            if why:
                break
            figures = _measured(step, number, schedule(number), device)
            records.append(figures)
            note(figures)
            progress(number, figures)
            _require_finite(figures)
            if checkpoint is not None and every and (number + 1) % every == 0 and number + 1 < steps:
                checkpoint(number + 1)
                saved = number + 1
        else:
            why = agree(caught[0] if caught else 0)
        taken = start + len(records) - len(earlier)
        if checkpoint is not None and saved < taken and (taken < steps or why):
            checkpoint(taken)
    if caught or why > OVER:
        stopped(taken)
        signal.raise_signal(max([why, *caught]))
        raise KeyboardInterrupt  # another process was told to stop, by a signal that this one ignores
    return records


def _require_finite(figures: Figures) -> None:
    """Raise NeuzipError for a step whose loss or norm is no number."""
    for name, words in (("loss", "the loss"), ("norm", "the norm of the gradients")):
        if not math.isfinite(figures.get(name, 0.0)):
            raise NeuzipError(
                f"step {figures['step']}: {words} is {figures[name]}",
                "go on from the last checkpoint with a lower learning rate, or with clipping",
            )


def _measured(
    step: Callable[[int, float], Figures], number: int, lr: float, device: torch.device | None
) -> Figures:
    began = time.perf_counter()
    own = step(number, lr)
    seconds = time.perf_counter() - began
    figures: Figures = {"step": number + 1, "loss": own["loss"], "lr": lr, **own, "seconds": seconds}
    if "tokens" in own:
        figures["tokens_per_second"] = own["tokens"] / seconds
    return {**figures, "memory_bytes": peak_memory(device)}


def peak_memory(device: torch.device | None) -> int:
    """The most bytes so far: of torch's tensors on a GPU, else of this process."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_log(path: Path) -> list[Figures]:
    """The figures of a log. Raises NeuzipError for what is none; a last line cut short is left out."""
    records: list[Figures] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # a run was killed while it wrote
                break
            raise NeuzipError(f"{path}: line {number} is not JSON: {error.msg}") from error
    return records


def _earlier(log: Path | None, start: int) -> list[Figures]:
    """The records of the log of steps before `start`."""
    if log is None or not start or not log.exists():
        return []
    return [figures for figures in read_log(log) if figures["step"] <= start]


@contextmanager
def _log(log: Path | None, earlier: Sequence[Figures]) -> Iterator[Callable[[Figures], None]]:
    """A function that adds a line, of which all are in the file as soon as it returns."""
    if log is None:
        yield lambda figures: None
        return
    write_file(log, "".join(json.dumps(figures) + "\n" for figures in earlier).encode())
    with open(log, "ab", buffering=0) as file:  # nothing is left to be written when a full disk is told

        def note(figures: Figures) -> None:
            line = (json.dumps(figures) + "\n").encode()
            with writing(log):
                while line:
                    line = line[file.write(line) :]

        yield note


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM is put in, instead of ending the process, if it would."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may say what signals do
        return
    both = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    # A shell has its background jobs ignore SIGINT: so does a run.
    before = {one: handler for one, handler in both.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        restore()

    for one in before:
        signal.signal(one, catch)
    try:
        yield caught
    finally:
        restore()


INK, ACCENT, FAINT = "#333333", "#2a6f97", "#e6e6e6"


def picture_of_losses(figures: Sequence[Figures], path: Path) -> None:
    """Draw losses, one by one and smoothed, as SVG or PNG. The same figures give the same bytes."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"{path}: is neither .svg nor .png", "choose a name that ends in one of them")
    from matplotlib import style

    target = io.BytesIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    metadata = nothing if path.suffix == ".svg" else {"Software": None}
    with style.context(["default", {"svg.hashsalt": "neuzip"}]):
        _draw(figures).savefig(target, format=path.suffix[1:], dpi=200, metadata=metadata)
    write_file(path, target.getvalue())


def _draw(figures: Sequence[Figures]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = [one["step"] for one in figures]
    losses = [one["loss"] for one in figures]
    axes.plot(steps, losses, color=ACCENT, alpha=0.35 if len(steps) > 20 else 1, linewidth=0.8)
    if len(steps) > 20:
        axes.plot(steps, smoothed(losses, len(losses) // 20), color=ACCENT, linewidth=1.6)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The means of each value and those before it, `window` of them or as many as there are."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    firsts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[first]) / (end - first) for end, first in enumerate(firsts, 1)]
