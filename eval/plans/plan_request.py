"""The request of a plan by target, and the stages of the search for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuzip.choices import TargetScheme
from neuzip.compress.device import CPU, Device
from neuzip.compress.rules import LOSSLESS, Rule
from neuzip.eval.experts.expert_use import ExpertUse
from neuzip.eval.measures.comparison import Stage
from neuzip.eval.plans.calibration_text import CalibrationText
from neuzip.eval.plans.sensitivity import Method
from neuzip.eval.plans.target_values import CompressionTarget

DropLayers = int | Literal["auto"]
"""Number of layers to drop: 0 for none, "auto" for as many as pay."""


RequestedUse = ExpertUse | Literal["auto", "none"]
"""How often experts are chosen: as counted before; "auto" to count, "none" to treat all experts alike."""


@dataclass(frozen=True)
class TargetRequest:
    """A checkpoint to compress to a target.

    rules        matrices that they leave lossless may be rounded or quantised
    block_size   weights that share a normaliser in rounded tensors, None for none
    coder, jobs  device that encodes weights, and number of threads
    drop_layers  number of layers to drop, or "auto" for as many as pay
    expert_use   by which the experts of a layer get schemes of their own
    scheme       how the matrices are stored; for "quantized", block_size, drop_layers and expert_use have no
                 effect
    calibration  text for the steps and codes of quantised weights, None to round to nearest
    """

    src: Path
    dst: Path
    target: CompressionTarget
    method: Method
    rules: tuple[Rule, ...] = (Rule("*", LOSSLESS),)
    block_size: int | None = None
    coder: Device = CPU
    jobs: int | None = None
    drop_layers: DropLayers = 0
    expert_use: RequestedUse = "auto"
    scheme: TargetScheme = "rounded"
    calibration: CalibrationText | None = None


@dataclass(frozen=True)
class Stages:
    """The stages of a search in order, and `show`, which shows their progress."""

    show: Stage
    names: tuple[str, ...]

    @classmethod
    def of(cls, request: TargetRequest, show: Stage, *, trials: bool, result: bool) -> Stages:
        """The stages of a request, with or without trials, and with or without writing the result."""
        is_quantized = request.scheme == "quantized"
        names = {
            "sizes": not is_quantized,
            "calibration": is_quantized,
            "sensitivity": not is_quantized and request.method != "weights",
            "layers": request.drop_layers != 0,
            "trials": trials,
            "result": result,
        }
        return cls(show, tuple(name for name, takes_place in names.items() if takes_place))

    def at(self, name: str) -> Stage:
        """Shows the progress of one stage, with its number in the label."""
        if name not in self.names:
            return self.show
        where = f"stage {self.names.index(name) + 1} of {len(self.names)}"
        return lambda label, total, unit: self.show(f"{where}, {label}", total, unit)

    def all_at(self, name: str) -> Stages:
        """Shows the progress of all stages as that of one."""
        return Stages(self.at(name), ())
