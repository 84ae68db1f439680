"""Quantised weights of a sweep: calibrated once, then compressed to several numbers of bits per weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuzip.compress import CompressionReport, compress, make_plan
from neuzip.compress.rules import rules_of_options
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import remove
from neuzip.errors import NeuzipError
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.plans.held_codes import HeldCodes
from neuzip.eval.plans.quantized_matrices import QuantizedMatrices, step_within
from neuzip.eval.quantize.quantizer import Quantizer
from neuzip.runtime.hf.load import load_model

from .setting import SweepSetting

CLOSE = 0.005
"""Share of a size by which a result may differ from it before the prediction is corrected."""

NEAR = 0.05
"""Share of a size by which a corrected result may be above it."""


class TooFewBits(NeuzipError):
    """No mean step makes a checkpoint so small."""


@dataclass(frozen=True, eq=False)
class SweepQuantizer:
    """Compresses one checkpoint to any number of bits per weight. `opened` makes one."""

    setting: SweepSetting
    workers: Workers
    matrices: QuantizedMatrices
    quantizer: Quantizer
    weights: int

    @classmethod
    @contextmanager
    def opened(
        cls, setting: SweepSetting, baseline: BaselineComparison, stage: Stage
    ) -> Iterator[SweepQuantizer]:
        """Calibrate, and keep the checkpoint open. Raises NeuzipError for one without matrices."""
        rules = rules_of_options(None, "none")
        with FolderSource(setting.src) as source, Workers(setting.jobs) as workers:
            plan = make_plan(source, rules, workers, predict=True)
            matrices = QuantizedMatrices.of(source, plan)
            names = [tensor.name for tensor in matrices.tensors]
            model, windows = None, None
            if setting.calibration is not None:
                windows = setting.calibration.windows(baseline)
                model = baseline.model
                if baseline.residency != "dense":
                    model = load_model(setting.src, baseline.dtype, baseline.device, attention=False)
            quantizer = Quantizer.prepare(model, source, names, windows, stage=stage)
            yield cls(setting, workers, matrices, quantizer, plan.weights)

    def compress(self, bits: float, dst: Path, stage: Stage) -> CompressionReport:
        """Write the checkpoint to `dst` with about so many bits per weight, of its weight files.

        A size that differs by more than `CLOSE` corrects the prediction, once. Raises NeuzipError, and
        TooFewBits.
        """
        limit = bits * self.weights / 8
        self._require(self._expected(self.quantizer.largest_step), limit)
        report = self._compress(limit, dst, stage)
        excess = report.stored_weight_bytes - limit
        if abs(excess) > CLOSE * limit:
            remove(dst)
            report = self._compress(limit - excess, dst, stage)
            self._require(report.stored_weight_bytes, limit * (1 + NEAR))
        return report

    def _require(self, nbytes: float, limit: float) -> None:
        """Raise TooFewBits if the smallest weight files are larger than the limit."""
        if nbytes > limit:
            bits = 8 * nbytes / self.weights
            raise TooFewBits(f"quantised weights take at least {bits:.2f} bits per weight here")

    def _compress(self, limit: float, dst: Path, stage: Stage) -> CompressionReport:
        """Compress with the finest step whose predicted bytes are within a limit, or with the coarsest."""
        setting, tensors = self.setting, self.matrices.tensors
        step = step_within(limit, self._expected, self.quantizer.largest_step)
        weights = sum(tensor.info.numel for tensor in tensors)
        with stage(f"{dst.name}: quantise", weights, "weights") as advance:
            codes = HeldCodes.of(self.quantizer.at(step), tensors, self.workers, advance)
        rules = self.matrices.rules(codes.grids, rules_of_options(None, "none"))
        with stage(f"{dst.name}: compress", weight_bytes(setting.src), "bytes") as advance:
            return compress(
                setting.src, dst, rules, jobs=setting.jobs, device=setting.coder, on_bytes=advance,
                prepared=codes,
            )  # fmt: skip

    def _expected(self, step: float) -> float:
        """Predicted bytes of the weight files for a mean step."""
        return self.matrices.fixed + self.quantizer.expected_bytes(step)
