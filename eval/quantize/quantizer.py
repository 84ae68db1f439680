"""Integer codes for the matrices of a model from one number: the mean step.

At the optimum the sensitivity of a weight times its squared step is the same for all tensors, so the steps of
all tensors are in fixed proportions, and one number says how fine they all are.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from neuzip.compress.prepared import Codes
from neuzip.compress.schemes.code_tables import code_bits
from neuzip.compress.schemes.codec import TensorInput
from neuzip.compress.schemes.quantized_coding import count, expected_bytes, shifted, spread_of
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import (
    PartsByTensor,
    find_parameters,
    read_bits,
    values_for,
)
from neuzip.eval.quantize.gradients import OnTokens
from neuzip.eval.quantize.settings import CalibrationSettings
from neuzip.eval.quantize.statistics import ModelStatistics, gather
from neuzip.kernels.grid import MAX_CODE, MIN_CODE, Grid, factors
from neuzip.kernels.quantizers import ErrorSpread, grid_feedback
from neuzip.runtime.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CodesOnGrid = tuple[Codes, Grid]
"""Codes of a tensor, and their grid."""

ShowStage = Callable[[str, int, str], AbstractContextManager[OnTokens]]
"""show(label, total, unit) shows the progress of some work. Its context is a function that adds to it."""

SAMPLE = 1 << 16
"""Weights of a tensor from which its coded size is predicted."""

RANGE = 16.0
"""Largest factor between the step of a tensor, in units of its spread, and the usual one."""


def show_nothing(_label: str, _total: int, _unit: str) -> AbstractContextManager[OnTokens]:
    """Show no progress."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True, eq=False)
class CalibratedTensor:
    """A tensor that is quantised, and its share of the mean step.

    relative_step  its step, divided by the mean step
    rows           factor bytes of its rows, uint8 [R]; None for factors of 1
    errors         how errors of its columns are compensated; None to round to nearest
    sample         some of its weights, fp32 [n], divided by relative step and factors of rows
    least          the smallest step, so that all codes fit into 16 bits
    sensitivity    divergence for each squared error of a weight, less what is compensated; 0 if not known
    """

    tensor: SourceTensor
    relative_step: float
    rows: Tensor | None
    errors: ErrorSpread | None
    sample: Tensor
    least: float
    sensitivity: float

    def grid(self, step: float) -> Grid:
        """Its grid for a mean step."""
        return Grid(max(self.relative_step * step, self.least), self.rows)

    @property
    def device(self) -> torch.device:
        """Where its codes are computed: error feedback runs where the model ran."""
        return torch.device("cpu") if self.errors is None else self.errors.spread.device

    def codes(self, weight: Tensor, step: float) -> tuple[Tensor, Grid]:
        """Codes, int16 in the tensor's shape, of its weights, fp32 on `device`, for a step; and the grid.

        The codes are on `device`, the grid is on the CPU.
        """
        grid = self.grid(step)
        if self.errors is None:
            return grid.codes(weight), grid
        rows = weight.reshape(-1, weight.shape[-1])
        dtype = TORCH_DTYPES[self.tensor.info.dtype]
        return grid_feedback(rows, grid.to(self.device), self.errors, dtype).view(weight.shape), grid

    def expected_bytes(self, step: float) -> int:
        """About the bytes of its streams for a mean step."""
        info = self.tensor.info
        # numpy, because torch's threads cost more than they save where other processes are busy
        sampled = np.rint(self.sample.numpy() / np.float32(max(step, self.least / self.relative_step)))
        codes = sampled.clip(MIN_CODE, MAX_CODE).astype(np.int16)
        bits = code_bits(int(codes.min()), int(codes.max()))
        counted = count(shifted(codes, bits), bits)
        return expected_bytes(counted, info, rows=self.rows is not None, columns=False)


@dataclass(frozen=True, eq=False)
class QuantizedModel:
    """Codes of a model's tensors for one mean step; `identity` names the calibration and the step.

    Codes are computed whenever they are asked for; several threads may ask.
    """

    identity: str
    step: float
    quantizer: Quantizer

    def codes_of(self, name: str) -> CodesOnGrid | None:
        """The codes of a tensor in its shape, and their grid; None for a tensor that is not quantised."""
        return self.quantizer.codes(name, self.step)


class Quantizer:
    """Chooses codes for the tensors of a checkpoint. `prepare` makes one.

    `curvature` is the divergence predicted for a mean step of 1, in nats a token; it grows with the square of
    the step. None without calibration.

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
        self._launches = threading.Lock()  # threads that launch at once only wait for each other

    @classmethod
    def prepare(
        cls,
        model: PreTrainedModel | None,
        source: FolderSource,
        names: Sequence[str],
        windows: CalibrationWindows | None,
        settings: CalibrationSettings | None = None,
        stage: ShowStage = show_nothing,
        places: PartsByTensor | None = None,
    ) -> Quantizer:
        """Calibrate the matrices of these names; `source` has to stay open as long as codes are needed.

        model    the checkpoint as a live model with dense weights, or None for no calibration
        windows  tokens of a text; None for no calibration. Then steps follow the spread of a tensor's weights
        places   where the model holds the tensors; None to find out

        Raises NeuzipError for a model that computes NaN or infinity on the text.
        """
        settings = settings or CalibrationSettings()
        wanted = set(names)
        tensors = [tensor for tensor in source.tensors() if tensor.name in wanted]
        statistics = ModelStatistics({}, {})
        if model is not None and windows is not None:
            places = find_parameters(model, source, tensors) if places is None else places
            with stage("gradients", windows.tokens, "tokens") as advance:
                statistics = gather(model, places, windows, advance, grams=settings.feedback)
        with stage("steps", sum(tensor.info.numel for tensor in tensors), "weights") as advance:
            calibrated = _calibrate(source, tensors, statistics, advance)
        return cls(source, calibrated, _identity(settings, windows, calibrated), _curvature(calibrated))

    @cached_property
    def largest_step(self) -> float:
        """The mean step with which hardly a code differs from 0."""
        return max(float(one.sample.abs().max()) for one in self._tensors.values() if len(one.sample))

    def is_nearest(self, name: str) -> bool:
        """Whether a tensor is rounded to nearest: the text says nothing of its inputs."""
        return self._tensors[name].errors is None

    def at(self, step: float) -> QuantizedModel:
        """The codes for a mean step: the geometric mean of the tensors' steps, weighted by their sizes."""
        return QuantizedModel(f"{self._identity}-{step.hex()}", step, self)

    def expected_bytes(self, step: float) -> int:
        """About the bytes of all streams for a mean step, found without computing the codes."""
        return sum(one.expected_bytes(step) for one in self._tensors.values())

    def codes(self, name: str, step: float) -> CodesOnGrid | None:
        """The codes of one tensor for a mean step, and their grid."""
        calibrated = self._tensors.get(name)
        if calibrated is None:
            return None
        device = calibrated.device
        weight = _weights(self._source, calibrated.tensor, device)
        with self._launches if device.type == "cuda" else nullcontext():
            codes, grid = calibrated.codes(weight, step)
        return codes.cpu().numpy(), grid


def _weights(source: FolderSource, tensor: SourceTensor, device: torch.device | None = None) -> Tensor:
    """A tensor's weights as fp32, in its shape, on a device or the CPU."""
    like = torch.empty(0, dtype=TORCH_DTYPES[tensor.info.dtype], device=device)
    return values_for(tensor, read_bits(source, tensor), like).float()


def _calibrate(
    source: FolderSource, tensors: Sequence[SourceTensor], statistics: ModelStatistics, on_weights: OnTokens
) -> list[CalibratedTensor]:
    """Steps and feedback of tensors. Those with infinities or NaNs are left out.

    Where errors are compensated, the weights are read to the device of these, as for their codes.
    """
    compensations = _compensations(statistics.grams)
    choices = []
    for tensor in tensors:
        known = statistics.tensors.get(tensor.name)
        errors, share = compensations.get(known.gram if known else None, (None, 1.0))
        weight = _weights(source, tensor, errors.spread.device if errors else None)
        rms = float(weight.square().mean().sqrt())
        if math.isfinite(rms) and weight.numel():
            if known is None:
                choices.append(_uncalibrated(source, tensor, weight, rms))
            else:
                choices.append(_Choice.of(tensor, weight, None, errors, rms, known.sensitivity * share))
        on_weights(tensor.info.numel)
    return _with_steps(choices)


def _compensations(grams: dict[str, Tensor]) -> dict[str | None, tuple[ErrorSpread, float]]:
    """How errors are compensated, and the share of their divergence that is left, by keys of Gram matrices.

    The Gram matrices are removed one by one, as they take much memory.
    """
    compensations: dict[str | None, tuple[ErrorSpread, float]] = {}
    for key in list(grams):
        gram = grams.pop(key)
        energy = float(gram.diagonal().mean())
        if energy > 0:
            errors = ErrorSpread.of(gram)
            compensations[key] = errors, float(errors.pivots().mean()) / energy
    return compensations


@dataclass(frozen=True, eq=False)
class _Choice:
    """A tensor before its step is chosen.

    sample       some of its weights on the CPU, divided by their factors
    largest      the largest magnitude of a weight, divided by its factor
    rms          the root mean square of its weights
    sensitivity  as of CalibratedTensor
    """

    tensor: SourceTensor
    rows: Tensor | None
    errors: ErrorSpread | None
    sample: Tensor
    largest: float
    rms: float
    sensitivity: float

    @classmethod
    def of(
        cls,
        tensor: SourceTensor,
        weight: Tensor,
        rows: Tensor | None,
        errors: ErrorSpread | None,
        rms: float,
        sensitivity: float,
    ) -> _Choice:
        if rows is not None:
            weight = weight.reshape(len(rows), -1) / factors(rows)[:, None]
        return cls(tensor, rows, errors, _sample(weight), float(weight.abs().max()), rms, sensitivity)


def _uncalibrated(source: FolderSource, tensor: SourceTensor, weight: Tensor, rms: float) -> _Choice:
    """A tensor of which only the weights are known: its rows have the factors that a rule gives them."""
    if weight.dim() < 2 or not rms:
        return _Choice.of(tensor, weight, None, None, rms, 0.0)
    floats = TensorInput(tensor.info, source.reader(tensor))
    rows = spread_of(floats.read, tensor.info, floats.fmt).row_factors
    return _Choice.of(tensor, weight, rows, None, rms, 0.0)


def _with_steps(choices: Sequence[_Choice]) -> list[CalibratedTensor]:
    """Steps by 1 / sqrt(sensitivity), or by the spread of a tensor whose sensitivity is not known.

    Relative steps have a geometric mean of 1, weighted by the numbers of weights.
    """
    ratios = [1 / math.sqrt(c.sensitivity) / c.rms if c.sensitivity and c.rms else None for c in choices]
    sizes = [c.tensor.info.numel for c in choices]
    usual = _geometric_mean([(r, n) for r, n in zip(ratios, sizes, strict=True) if r is not None])
    steps = [
        (usual if ratio is None else min(max(ratio, usual / RANGE), usual * RANGE)) * (one.rms or 1.0)
        for one, ratio in zip(choices, ratios, strict=True)
    ]
    mean = _geometric_mean(list(zip(steps, sizes, strict=True)))
    return [
        CalibratedTensor(
            one.tensor, step / mean, one.rows, one.errors, one.sample / (step / mean),
            one.largest / MAX_CODE * 1.01 or 1.0, one.sensitivity,
        )
        for one, step in zip(choices, steps, strict=True)
    ]  # fmt: skip


def _curvature(tensors: Sequence[CalibratedTensor]) -> float | None:
    """The divergence for a mean step of 1: half of sensitivities times a twelfth of squared steps."""
    weighted = [one.sensitivity * one.tensor.info.numel * one.relative_step**2 for one in tensors]
    return math.fsum(weighted) / 24 if any(weighted) else None


def _geometric_mean(values: Sequence[tuple[float, int]]) -> float:
    """The geometric mean of numbers with weights, (number, weight); 1 of none."""
    total = sum(weight for _, weight in values)
    return math.exp(sum(math.log(value) * weight for value, weight in values) / total) if total else 1.0


def _sample(weight: Tensor) -> Tensor:
    """About SAMPLE weights, evenly spaced, on the CPU."""
    flat = weight.flatten()
    return flat[:: max(1, len(flat) // SAMPLE) | 1].to("cpu", copy=True)


def _identity(
    settings: CalibrationSettings, windows: CalibrationWindows | None, tensors: Sequence[CalibratedTensor]
) -> str:
    """A digest of all that codes follow from."""
    digest = hashlib.sha256(repr(settings).encode())
    if windows is not None:
        digest.update(windows.fed.cpu().numpy().tobytes())
    for one in tensors:
        digest.update(f"{one.tensor.name} {one.relative_step.hex()} {one.least.hex()}".encode())
        digest.update(b"" if one.rows is None else one.rows.numpy().tobytes())
        digest.update(b"" if one.errors is None else one.errors.spread.diagonal().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
