"""What calibration of a quantised model goes by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CalibrationSettings:
    """How a model is calibrated.

    feedback  compensate the errors of columns by later ones, as inputs of the text go together; without it
              every weight is rounded to the nearest code
    """

    feedback: bool = True
