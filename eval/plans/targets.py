"""Plans by target: as small as a stated divergence allows, or as good as a stated size allows.

    sensitivity   what every choice for every group of tensors saves and costs
    allocation    one choice a group: the costs of single choices are taken to add up
    trial         compress with that plan, load the result, compare it with the original on calibration text
    correction    where the whole costs more or less than the sum of its parts, allocate anew, in proportion

until a plan holds that comes close to the target. What is reported was measured on the compressed checkpoint.

Where layers may be dropped (`layer_drops`), the same is done for the whole model and for that without the
layers that are missed least: the better of the two plans is taken.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from neuzip.compress import CompressionReport, compress, make_plan
from neuzip.compress.device import CPU, Device
from neuzip.compress.entry_checks import refuse_unless_made
from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.scheme import DROPPED_LAYERS, LOSSLESS, Rule, read_plan
from neuzip.compress.source import TensorSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import write_file, writing
from neuzip.errors import NeuzipError
from neuzip.eval.layers.drops import Drop, Drops, folder_beside, pays_from, pruned, weigh
from neuzip.eval.layers.removal import Pruned, tensors_by_layer
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import BaselineComparison, ComparisonRun, NotFinite, Stage
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.allocation import Allocation, Option, OverBudget, allocate
from neuzip.eval.plans.sensitivity import (
    CalibrationWindows,
    GroupCandidates,
    Method,
    Sensitivity,
    find_groups,
    fisher,
    measure,
    passes,
    predict_candidates,
    rules_of,
    schemes_of,
    weights_only,
)
from neuzip.eval.plans.target_values import CompressionTarget, Kind
from neuzip.formats.checkpoint import config_files, file_checksum, find_checkpoint, index_files
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTEMPTS = 8
"""Plans that are tried at most."""

CLOSE, AIM = 0.95, 0.98
"""Shares of a target: from where on a plan that holds is taken, and what the next attempt aims at."""

LEAP = 16.0
"""The most by which a budget is changed at once."""

CAUTIOUS = 2.0
"""The most by which a budget grows on a figure that its standard error does not tell from 0."""

MEASURED_TOKENS, MEASURED_WINDOW = 4096, 512
"""Tokens whose divergences are averaged where each scheme takes a pass, and those of one window."""

FISHER_TOKENS, FISHER_WINDOW = 4096, 256
"""Tokens whose gradients are averaged, and those of one window: many short ones vary less than few long.

A quarter as many give plans of 4 to 5 % more divergence on SmolLM2-135M, and half as many of 0.6 % more at
most on wikilm-26m; more would gain less, and gradients are a large part of planning on a CPU.
"""

MAX_TOKENS = 16384
"""Tokens on which plans are compared, if there are as many."""

LOSS_RECORD = 96
"""Bytes by which the record of a rounded tensor is longer than that of a lossless one, at most."""

UNCERTAIN = 0.03
"""The share by which sizes predicted from samples may be wrong, with room to spare."""

NARROW, TINY, AMPLE = 0.01, 1e-9, 1e3
"""Where budgets lie so close together, or so far away, that nothing more can come of them."""

DropLayers = int | Literal["auto"]
"""How many layers are dropped: 0 for none, auto for as many as pay."""


# The search


Product = TypeVar("Product")


@dataclass(frozen=True)
class SearchAttempt(Generic[Product]):
    """An allocation and what came of it; `estimate` is in the unit of the target."""

    allocation: Allocation
    estimate: Estimate
    made: Product

    @property
    def value(self) -> float:
        """What has to be within the target."""
        return upper(self.estimate)


def upper(estimate: Estimate) -> float:
    """A figure with its standard error added, where it has one."""
    return estimate.value + (estimate.standard_error or 0.0)


def search(
    allocated: Callable[[float], Allocation],
    tried: Callable[[Allocation], tuple[Estimate, Product]],
    limit: float,
    floor: float = 0.0,
) -> list[SearchAttempt[Product]]:
    """Try allocations until one whose value is at most `limit` comes close to it. The last attempt holds.

    `allocated` gives the best allocation within a budget. `tried` gives its value, which grows with the
    budget, in about the same unit, and is `floor` for a budget of 0. If nothing else holds, that is the last.
    A value holds if it does with its standard error added.
    """
    known: dict[tuple[int, ...], SearchAttempt[Product]] = {}
    holding: SearchAttempt[Product] | None = None
    room = limit - floor
    budget, low, high = room, 0.0, math.inf
    while room > 0 and (high - low) > NARROW * low and budget > TINY * room:
        allocation = allocated(budget)
        attempt = known.get(allocation.chosen)
        if attempt is None:
            if len(known) == ATTEMPTS:
                break
            attempt = known[allocation.chosen] = SearchAttempt(allocation, *tried(allocation))
        if attempt.value <= limit:
            low = budget
            if holding is None or allocation.cost < holding.allocation.cost:
                holding = attempt
            if attempt.value - floor >= CLOSE * room or budget > allocation.weight * AMPLE:
                break
        else:
            high = budget
        above = replace(attempt.estimate, value=attempt.estimate.value - floor)
        budget = _next_budget(budget, above, room, low, high)
    attempts = list(known.values())
    if holding is None:
        lossless = allocated(0.0)
        holding = SearchAttempt(lossless, *tried(lossless))
    else:
        attempts.remove(holding)
    return [*attempts, holding]


def _next_budget(budget: float, estimate: Estimate, limit: float, low: float, high: float) -> float:
    """The last budget, corrected by what it came to; or between one that held and one that did not.

    A value below its standard error, as differences of losses may be, counts as that. One that is not told
    from 0 says little of how much room there is.
    """
    error = estimate.standard_error or 0.0
    value = max(upper(estimate), error)
    step = AIM * limit / value if 0 < value < math.inf else LEAP if value <= 0 else 1 / LEAP
    most = CAUTIOUS if estimate.value < 2 * error else LEAP
    aimed = budget * min(max(step, 1 / LEAP), most)
    if low < aimed < high:
        return aimed
    if math.isinf(high):
        return low * CAUTIOUS
    return math.sqrt(low * high) if low > 0 else high / LEAP


# From a target to a plan


@dataclass(frozen=True)
class TargetRequest:
    """What is asked for. `rules` say what may be rounded: matrices that they leave lossless.

    Weights are coded on `coder`, with `jobs` threads.
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


@dataclass(frozen=True)
class Trial:
    """A plan that was tried. `bytes` are of the weight files.

    There is no comparison without a text, and none with a model whose predictions are not finite.
    """

    predicted_kld: float
    bytes: int
    comparison: Comparison | None


@dataclass(frozen=True)
class SearchResult:
    """The rules that reach a target, and how they were found: the last trial is theirs.

    `predicted_kld` is the sum over single tensors, which means nothing for the method "weights". `bytes` are
    those of the weight files, predicted if nothing was tried. `schemes` says how many tensors have which one;
    `estimated` is as in Sensitivity.

    The rules are for the model without the layers that are `dropped`. `drops` is what was weighed up,
    `passed_over` the last trial of the plan that was not taken: with all layers, or without some. `pays_from`
    is the limit from which on one layer less is predicted to pay, where none pays at that of the target.
    `measured` is what was measured of the weight files that the rules make, if that was done.
    """

    rules: tuple[Rule, ...]
    schemes: tuple[tuple[str, int], ...]
    predicted_kld: float
    bytes: int
    trials: tuple[Trial, ...]
    estimated: int
    dropped: tuple[int, ...] = ()
    drops: Drops | None = None
    passed_over: Trial | None = None
    pays_from: float | None = None
    measured: MeasuredFiles | None = None


@dataclass(frozen=True)
class MeasuredFiles:
    """A compressed model beside the original, and the checksums of the weight files it was loaded from."""

    checksums: tuple[str, ...]
    run: ComparisonRun

    def holds_for(self, dst: Path) -> bool:
        """Whether a compressed checkpoint has the same weight files, so that it need not run again."""
        return _checksums(dst) == self.checksums


def _checksums(path: Path) -> tuple[str, ...]:
    return tuple(map(file_checksum, find_checkpoint(path).weight_paths()))


@dataclass(frozen=True)
class Stages:
    """The stages of a search in their order, and what shows how far each is."""

    show: Stage
    names: tuple[str, ...]

    @classmethod
    def of(cls, request: TargetRequest, show: Stage, *, trials: bool, result: bool) -> Stages:
        """Those of a request: with trials or without, and with the result made in the end or not."""
        names = {
            "sizes": True,
            "sensitivity": request.method != "weights",
            "layers": request.drop_layers != 0,
            "trials": trials,
            "result": result,
        }
        return cls(show, tuple(name for name, there in names.items() if there))

    def at(self, name: str) -> Stage:
        """What shows how far the work of one stage is, and which of how many it is."""
        if name not in self.names:
            return self.show
        where = f"stage {self.names.index(name) + 1} of {len(self.names)}"
        return lambda label, total, unit: self.show(f"{where}, {label}", total, unit)

    def all_at(self, name: str) -> Stages:
        """What shows the work of all stages as that of one."""
        return Stages(self.at(name), ())


@dataclass(frozen=True)
class Reach:
    """Bytes of the weight files: as they are, and as samples predict them lossless, and rounded to 0 bits.

    `matrices` counts the tensors that may be rounded.
    """

    original: int
    lossless: int
    least: int
    matrices: int

    def is_lossless(self, target: CompressionTarget) -> bool:
        """Whether a size is one for which nothing has to be rounded, and no prediction so wrong."""
        return target.limit >= self.lossless * (1 + UNCERTAIN)

    def require(self, target: CompressionTarget) -> None:
        """Raise OutOfReach for a size to which no plan comes down, and no prediction is so wrong."""
        if target.limit < self.least * (1 - UNCERTAIN):
            raise _out_of_reach(target, self.least, self.original)


def reach(src: Path, rules: Sequence[Rule], block_size: int | None, jobs: int | None) -> Reach:
    """Predict what sizes a checkpoint can have, from samples alone. Raises NeuzipError."""
    with TensorSource(src) as source, Workers(jobs) as workers:
        groups = find_groups(source, workers, rules)
        coarsest = rules_of(groups, [schemes_of(group, block_size)[-1] for group in groups])
        lossless = make_plan(source, rules, workers, predict=True)
        rounded = make_plan(source, _before_lossless(rules, coarsest), workers, predict=True)
        original = sum(path.stat().st_size for path in source.checkpoint.weight_paths())
        whole = (lossless.predicted_bytes or 0) - _bytes_beside(source)
    pairs = zip(lossless.tensors, rounded.tensors, strict=True)
    saved = sum(max(0, (a.predicted or 0) - (b.predicted or 0)) for a, b in pairs)
    return Reach(original, whole, whole - saved, sum(len(group.tensors) for group in groups))


def _out_of_reach(target: CompressionTarget, least: float, original: int) -> OutOfReach:
    """The floor in the units of the option, rounded up."""
    megabytes, percent = math.ceil(least / 1e4) / 100, math.ceil(1000 * least / original) / 10
    return OutOfReach(
        f"{target}: the weight files take about {megabytes:,.2f} MB ({percent:.1f} %) at least",
        "give a larger size; `exclude` and `block_size` cost some; `drop_layers='auto'` saves some",
    )


def _before_lossless(rules: Sequence[Rule], more: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules with more of them before the first that says lossless: the first that matches decides."""
    before = list(takewhile(lambda rule: rule.scheme != LOSSLESS, rules))
    return (*before, *more, *rules[len(before) :])


def _bytes_beside(source: TensorSource) -> int:
    """What a plan's prediction counts beside the weight files."""
    checkpoint = source.checkpoint
    rewritten = {*index_files(checkpoint), *config_files(checkpoint)}  # counted three times in a plan
    return sum(
        (checkpoint.root / file).stat().st_size * (3 if file in rewritten else 1)
        for file in checkpoint.others
    )


def find_plan(
    request: TargetRequest,
    baseline: BaselineComparison | None,
    stage: Stage,
    *,
    trials: bool = True,
    result: bool = False,
) -> SearchResult:
    """Find the plan for a target, with trials in temporary folders beside DST, or without any.

    `stage` is told which stage of how many each piece of work belongs to; one more of them with a `result`,
    which is made after the search. Without a baseline nothing is measured: then the method has to be
    "weights", and the target a size. Raises NeuzipError, also for a size that cannot be reached.
    """
    stages = Stages.of(request, stage, trials=trials, result=result)
    if request.drop_layers:
        assert baseline is not None and trials, "layers are dropped by measurement"
        return _find_without_layers(request, baseline, stages)
    if request.target.kind == "target-size":
        within = reach(request.src, request.rules, request.block_size, request.jobs)
        within.require(request.target)
        if within.is_lossless(request.target):
            counts = ((str(LOSSLESS), within.matrices),)
            return SearchResult(request.rules, counts, 0.0, within.lossless, trials=(), estimated=0)
    planner = _look(request, baseline, None if baseline is None else baseline.model, stages)
    if not trials:
        return planner.untried()
    return planner.best()


def _look(
    request: TargetRequest,
    baseline: BaselineComparison | None,
    model: PreTrainedModel | None,
    stages: Stages,
) -> _Planner:
    """Learn what every tensor takes in every scheme, and what it bears in `model`, that of the request."""
    with TensorSource(request.src) as source, Workers(request.jobs) as workers:
        groups = find_groups(source, workers, request.rules)
        with stages.at("sizes")("sizes", sum(g.nbytes for g in groups), "bytes") as advance:
            candidates = predict_candidates(source, groups, request.block_size, workers, advance)
        show = stages.at("sensitivity")
        sensitivity = _sensitivity(request.method, source, candidates, model, baseline, show)
        fixed = _Fixed.of(source, request.rules, candidates, workers)
    return _Planner(request, sensitivity, fixed, baseline, stages.at("trials"))


def _find_without_layers(
    request: TargetRequest, baseline: BaselineComparison, stages: Stages
) -> SearchResult:
    """The better of two plans: with all layers, and without those that promise most, or that have to go."""
    whole = _look(request, baseline, baseline.model, stages)
    count = None if request.drop_layers == "auto" else request.drop_layers
    with TensorSource(request.src) as source:
        layer_of = tensors_by_layer(source)
        predictions = _Predictions(whole, layer_of)
        layer_bytes = [0] * (max(layer_of.values()) + 1)
        for tensor in source.tensors():
            if tensor.name in layer_of:
                layer_bytes[layer_of[tensor.name]] += tensor.info.nbytes
        drops = weigh(baseline, source, layer_bytes, count, predictions, stages.at("layers"))
    chosen = drops.chosen
    if count is not None and math.isinf(chosen.predicted):
        _refuse_drop(request, chosen)
    if not chosen.layers:
        return replace(whole.best(), drops=drops, pays_from=predictions.pays_from(drops))
    plans = [] if count is not None else _reached(lambda: whole.best(compare=True))
    later = stages.all_at("trials")
    with pruned(request.src, request.dst, chosen.layers, later.show) as written:
        model = load_model(written.dst, baseline.dtype, baseline.device, attention=False)
        fewer = _look(replace(request, src=written.dst), baseline, model, later).without(chosen)
        del model
        plans += [fewer.best(compare=True)] if not plans else _reached(lambda: fewer.best(compare=True))
    best, *others = sorted(plans, key=lambda found: _rank(request.target, found))
    return replace(best, drops=drops, passed_over=others[0].trials[-1] if others else None)


def _reached(find: Callable[[], SearchResult]) -> list[SearchResult]:
    """The plan that is found; none for a size that cannot be reached."""
    try:
        return [find()]
    except OutOfReach:
        return []


def _rank(target: CompressionTarget, found: SearchResult) -> float:
    """What is to be small: the divergence where a size is asked for, else the bytes; infinite if beyond."""
    trial = found.trials[-1]
    if trial.comparison is None:
        return math.inf
    if target.kind == "target-size":
        return trial.comparison.kld.mean.value
    holds = upper(value_of(target.kind, trial.comparison)) <= target.limit
    return trial.bytes if holds else math.inf


def _refuse_drop(request: TargetRequest, drop: Drop) -> None:
    """Raise NeuzipError for layers without which nothing within the target is left."""
    numbers = ", ".join(map(str, drop.layers))
    if request.target.kind == "target-size":
        raise NeuzipError(
            f"{request.target}: without layers {numbers} the weight files are larger still, as it looks",
            "give a larger size, or drop more layers",
        )
    assert drop.comparison is not None
    value = upper(value_of(request.target.kind, drop.comparison))
    raise NeuzipError(
        f"{request.target}: without layers {numbers}, which the model misses least, it is {value:.3g} nats a "
        f"token from the original before anything is rounded; the target is {request.target.limit:.3g}",
        "drop fewer layers, or ask for less",
    )


def _sensitivity(
    method: Method,
    source: TensorSource,
    candidates: Sequence[GroupCandidates],
    model: PreTrainedModel | None,
    baseline: BaselineComparison | None,
    stage: Stage,
) -> Sensitivity:
    if method == "weights" or model is None or baseline is None:
        return weights_only(candidates)
    ids, front = baseline.ids, baseline.front
    if method == "fisher":
        windows = CalibrationWindows.of(ids[: FISHER_TOKENS + 1], FISHER_WINDOW, front)
        with stage("gradients", windows.tokens, "tokens") as advance:
            return fisher(model, source, candidates, windows, advance)
    windows = CalibrationWindows.of(ids[: MEASURED_TOKENS + 1], MEASURED_WINDOW, front)
    with stage("sensitivity", passes(candidates) * windows.tokens, "tokens") as advance:
        return measure(HeadedModel(model), source, candidates, windows, advance)


@dataclass(frozen=True)
class _Fixed:
    """Bytes of the weight files beside what may be rounded, as predicted, and the tensors' share by name."""

    total: int
    of_tensors: dict[str, int]

    @classmethod
    def of(
        cls,
        source: TensorSource,
        rules: Sequence[Rule],
        candidates: Sequence[GroupCandidates],
        workers: Workers,
    ) -> _Fixed:
        """From samples of the tensors that are not among the candidates."""
        plan = make_plan(source, rules, workers, predict=True)
        beside = _bytes_beside(source)
        ours = {t.name for one in candidates for t in one.group.tensors}
        predicted = {t.tensor.name: t.predicted or 0 for t in plan.tensors}
        inside = sum(predicted[name] for name in ours)
        records = dict.fromkeys(ours, LOSS_RECORD)
        total = (plan.predicted_bytes or 0) - beside - inside + LOSS_RECORD * len(ours)
        return cls(total, predicted | records)

    def without(self, names: Collection[str]) -> int:
        """The bytes if these tensors are not there."""
        return self.total - sum(self.of_tensors[name] for name in names)


class OutOfReach(NeuzipError):
    """A size that no plan comes down to."""


NOTHING = Drop((), 0, None, math.inf)


class _Planner:
    """What is known of a checkpoint, and the plans that are made of it."""

    def __init__(
        self,
        request: TargetRequest,
        sensitivity: Sensitivity,
        fixed: _Fixed,
        baseline: BaselineComparison | None,
        stage: Stage,
        drop: Drop = NOTHING,
    ) -> None:
        self.request, self.sensitivity, self.fixed = request, sensitivity, fixed
        self._baseline, self._stage, self._drop = baseline, stage, drop
        self._trials = 0
        self._measured: dict[tuple[int, ...], MeasuredFiles] = {}

    def without(self, drop: Drop) -> _Planner:
        """The same for a checkpoint that these layers were dropped of already."""
        return _Planner(self.request, self.sensitivity, self.fixed, self._baseline, self._stage, drop)

    def best(self, *, compare: bool = False) -> SearchResult:
        """The best that is found by trials. With `compare` the last has a comparison, whatever the target."""
        return self.by_size(compare) if self.request.target.kind == "target-size" else self.by_quality()

    def untried(self) -> SearchResult:
        """What the sum of single tensors makes of the target."""
        limit = self.request.target.limit
        if self.request.target.kind == "target-size":
            return self._found(self._within(limit))
        return self._found(allocate(self.sensitivity.options("divergence"), limit))

    def by_quality(self) -> SearchResult:
        """The smallest that was found with at most the divergence, or increase of loss, that is asked for."""
        options = self.sensitivity.options("divergence")
        *others, best = search(
            lambda budget: allocate(options, budget), self._value, self.request.target.limit, self._floor()
        )
        return self._found(best.allocation, *(attempt.made for attempt in others), best.made)

    def _floor(self) -> float:
        """What has to be within the target before anything is rounded."""
        if self._drop.comparison is None:
            return 0.0
        return value_of(self.request.target.kind, self._drop.comparison).value

    def by_size(self, compare: bool = False) -> SearchResult:
        """The least divergence that was found in the size that is asked for."""
        limit, excess = math.floor(self.request.target.limit), 0
        while True:
            allocation = self._within(limit - excess)
            trial = self._try(allocation, compare=compare)
            if trial.bytes <= limit:
                return self._found(allocation, trial)
            excess += trial.bytes - limit

    def _within(self, nbytes: float) -> Allocation:
        try:
            return allocate(self.sensitivity.options("bytes"), nbytes - self.fixed.total)
        except OverBudget as failure:
            least = self.fixed.total + failure.least
            original = sum(p.stat().st_size for p in find_checkpoint(self.request.src).weight_paths())
            raise _out_of_reach(self.request.target, least, original) from None

    def _value(self, allocation: Allocation) -> tuple[Estimate, Trial]:
        trial = self._try(allocation)
        if trial.comparison is None:  # its predictions are not finite
            return Estimate(math.inf, None), trial
        return value_of(self.request.target.kind, trial.comparison), trial

    def _try(self, allocation: Allocation, *, compare: bool = True) -> Trial:
        """Compress with a plan, and compare the result with the original."""
        request = self.request
        self._trials += 1
        label = f"trial {self._trials}"
        with folder_beside(request.dst, "trial") as folder:
            with self._stage(f"{label}: compress", weight_bytes(request.src), "bytes") as advance:
                report = compress(
                    request.src, folder / "trial", self._rules(allocation), verify=False,
                    jobs=request.jobs, device=request.coder, on_bytes=advance,
                )  # fmt: skip
            comparison = None
            if compare and self._baseline is not None:
                with (
                    suppress(NotFinite),
                    self._stage(f"{label}: compare", self._baseline.tokens, "tokens") as advance,
                ):
                    run = self._baseline.run(report.dst, advance)
                    self._measured[allocation.chosen] = MeasuredFiles(_checksums(report.dst), run)
                    comparison = run.comparison
        return Trial(self._divergence(allocation), report.stored_weight_bytes, comparison)

    def _chosen(self, allocation: Allocation) -> list[tuple[GroupCandidates, int]]:
        return list(zip(self.sensitivity.candidates, allocation.chosen, strict=True))

    def _divergence(self, allocation: Allocation) -> float:
        pairs = zip(self.sensitivity.divergences, allocation.chosen, strict=True)
        return math.fsum([self._drop.kld, *(values[number] for values, number in pairs)])

    def _rules(self, allocation: Allocation) -> tuple[Rule, ...]:
        """Those of the groups before what the request has lossless."""
        chosen = self._chosen(allocation)
        rounded = rules_of([c.group for c, _ in chosen], [c.choices[i].scheme for c, i in chosen])
        return _before_lossless(self.request.rules, rounded)

    def _found(self, allocation: Allocation, *trials: Trial) -> SearchResult:
        chosen = self._chosen(allocation)
        counts = Counter[str]()
        for one, number in chosen:
            counts[str(one.choices[number].scheme)] += len(one.group.tensors)
        return SearchResult(
            rules=self._rules(allocation),
            schemes=tuple(counts.items()),
            predicted_kld=self._divergence(allocation),
            bytes=trials[-1].bytes
            if trials
            else self.fixed.total + sum(c.choices[i].nbytes for c, i in chosen),
            trials=trials,
            estimated=self.sensitivity.estimated,
            dropped=self._drop.layers,
            measured=self._measured.get(allocation.chosen),
        )


class _Predictions:
    """What plans without some layers come to, as the sums of single tensors say.

    A group of tensors goes with a layer if all of them are the layer's.
    """

    def __init__(self, whole: _Planner, layers: dict[str, int]) -> None:
        self._target, self._sensitivity, self._fixed = whole.request.target, whole.sensitivity, whole.fixed
        self._layers = layers

    def __call__(self, dropped: tuple[int, ...], comparison: Comparison | None) -> float:
        """Bytes within the target, or the divergence in the size that is asked for; infinite if beyond."""
        if self._target.kind != "target-size":
            cost = 0.0 if comparison is None else upper(value_of(self._target.kind, comparison))
            return self._bytes(dropped, self._target.limit, cost)
        kld = 0.0 if comparison is None else comparison.kld.mean.value
        options, fixed = self._left("bytes", dropped)
        try:
            return kld + allocate(options, self._target.limit - fixed).cost
        except OverBudget:
            return math.inf

    def pays_from(self, drops: Drops) -> float | None:
        """The target from which on a layer less, that of the rejected step, is predicted to pay."""
        least = drops.rejected
        if self._target.kind == "target-size" or least is None or least.comparison is None:
            return None
        cost = max(0.0, upper(value_of(self._target.kind, least.comparison)))
        coarsest = math.fsum(max(values) for values in self._sensitivity.divergences)
        return pays_from(
            lambda limit: self._bytes((), limit, 0.0),
            lambda limit: self._bytes(least.layers, limit, cost),
            self._target.limit,
            cost + coarsest,
        )

    def _bytes(self, dropped: tuple[int, ...], limit: float, cost: float) -> float:
        """The weight files within a target of quality, of which dropping has taken its part."""
        if cost > limit:
            return math.inf
        options, fixed = self._left("divergence", dropped)
        return fixed + allocate(options, limit - max(0.0, cost)).cost

    def _left(
        self, by: Literal["bytes", "divergence"], dropped: tuple[int, ...]
    ) -> tuple[list[list[Option]], int]:
        """The options of the groups that are left, and the bytes of everything else."""
        gone = {name for name, layer in self._layers.items() if layer in dropped}
        groups = zip(self._sensitivity.candidates, self._sensitivity.options(by), strict=True)
        left = [options for c, options in groups if not gone.issuperset(t.name for t in c.group.tensors)]
        return left, self._fixed.without(gone)


def value_of(kind: Kind, comparison: Comparison) -> Estimate:
    """What a comparison comes to in the unit of a target of quality: nats a token.

    A difference of losses has its standard error, which may be as large; a divergence is taken as it is.
    """
    if kind == "max-kld":
        return Estimate(comparison.kld.mean.value, None)
    return comparison.nll_difference


# Plan files


def plan_path(dst: Path) -> Path:
    """Where the plan of a compressed checkpoint is written: beside it."""
    return dst.with_name(f"{dst.name}.plan.toml")


def plan_bytes(rules: Sequence[Rule], comments: Sequence[str], dropped: Sequence[int] = ()) -> bytes:
    """Rules as a file that `--plan` reads; without layers that are `dropped` it says which."""
    lines = [f"# {_one_line(comment)}" for comment in comments]
    if dropped:
        lines += ["", f"{DROPPED_LAYERS} = {list(dropped)}"]
    for rule in rules:
        lines += ["", "[[rule]]", *(f"{key} = {_toml(value)}" for key, value in rule.to_json().items())]
    return ("\n".join(lines) + "\n").encode()


def _toml(value: str | int) -> str:
    """A string or a number as TOML writes it: JSON's escapes are TOML's, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def refuse_strangers(dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite if there is something at `dst` that no search has to do with."""
    if overwrite or not plan_path(dst).exists():
        refuse_existing(dst, overwrite, file=dst.is_file())
    else:
        refuse_unless_made(dst, overwrite)


def is_search_of(dst: Path, key: str) -> bool:
    """Whether the plan beside `dst` is that of a search with this key."""
    path = plan_path(dst)
    return path.is_file() and key in path.read_text(encoding="utf-8", errors="replace")


def earlier_plan(dst: Path, key: str, overwrite: bool) -> tuple[tuple[Rule, ...], tuple[int, ...]] | None:
    """The rules of an earlier search with the same key, whose run was interrupted; None if there was none.

    With them the layers that were to be dropped.

    Raises WouldOverwrite if the plan or `dst` is something else's.
    """
    path = plan_path(dst)
    if not overwrite and is_search_of(dst, key):
        rules, dropped = read_plan(path)
        return tuple(rules), dropped
    refuse_existing(dst, overwrite, file=dst.is_file())
    refuse_existing(path, overwrite, file=True)
    return None


def key_of(request: TargetRequest, text: Text | None, baseline: BaselineComparison | None) -> str:
    """What a search depends on, as a short word."""
    values = {
        "checkpoint": fingerprint.of_checkpoint(find_checkpoint(request.src)),
        "text": None if text is None else fingerprint.of_text(text.content),
        "tokens": None if baseline is None else baseline.tokens,
        "rule": None if baseline is None else baseline.reading.convention.rule,
        "device": None if baseline is None else str(baseline.device),
        "target": [request.target.kind, request.target.text],
        "method": request.method,
        "rules": [rule.to_json() for rule in request.rules],
        "block_size": request.block_size,
        "drop_layers": request.drop_layers,
        "versions": versions(),
    }
    return fingerprint.of_values(values)


@dataclass(frozen=True)
class TargetResult:
    """What was made. `found` is None where the plan of an interrupted run was taken again.

    `run` is the compressed checkpoint beside the original, None without a text. `holds` is whether what was
    measured, or the size, is within the target. `dropped` are the layers that it is without.
    """

    plan: Path
    found: SearchResult | None
    report: CompressionReport
    run: ComparisonRun | None
    holds: bool
    dropped: tuple[int, ...] = ()


def compress_to_target(
    request: TargetRequest,
    text: Text | None,
    baseline: BaselineComparison | None,
    stage: Stage,
    *,
    command: str = "",
    verify: bool = True,
    overwrite: bool = False,
) -> TargetResult:
    """Find a plan, write it beside DST, compress with it, and measure the result. Raises NeuzipError.

    A result with the weight files of the last trial, byte for byte, was measured then.
    """
    key = key_of(request, text, baseline)
    known, found = earlier_plan(request.dst, key, overwrite), None
    if known is None:
        found = find_plan(request, baseline, stage, result=True)
        if found.trials:
            stage = Stages.of(request, stage, trials=True, result=True).at("result")
        known = found.rules, found.dropped
        with writing(plan_path(request.dst)):
            write_file(
                plan_path(request.dst), plan_bytes(found.rules, [command, f"search {key}"], found.dropped)
            )
    rules, dropped = known
    if dropped:
        with pruned(request.src, request.dst, dropped, stage) as written:
            report = _compress(replace(request, src=written.dst), rules, stage, verify, overwrite)
        report = _of_the_whole(report, request.src, written)
    else:
        report = _compress(request, rules, stage, verify, overwrite)
    run = None
    if found is not None and found.measured is not None and found.measured.holds_for(request.dst):
        run = found.measured.run
    elif baseline is not None:
        with stage("compare", baseline.tokens, "tokens") as advance:
            run = baseline.run(request.dst, advance)
    if request.target.kind == "target-size":
        value: float = report.stored_weight_bytes
    else:
        assert run is not None
        value = upper(value_of(request.target.kind, run.comparison))
    return TargetResult(plan_path(request.dst), found, report, run, value <= request.target.limit, dropped)


def _compress(
    request: TargetRequest, rules: Sequence[Rule], stage: Stage, verify: bool, overwrite: bool
) -> CompressionReport:
    with stage("compress", weight_bytes(request.src), "bytes") as advance:
        return compress(
            request.src, request.dst, rules, verify=verify, jobs=request.jobs, overwrite=overwrite,
            device=request.coder, on_bytes=advance,
        )  # fmt: skip


def _of_the_whole(report: CompressionReport, src: Path, written: Pruned) -> CompressionReport:
    """A report on a model without some layers as one on the original: sizes before are the original's."""
    checkpoint = find_checkpoint(src)
    weights = sum(path.stat().st_size for path in checkpoint.weight_paths())
    others = sum((checkpoint.root / name).stat().st_size for name in checkpoint.others)
    return replace(
        report, src=src, weight_bytes=weights, original_bytes=weights + others,
        warnings=(*written.warnings, *report.warnings),
    )  # fmt: skip
