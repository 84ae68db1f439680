"""How a training run went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.run_folder import CHECKPOINT, LOG, MODEL, PICTURE
from neuzip.cli.text import bytes_text, seconds_text
from neuzip.errors import NeuzipError

if TYPE_CHECKING:
    from neuzip.train.configuration import TrainingConfiguration
    from neuzip.train.loop import Figures
    from neuzip.train.text import TrainingWindows
    from neuzip.train.trainer import Trainer

LAST = 20
"""Steps whose mean loss is the result: single ones differ by their windows."""


def show_training(
    out: Output,
    settings: TrainingConfiguration,
    trainer: Trainer,
    windows: TrainingWindows,
    figures: list[Figures],
    held_out_loss: float | None,
    seconds: float,
    world: int,
) -> None:
    import statistics

    if not figures:
        raise NeuzipError(
            f"{settings.output / LOG}: has no steps",
            "it was removed or emptied; start again with --overwrite",
        )
    last = [one["loss"] for one in figures[-LAST:]]
    loss = statistics.fmean(last)
    speed = statistics.median(one["tokens_per_second"] for one in figures)
    peak = max(int(one["memory_bytes"]) for one in figures)
    steps = len(figures)
    out.text(f"loss     {loss:.4f} nats per token, mean of the last {len(last)} of {steps:,} steps")
    if held_out_loss is not None:
        out.text(f"eval     {held_out_loss:.4f} nats per token of {settings.eval_text}")
    out.text(f"speed    {speed:,.0f} tokens/s")
    sizes = f"weights {bytes_text(trainer.stored_bytes)}, states {bytes_text(trainer.state_bytes)}"
    out.text(f"memory   peak {bytes_text(peak)}; between steps {sizes}")
    out.text(f"time     {seconds_text(seconds)}")
    out.text(f"model    {settings.output / MODEL}")
    out.text(f"plot     {settings.output / PICTURE}")
    if steps < settings.steps:
        out.hint(
            f"the time limit ended the run after {steps} of {settings.steps} steps; resume with --resume"
        )
    out.result(
        {
            "model": settings.output / MODEL, "checkpoint": settings.output / CHECKPOINT,
            "log": settings.output / LOG, "picture": settings.output / PICTURE,
            "steps": steps, "loss": loss, "loss_of_steps": len(last), "eval_loss": held_out_loss,
            "tokens_per_second": speed, "peak_bytes": peak, "weight_bytes": trainer.stored_bytes,
            "dense_weight_bytes": trainer.dense_bytes, "state_bytes": trainer.state_bytes,
            "special_tokens": windows.special_tokens, "device": str(trainer.device), "processes": world,
            "seconds": seconds,
        },
        quiet=[settings.output / MODEL],
    )  # fmt: skip
