"""Plans of quantised weights: one number, the mean step, from which the steps of all tensors follow.

size        the step whose predicted bytes reach the limit, by bisection; then the bytes that codes really
            take correct the prediction
divergence  trials in a live model. The divergence grows with the square of the step, so that few are
            needed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from neuzip.compress import compress, make_plan
from neuzip.compress.prepared import Codes, PreparedCodes
from neuzip.compress.rules import LOSSLESS
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.layers.drops import folder_beside
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.plans.held_codes import HeldCodes
from neuzip.eval.plans.plan_request import Stages, TargetRequest
from neuzip.eval.plans.plan_trials import SearchResult, Trial
from neuzip.eval.plans.quantized_matrices import FINEST, QuantizedMatrices, step_within
from neuzip.eval.plans.reach import UNCERTAIN, OutOfReach, out_of_reach
from neuzip.eval.plans.search import search_budget
from neuzip.eval.plans.target_values import sought_value
from neuzip.eval.plans.trial_model import MeasuredWeights, TrialModel
from neuzip.eval.quantize.checkpoint_parameters import PartsByTensor, find_parameters
from neuzip.eval.quantize.quantizer import Quantizer
from neuzip.kernels.grid import Grid

AIM = 0.997
"""Share of a size at which the search aims: predictions are a few thousandths off."""

LEAST = 0.99
"""Share of a size that a plan has to fill."""

CORRECTIONS = 5
"""Plans whose real bytes are counted, at most."""

GUESS = 14.4
"""Divergence, in nats a token, at the coarsest step, where nothing predicts it: trials correct it."""

TRIALS = 5
"""Steps that are compared with the original, at most."""

NARROW = 0.04
"""Relative difference of two divergences at which the search for a step ends: 0.03 bits a weight.

Divergences of steps that are nearer differ by chance, as other codes are chosen for all weights.
"""

MEASURED = 1.45
"""Measured divergences in those that curvature alone predicts.

They were 1.3 to 1.7 times as large on wikilm-26m and SmolLM2-135M, at 2.7 to 5.1 bits a weight
(benchmarks/results/quantisation.json).
"""


@dataclass(frozen=True)
class MeanStep:
    """A mean step; its `weight` is the divergence predicted for it, its `cost` the predicted bytes."""

    step: float
    weight: float
    cost: float

    @property
    def chosen(self) -> tuple[float, ...]:
        """What tells steps apart."""
        return (self.step,)


@dataclass(frozen=True)
class PlannedCodes:
    """Codes of a plan, for `compress`. With the identity of the plan, the same command resumes a run."""

    identity: str
    codes: PreparedCodes

    def codes_of(self, name: str) -> tuple[Codes, Grid] | None:
        """The codes of a tensor, and their grid; None for a tensor that is not quantised."""
        return self.codes.codes_of(name)


@dataclass(frozen=True)
class _Tried:
    """What a trial leaves: its figures, the grids of the tensors, and the comparison of their weights."""

    trial: Trial
    grids: Mapping[str, Grid]
    measured: MeasuredWeights | None = None


class QuantizedPlanner:
    """Plans of quantised weights for a request. `opened` makes one."""

    def __init__(
        self,
        request: TargetRequest,
        matrices: QuantizedMatrices,
        baseline: BaselineComparison | None,
        stages: Stages,
        workers: Workers,
    ) -> None:
        self._request, self._matrices, self._workers = request, matrices, workers
        self._held: tuple[float, HeldCodes] | None = None
        self._baseline, self._stages, self._stage = baseline, stages, stages.at("trials")
        self._attempts = 0

    @classmethod
    @contextmanager
    def opened(
        cls, request: TargetRequest, baseline: BaselineComparison | None, stages: Stages
    ) -> Iterator[QuantizedPlanner]:
        """A planner, as long as the checkpoint is open. Raises NeuzipError for one without matrices."""
        with FolderSource(request.src) as source, Workers(request.jobs) as workers:
            plan = make_plan(source, request.rules, workers, predict=True)
            yield cls(request, QuantizedMatrices.of(source, plan), baseline, stages, workers)

    @cached_property
    def _quantizer(self) -> Quantizer:
        """Calibrates when it is first used, if the request has a text for it."""
        calibration, windows, model = self._request.calibration, None, None
        if calibration is not None:
            assert self._baseline is not None, "calibration needs the model"
            windows, model = calibration.windows(self._baseline), self._baseline.model
        names = [t.name for t in self._matrices.tensors]
        show = self._stages.at("calibration")
        places = None if windows is None else self._places
        return Quantizer.prepare(model, self._matrices.source, names, windows, stage=show, places=places)

    @cached_property
    def _places(self) -> PartsByTensor:
        """Where the original holds the matrices."""
        assert self._baseline is not None, "without a model nothing is placed"
        return find_parameters(self._baseline.model, self._matrices.source, self._matrices.tensors)

    def comments(self, search: SearchResult) -> list[str]:
        """What the file of a plan says of its codes."""
        if search.mean_step is None:
            return []
        calibration = self._request.calibration
        if calibration is None:
            return ["codes: weights rounded to nearest"]
        return [f"codes: error feedback from {calibration.name}; the rules alone round to nearest"]

    def prepared(self, step: float, key: str) -> PlannedCodes:
        """The codes of the plan with a mean step that the search with this key has found."""
        codes = self._codes(step, self._stages.at("result"), "quantise")
        return PlannedCodes(f"{key} {step.hex()}", codes)

    def best(self) -> SearchResult:
        """The plan that reaches the target, by trials. Raises OutOfReach for a size that none reaches."""
        if self._is_lossless:
            return self._result(self._nothing_lost(), (), 0)
        return self._by_size() if self._request.target.limits_size else self._by_quality()

    def untried(self) -> SearchResult:
        """The plan that is predicted to reach the target, without a trial.

        Raises NeuzipError where nothing predicts it: a divergence without calibration.
        """
        target = self._request.target
        if self._is_lossless:
            return self._result(self._nothing_lost(), (), 0)
        if target.limits_size:
            step = self._step_for(AIM * target.limit)
        elif self._quantizer.curvature is None:
            raise NeuzipError(
                f"{target}: without calibration nothing predicts it but trials",
                "leave out `dry_run`, or give `calibration` a text",
            )
        else:
            step = self._choose(target.limit).step
        if step == 0:
            return self._result(self._nothing_lost(), (), 0)
        trial = Trial(self._divergence(step), self._expected(step), None, step)
        codes = self._codes(step, self._stages.show, "quantise")
        return self._result(_Tried(trial, codes.grids), (), 0)

    @property
    def _is_lossless(self) -> bool:
        """Whether the target is a size that lossless compression reaches."""
        target = self._request.target
        return target.limits_size and self._matrices.lossless * (1 + UNCERTAIN) <= target.limit

    def _by_size(self) -> SearchResult:
        """The finest step whose weight files are within the limit. They fill all but 1 % of it, if any do."""
        limit, fixed = math.floor(self._request.target.limit), self._matrices.fixed
        wanted = AIM * limit - fixed
        predicted, tried = [wanted], list[_Tried]()
        while len(tried) < CORRECTIONS:
            tried.append(self._written(self._step_for(fixed + predicted[-1])))
            if LEAST * limit <= tried[-1].trial.bytes <= limit:
                break
            real = [one.trial.bytes - fixed for one in tried]
            predicted.append(_prediction_for(wanted, predicted, real))
        within = [one for one in tried if one.trial.bytes <= limit]
        if not within:
            raise self._out_of_reach(min(one.trial.bytes for one in tried))
        best = max(within, key=lambda one: one.trial.bytes)
        return self._result(best, [one.trial for one in tried if one is not best], 0)

    def _by_quality(self) -> SearchResult:
        """The coarsest step whose divergence, or increase of loss, is within the limit."""
        assert self._baseline is not None, "a quality is measured"
        model = TrialModel(self._baseline.model, self._matrices.tensors, self._places)
        *others, best = search_budget(
            self._choose, lambda choice: self._compared(choice, model), self._request.target.limit,
            most=TRIALS, narrow=NARROW,
        )  # fmt: skip
        return self._result(best.product, [attempt.product.trial for attempt in others], model.unplaced)

    def _expected(self, step: float) -> int:
        """Predicted bytes of the weight files."""
        return self._matrices.fixed + self._quantizer.expected_bytes(step)

    def _step_for(self, nbytes: float) -> float:
        """The finest step with which the weight files are predicted to take at most so many bytes."""
        largest = self._quantizer.largest_step
        if self._expected(largest) > nbytes:
            raise self._out_of_reach(self._expected(largest))
        return step_within(nbytes, self._expected, largest)

    def _curvature(self) -> float:
        """The divergence for a mean step of 1, a guess without calibration."""
        known = self._quantizer.curvature
        return GUESS / self._quantizer.largest_step**2 if known is None else MEASURED * known

    def _divergence(self, step: float) -> float | None:
        """The divergence that calibration predicts for a step, None without calibration."""
        return None if self._quantizer.curvature is None else self._curvature() * step**2

    def _choose(self, budget: float) -> MeanStep:
        """The step that is predicted to bring a divergence of `budget`; 0 for no divergence."""
        if budget == 0:
            return MeanStep(0.0, 0.0, self._matrices.lossless)
        largest = self._quantizer.largest_step
        step = min(max(math.sqrt(budget / self._curvature()), largest * FINEST), largest)
        return MeanStep(step, self._curvature() * step**2, self._expected(step))

    def _out_of_reach(self, least: float) -> OutOfReach:
        original = weight_bytes(self._request.src)
        return out_of_reach(self._request.target, least, original, quantized=True)

    def _written(self, step: float) -> _Tried:
        """Compress with the codes of a step in a folder beside DST, which counts their bytes."""
        request = self._request
        self._attempts += 1
        codes = self._codes(step, self._stage, f"trial {self._attempts}: quantise")
        grids = codes.grids
        label = f"trial {self._attempts}: compress"
        with (
            folder_beside(request.dst, "trial") as folder,
            self._stage(label, weight_bytes(request.src), "bytes") as advance,
        ):
            report = compress(
                request.src, folder / "trial", self._matrices.rules(grids, request.rules), verify=False,
                jobs=request.jobs, device=request.coder, on_bytes=advance, prepared=codes,
            )  # fmt: skip
        trial = Trial(self._divergence(step), report.stored_weight_bytes, None, step)
        return _Tried(trial, grids)

    def _compared(self, choice: MeanStep, model: TrialModel) -> tuple[Estimate, _Tried]:
        """Compare the original with the weights that the codes of a step stand for."""
        assert self._baseline is not None
        step = choice.step
        if step == 0:
            return Estimate(0.0, None), self._nothing_lost()
        self._attempts += 1
        codes = self._codes(step, self._stage, f"trial {self._attempts}: quantise")
        with self._stage(f"trial {self._attempts}: restore", self._matrices.weights, "weights") as advance:
            checksums = model.take(codes, advance)
        comparison, estimate = None, Estimate(math.inf, None)
        label = f"trial {self._attempts}: compare"
        with suppress(NotFinite), self._stage(label, self._baseline.tokens, "tokens") as advance:
            comparison = self._baseline.compare(model.headed, advance)
            estimate = sought_value(self._request.target.kind, comparison)
        trial = Trial(self._divergence(step), round(choice.cost), comparison, step)
        measured = None if comparison is None else MeasuredWeights(checksums, comparison)
        return estimate, _Tried(trial, codes.grids, measured)

    def _codes(self, step: float, stage: Stage, label: str) -> HeldCodes:
        """The codes of a step. Those of the last step are held."""
        if self._held is None or self._held[0] != step:
            self._held = None
            with stage(label, self._matrices.weights, "weights") as advance:
                codes = HeldCodes.of(self._quantizer.at(step), self._matrices.tensors, self._workers, advance)
            self._held = step, codes
        return self._held[1]

    def _nearest(self, names: Iterable[str]) -> int:
        """How many tensors are rounded to nearest although there is a text that calibrates."""
        return 0 if self._request.calibration is None else sum(map(self._quantizer.is_nearest, names))

    def _nothing_lost(self) -> _Tried:
        return _Tried(Trial(0.0, self._matrices.lossless, None), {})

    def _result(self, last: _Tried, others: Sequence[Trial], unplaced: int) -> SearchResult:
        quantised = sum(1 + len(self._matrices.aliases.get(name, ())) for name in last.grids)
        counts = {"quantized": quantised, str(LOSSLESS): self._matrices.count - quantised}
        is_tried = last.trial.comparison is not None or self._attempts > 0
        return SearchResult(
            rules=self._matrices.rules(last.grids, self._request.rules),
            schemes=tuple((scheme, count) for scheme, count in counts.items() if count),
            predicted_kld=last.trial.predicted_kld,
            bytes=last.trial.bytes,
            trials=(*others, last.trial) if is_tried else (),
            estimated=unplaced,
            measured=last.measured,
            mean_step=last.trial.mean_step,
            nearest=self._nearest(last.grids),
        )


def _prediction_for(wanted: float, predicted: Sequence[float], real: Sequence[float]) -> float:
    """The predicted bytes of codes that really take `wanted`, after some were predicted and counted.

    In proportion, or between the nearest counts on both sides.

    >>> _prediction_for(100, [100], [110]), _prediction_for(100, [100, 90], [110, 98])
    (90.9090909090909, 91.66666666666667)
    """
    pairs = list(zip(real, predicted, strict=True))
    below = max((pair for pair in pairs if pair[0] <= wanted), default=None)
    above = min((pair for pair in pairs if pair[0] > wanted), default=None)
    if below is None or above is None:
        return predicted[-1] * wanted / max(1.0, real[-1])
    share = (wanted - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
