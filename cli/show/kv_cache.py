"""The bits of a KV cache that were chosen layer by layer, and what they do to the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import precise_text
from neuzip.cli.text import count_text, seconds_text
from neuzip.runtime.kv_bits import in_words

if TYPE_CHECKING:
    from neuzip.eval.kv_calibration import KVCalibration


def show_calibration(out: Output, calibration: KVCalibration) -> None:
    """Say on stderr which bits were chosen, and what they lose on the calibration text."""
    out.status(f"KV cache: {in_words(calibration.bits.layers)}; {calibration.stored_bits:.2f} with scales")
    out.status(
        f"KL divergence {precise_text(calibration.kld)} nats per token, limit {calibration.limit:g}, on"
        f" {calibration.tokens:,} tokens of {calibration.text};"
        f" {count_text(len(calibration.trials), 'choice')} measured, {seconds_text(calibration.seconds)}"
    )


def calibration_json(calibration: KVCalibration | None, plan: Path | None) -> dict[str, object] | None:
    """What `--json` says of a calibration, and the plan file that was written; None without one."""
    if calibration is None:
        return None
    return {
        "max_kld": calibration.limit,
        "kld": calibration.kld,
        "stored_bits": calibration.stored_bits,
        "trials": calibration.trials,
        "text": calibration.text,
        "tokens": calibration.tokens,
        "window": calibration.window,
        "seconds": calibration.seconds,
        "plan": plan,
    }
