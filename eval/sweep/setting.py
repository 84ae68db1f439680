"""The setting of a sweep: what its figures would change with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.compress.device import CPU, Device
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.calibration_text import COMPARED, DEMO, CalibrationText, split_text
from neuzip.runtime.devices import choose_device


@dataclass(frozen=True)
class SweepSetting:
    """The checkpoint and text of a sweep, and how it is measured.

    `calibration` is the text for quantised weights, None to round them to nearest.
    """

    src: Path
    text: Text
    window: int | None = None
    max_tokens: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    residency: str = "dense"
    coder: Device = CPU
    jobs: int | None = None
    calibration: CalibrationText | None = None


def with_calibration(setting: SweepSetting, source: str, calibration: str) -> SweepSetting:
    """A setting with a text for quantised weights, and fewer tokens to measure on if it is part of the text.

    `source` names the text of the sweep; `calibration` is "none", another text, or "auto": for the built-in
    text its other topics, else what `max_tokens` leave of the text. Raises NeuzipError.
    """
    parts = split_text(
        setting.src, setting.text, source, calibration, choose_device(setting.device),
        setting.max_tokens or COMPARED,
    )  # fmt: skip
    is_rest = calibration == "auto" and source != DEMO
    max_tokens = parts.compared if is_rest else setting.max_tokens
    return replace(setting, max_tokens=max_tokens, calibration=parts.calibration)
