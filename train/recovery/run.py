"""A recovery from its start to its files: training steps, stops and resumption, and the checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from neuzip.compress.overwrite_guard import refuse_nesting, require_free
from neuzip.compress.storing import storing
from neuzip.compress.workspace import clear, partial_name, publish, remove, workspace, write_file
from neuzip.compress.workspace import recover as undo_half_publish
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels.quantizers import Ternary
from neuzip.train.loop import Figures, picture_of_losses, read_log, run
from neuzip.train.recovery.course import STATE_FILE, Recovery, no_state

STATE_FOLDER, LOG, PICTURE, SETTINGS = "state", "recovery.jsonl", "recovery.svg", "recovery.json"
"""Files and folders beside a model in its folder. The state is removed once the model is written."""

CHECKPOINTS = 10
"""Number of times that the state is written in a run."""

DRAWN = 2000
"""Most steps in a picture."""


@dataclass(frozen=True, eq=False)
class Recovered:
    """A finished course: figures of its steps, the ternary weights, and the step at which it resumed."""

    figures: list[Figures]
    steps: int
    resumed_at: int
    ternary: dict[str, Ternary]

    @property
    def is_complete(self) -> bool:
        """Whether its budget was enough for all steps."""
        return len(self.figures) == self.steps


def recover(
    course: Recovery,
    src: str | os.PathLike[str],
    dst: Path,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    from_state: Path | None = None,
    keep_state: Path | None = None,
    overwrite: bool = False,
    on_start: Callable[[Recovery, int], None] = lambda course, taken: None,
    on_step: Callable[[int, Figures], None] = lambda number, figures: None,
) -> Recovered:
    """Train for `steps`, or as many as fit into `seconds`, and write the result, its log and a picture.

    A run that was stopped leaves its state beside `dst`; called again with the same settings it goes on.
    Seconds count from the first step on, and what went before is taken off. When they end, the learning rate
    has fallen to its least, even if steps take longer than those that were tried. `from_state` is what an
    earlier course left in `keep_state`: latent weights and moments.

    Raises NeuzipError, before anything is trained if `dst` exists or `keep_state` cannot be a folder.
    """
    require_room(src, dst, overwrite, keep_state, from_state)
    undo_half_publish(dst)
    if from_state is not None and not _goes_on(dst, overwrite):
        course.load_state(from_state, resume=False)  # before there is a workspace, which would stay
    with workspace(dst, find_checkpoint(src).root) as work:
        state, log = work / STATE_FOLDER, work / LOG
        taken = 0
        if (state / STATE_FILE).is_file() and not overwrite:
            taken = course.load_state(state)
            if steps is not None and steps != course.steps:
                raise UsageError(
                    f"{work}: was begun for {course.steps} steps",
                    "give as many, or `overwrite=True` to begin anew",
                )
        else:
            clear(work, overwrite)
            course.steps = steps if steps is not None else course.fit(_required(seconds))
        on_start(course, taken)
        schedule: Callable[[int], float] = course.schedule()
        budget = None
        if steps is None:
            budget = _required(seconds) - _spent(log, taken)
            schedule = within(schedule, course.steps, _required(seconds), budget)
        figures = run(
            course.step, steps=course.steps, schedule=schedule, log=log, start=taken,
            every=max(1, course.steps // CHECKPOINTS), checkpoint=lambda n: course.save_state(state, n),
            progress=on_step, budget_seconds=budget, device=course.device,
        )  # fmt: skip
        if keep_state is not None:
            course.save_state(keep_state, len(figures))
        with storing(work):
            ternary = course.write(src, work)
            picture_of_losses(thinned(figures, DRAWN), work / PICTURE)
            write_file(work / SETTINGS, (json.dumps(asdict(course.settings), indent=2) + "\n").encode())
            if state.exists():
                remove(state)
        publish(work, dst)
    return Recovered(figures, course.steps, taken, ternary)


def thinned(figures: list[Figures], count: int) -> list[Figures]:
    """At most `count` of the figures, evenly spaced, the last one among them."""
    every = max(1, -(-len(figures) // count))
    return figures[::-1][::every][::-1]


def require_room(
    src: str | os.PathLike[str],
    dst: Path,
    overwrite: bool,
    keep_state: Path | None = None,
    from_state: Path | None = None,
) -> None:
    """Raise NeuzipError where a result or the state to keep cannot be written, or `from_state` holds none."""
    require_free(src, dst, overwrite)
    if keep_state is not None:
        refuse_nesting(dst, keep_state)
        there = next(path for path in (keep_state, *keep_state.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NeuzipError(
                f"{keep_state}: cannot hold a state, as {there} is a file", "choose the name of a folder"
            )
    if from_state is not None and not _goes_on(dst, overwrite) and not (from_state / STATE_FILE).is_file():
        raise no_state(from_state / STATE_FILE)


def _goes_on(dst: Path, overwrite: bool) -> bool:
    """Whether a run that was stopped has left its state beside `dst`."""
    return not overwrite and (partial_name(dst) / STATE_FOLDER / STATE_FILE).is_file()


def _required(seconds: float | None) -> float:
    if seconds is None:
        raise UsageError("how long is it to be trained?", "give a number of steps, or a budget of time")
    return seconds


def within(
    schedule: Callable[[int], float], steps: int, seconds: float, left: float
) -> Callable[[int], float]:
    """A schedule that skips ahead when steps take longer than planned.

    `steps` were planned for `seconds`, of which `left` are left. The share that was used counts.
    """
    end = time.monotonic() + left

    def rate(step: int) -> float:
        share = 1 - (end - time.monotonic()) / seconds
        return schedule(max(step, round(share * steps)))

    return rate


def _spent(log: Path, taken: int) -> float:
    """Seconds that the first steps took."""
    if not taken or not log.is_file():
        return 0.0
    return sum(figures["seconds"] for figures in read_log(log) if figures["step"] <= taken)
