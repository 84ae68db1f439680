"""Integer codes for the matrices of a model from one number: the mean step.

At the optimum the sensitivity of a weight times its squared step is the same for all tensors, so the steps of
all tensors are in fixed proportions, and one number says how fine they all are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import PartsByTensor, find_parameters, read_bits, values_for
from neuzip.eval.quantize.gradients import OnTokens, fisher_diagonal
from neuzip.eval.quantize.settings import CalibrationSettings
from neuzip.kernels.grid import MAX_CODE, Grid, factor_bytes, factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Codes = npt.NDArray[np.int16]

ShowStage = Callable[[str, int, str], AbstractContextManager[OnTokens]]
"""show(label, total, unit) shows the progress of some work. Its context is a function that adds to it."""

SAMPLE = 1 << 17
"""Weights of a tensor from which its coded size is predicted."""


@dataclass(frozen=True, eq=False)
class CalibratedTensor:
    """A tensor that is quantised, and its share of the mean step.

    relative_step  its step, divided by the mean step
    rows           factor bytes of its rows, uint8 [R], or None
    sample         some of its weights, fp32 [n], divided by relative step and factors
    least          the smallest step, so that all codes fit into 16 bits
    """

    tensor: SourceTensor
    relative_step: float
    rows: Tensor | None
    sample: Tensor
    least: float

    def grid(self, step: float) -> Grid:
        """Its grid for a mean step."""
        return Grid(max(self.relative_step * step, self.least), self.rows)

    def expected_bits(self, step: float) -> float:
        """About the bits of its codes for a mean step, from their entropy."""
        codes = (self.sample / max(step, self.least / self.relative_step)).round_().long()
        counts = torch.bincount(codes - codes.min()).double()
        chances = counts[counts > 0] / len(codes)
        return float(-(chances * chances.log2()).sum()) * self.tensor.info.numel


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """Codes of a model's tensors for one mean step; `identity` names the calibration and the step.

    Codes are computed when they are asked for.
    """

    identity: str
    step: float
    quantizer: Quantizer

    def codes_of(self, name: str) -> tuple[Codes, Grid] | None:
        """The codes of a tensor in its shape, and their grid; None for a tensor that is not quantised."""
        return self.quantizer.codes(name, self.step)


class Quantizer:
    """Chooses codes for the tensors of a checkpoint. `prepare` makes one.

    >>> quantizer = Quantizer.prepare(model, source, names, windows)  # doctest: +SKIP
    >>> compress(src, dst, rules, prepared=quantizer.at(0.01))        # doctest: +SKIP
    """

    def __init__(
        self,
        source: FolderSource,
        tensors: Sequence[CalibratedTensor],
        identity: str,
        curvature: float | None = None,
    ) -> None:
        self.curvature = curvature
        self._source = source
        self._tensors = {one.tensor.name: one for one in tensors}
        self._identity = identity

    @classmethod
    def prepare(
        cls,
        model: PreTrainedModel | None,
        source: FolderSource,
        names: Sequence[str],
        windows: CalibrationWindows | None,
        settings: CalibrationSettings | None = None,
        stage: ShowStage | None = None,
    ) -> Quantizer:
        """Calibrate the matrices of these names; `source` has to stay open as long as codes are needed.

        model    the checkpoint as a live model with dense weights, or None for no calibration
        windows  tokens of a text; None for no calibration. Then steps follow the spread of a tensor's weights

        Raises NeuzipError for a model that computes something else than finite numbers.
        """
        settings = settings or CalibrationSettings()
        wanted = set(names)
        tensors = [tensor for tensor in source.tensors() if tensor.name in wanted]
        sensitivities: dict[str, float] = {}
        if model is not None and windows is not None:
            places = find_parameters(model, source, tensors)
            sensitivities = _sensitivities(model, places, windows, stage)
        calibrated = _calibrate(source, tensors, sensitivities)
        curvature = _curvature(calibrated, sensitivities)
        return cls(source, calibrated, _identity(settings, windows, calibrated), curvature)

    @property
    def largest_step(self) -> float:
        """The mean step with which hardly a code differs from 0."""
        return max(float(one.sample.abs().max()) for one in self._tensors.values() if len(one.sample))

    def at(self, step: float) -> QuantizedModel:
        """The codes for a mean step: the geometric mean of the tensors' steps, weighted by their sizes."""
        return QuantizedModel(f"{self._identity}-{step.hex()}", step, self)

    def expected_bytes(self, step: float) -> int:
        """About the bytes of all codes for a mean step, found without computing the codes."""
        return math.ceil(sum(one.expected_bits(step) for one in self._tensors.values()) / 8)

    def codes(self, name: str, step: float) -> tuple[Codes, Grid] | None:
        """The codes of one tensor for a mean step, and their grid."""
        calibrated = self._tensors.get(name)
        if calibrated is None:
            return None
        grid = calibrated.grid(step)
        return grid.codes(_weights(self._source, calibrated.tensor)).numpy(), grid


def _weights(source: FolderSource, tensor: SourceTensor) -> Tensor:
    """A tensor's weights as fp32, in its shape."""
    return values_for(tensor, read_bits(source, tensor), torch.empty(0, dtype=torch.float32))


def _sensitivities(
    model: PreTrainedModel, places: PartsByTensor, windows: CalibrationWindows, stage: ShowStage | None
) -> dict[str, float]:
    """The mean Fisher information of a weight of each tensor that has a place in the model."""
    parameters = {part.parameter for part in places.values()}
    if stage is None:
        diagonal = fisher_diagonal(model, parameters, windows, lambda count: None)
    else:
        with stage("gradients", windows.tokens, "tokens") as advance:
            diagonal = fisher_diagonal(model, parameters, windows, advance)
    return {name: float(part.of(diagonal[part.parameter]).mean()) for name, part in places.items()}


def _calibrate(
    source: FolderSource, tensors: Sequence[SourceTensor], sensitivities: dict[str, float]
) -> list[CalibratedTensor]:
    """Steps and factors, normalised so that the weighted geometric mean of the relative steps is 1."""
    steps, prepared = [], []
    for tensor in tensors:
        weight = _weights(source, tensor)
        rows = weight.reshape(-1, weight.shape[-1])
        spread = float(weight.square().mean().sqrt()) or 1.0
        if not math.isfinite(spread):
            continue  # infinities and NaNs have no codes
        sensitivity = sensitivities.get(tensor.name, 0.0)
        row_bytes = factor_bytes((rows.square().mean(1).sqrt() / spread).sqrt().clamp(0.3, 3.0))
        steps.append(1 / math.sqrt(sensitivity) if sensitivity else spread)
        prepared.append((tensor, rows / factors(row_bytes)[:, None], row_bytes))
    sizes = [tensor.info.numel for tensor, _, _ in prepared]
    mean = math.exp(sum(math.log(s) * n for s, n in zip(steps, sizes, strict=True)) / max(1, sum(sizes)))
    return [
        CalibratedTensor(
            tensor,
            step / mean,
            row_bytes,
            _sample(scaled) / (step / mean),
            float(scaled.abs().max()) / MAX_CODE * 1.001 or 1.0,
        )
        for step, (tensor, scaled, row_bytes) in zip(steps, prepared, strict=True)
    ]


def _curvature(tensors: Sequence[CalibratedTensor], sensitivities: dict[str, float]) -> float | None:
    """KL divergence of rounding to nearest, in nats a token, at a mean step of 1; it grows with the square.

    To second order it is half the sum of Fisher information times squared errors, which are a twelfth of the
    squared steps. None without sensitivities.
    """
    if not sensitivities:
        return None
    return (
        math.fsum(
            sensitivities.get(one.tensor.name, 0.0)
            * one.tensor.info.numel
            * one.relative_step**2
            * (1.0 if one.rows is None else float(factors(one.rows).square().mean()))
            for one in tensors
        )
        / 24
    )


def _sample(weight: Tensor) -> Tensor:
    """About SAMPLE weights, evenly spaced."""
    flat = weight.flatten()
    return flat[:: max(1, len(flat) // SAMPLE) | 1].clone()


def _identity(
    settings: CalibrationSettings, windows: CalibrationWindows | None, tensors: Sequence[CalibratedTensor]
) -> str:
    """A digest of all that codes follow from."""
    digest = hashlib.sha256(repr(settings).encode())
    if windows is not None:
        digest.update(windows.fed.numpy().tobytes())
    for one in tensors:
        digest.update(f"{one.tensor.name} {one.relative_step.hex()} {one.least.hex()}".encode())
        digest.update(b"" if one.rows is None else one.rows.numpy().tobytes())
    return digest.hexdigest()[:32]
