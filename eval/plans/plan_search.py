"""Plans by target: as small as a stated divergence allows, or as good as a stated size allows.

    sensitivity   what every choice for every group of tensors saves and costs
    trials        `plan_trials` allocates, tries and corrects until a plan comes close to the target

The result was measured on the compressed checkpoint. If layers may be dropped (`drop_layers`), the search
runs for the whole model and for the model without the layers that cost least, and takes the better plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from neuzip.compress import make_plan
from neuzip.compress.expert_names import expert_name
from neuzip.compress.rules import LOSSLESS
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.experts.counting import NotCounted, count_use
from neuzip.eval.experts.expert_use import ExpertUse
from neuzip.eval.layers.drops import Drop, pruned, weigh
from neuzip.eval.layers.removal import tensors_by_layer
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.plans.candidates import GroupCandidates, predict_candidates
from neuzip.eval.plans.expert_groups import split_by_use
from neuzip.eval.plans.layer_plans import LayerPredictions
from neuzip.eval.plans.plan_request import RequestedUse, Stages, TargetRequest
from neuzip.eval.plans.plan_trials import Planner, SearchResult
from neuzip.eval.plans.reach import FixedBytes, OutOfReach, predict_reach
from neuzip.eval.plans.search import upper
from neuzip.eval.plans.sensitivity import (
    Method,
    Sensitivity,
    fisher,
    measure,
    passes,
    weights_only,
)
from neuzip.eval.plans.target_values import CompressionTarget, value_of
from neuzip.eval.plans.tensor_groups import TensorGroup, find_groups
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.runtime.hf.load import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED_TOKENS, MEASURED_WINDOW = 4096, 512
"""Tokens of text for the method "measured", in all and of one window."""

USE_TOKENS = 8192
"""Tokens of text on which experts are counted."""

FISHER_TOKENS, FISHER_WINDOW = 4096, 256
"""Tokens of text for the method "fisher", in all and of one window: many short ones vary less than few long.

A quarter as many give plans of 4 to 5 % more divergence on SmolLM2-135M, and half as many of 0.6 % more at
most on wikilm-26m; more would gain less, and gradients are a large part of planning on a CPU.
"""


def find_plan(
    request: TargetRequest,
    baseline: BaselineComparison | None,
    stage: Stage,
    *,
    trials: bool = True,
    result: bool = False,
) -> SearchResult:
    """Find the plan for a target.

    baseline  the original on a text; without it the method has to be "weights", and the target a size
    stage     shows progress, with the number of each stage
    trials    try plans in temporary folders beside DST
    result    count the writing of the result, after the search, as a stage

    Raises NeuzipError, and OutOfReach for a size that no plan reaches.
    """
    stages = Stages.of(request, stage, trials=trials, result=result)
    if request.drop_layers:
        assert baseline is not None and trials, "layers are dropped by measurement"
        return _find_without_layers(request, baseline, stages)
    if request.target.limits_size:
        within = predict_reach(request.src, request.rules, request.block_size, request.jobs)
        within.require(request.target)
        if within.is_lossless(request.target):
            counts = ((str(LOSSLESS), within.matrices),)
            return SearchResult(request.rules, counts, 0.0, within.lossless, trials=(), estimated=0)
    planner = _planner(request, baseline, None if baseline is None else baseline.model, stages)
    if not trials:
        return planner.untried()
    return planner.best()


def _planner(
    request: TargetRequest,
    baseline: BaselineComparison | None,
    model: PreTrainedModel | None,
    stages: Stages,
) -> Planner:
    """Measure what every tensor takes in every scheme, and how sensitive `model` is to it."""
    with FolderSource(request.src) as source, Workers(request.jobs) as workers:
        groups = find_groups(source, workers, request.rules)
        with stages.at("sizes")("sizes", sum(g.nbytes for g in groups), "bytes") as advance:
            candidates = predict_candidates(source, groups, request.block_size, workers, advance)
        show = stages.at("sensitivity")
        sensitivity = _sensitivity(request.method, source, candidates, model, baseline, show)
        use = _expert_use(request.expert_use, groups, model, baseline, show)
        if use is not None:
            sensitivity = split_by_use(sensitivity, use)
        names = {t.name for group in groups for t in group.tensors}
        plan = make_plan(source, request.rules, workers, predict=True)
        fixed = FixedBytes.of(source, plan, names)
    return Planner(request, sensitivity, fixed, baseline, stages.at("trials"))


def _sensitivity(
    method: Method,
    source: FolderSource,
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


def _expert_use(
    requested: RequestedUse,
    groups: Sequence[TensorGroup],
    model: PreTrainedModel | None,
    baseline: BaselineComparison | None,
    stage: Stage,
) -> ExpertUse | None:
    """How often experts are chosen: as requested, or counted on the text if there are single experts."""
    if isinstance(requested, ExpertUse):
        return requested
    single = any(expert_name(t.name) is not None for group in groups for t in group.tensors)
    if requested == "none" or not single or model is None or baseline is None:
        return None
    windows = CalibrationWindows.of(baseline.ids[: USE_TOKENS + 1], MEASURED_WINDOW, baseline.front)
    try:
        with stage("experts", windows.tokens, "tokens") as advance:
            layers = count_use(model, (fed for fed, _ in windows.batches()), advance)
    except NotCounted as failure:
        raise NotCounted(
            failure.message, "give `expert_use='none'`, which treats all experts of a layer alike"
        ) from failure
    return ExpertUse("text", windows.tokens, layers)


def _find_without_layers(
    request: TargetRequest, baseline: BaselineComparison, stages: Stages
) -> SearchResult:
    """The better of two plans: with all layers, and without the `drop_layers` that cost least."""
    whole = _planner(request, baseline, baseline.model, stages)
    count = None if request.drop_layers == "auto" else request.drop_layers
    with FolderSource(request.src) as source:
        layer_of = tensors_by_layer(source)
        predictions = LayerPredictions(whole, layer_of)
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
    plans = [] if count is not None else _or_none(lambda: whole.best(compare=True))
    later = stages.all_at("trials")
    with pruned(request.src, request.dst, chosen.layers, later.show) as written:
        model = load_model(written.dst, baseline.dtype, baseline.device, attention=False)
        use = request.expert_use
        if isinstance(use, ExpertUse):
            use = use.without(chosen.layers)
        remaining = replace(request, src=written.dst, expert_use=use)
        fewer = _planner(remaining, baseline, model, later).without(chosen)
        del model
        plans += [fewer.best(compare=True)] if not plans else _or_none(lambda: fewer.best(compare=True))
    best, *others = sorted(plans, key=lambda plan: _rank(request.target, plan))
    return replace(best, drops=drops, passed_over=others[0].trials[-1] if others else None)


def _or_none(find: Callable[[], SearchResult]) -> list[SearchResult]:
    """A list of the plan, empty if no plan reaches the size."""
    try:
        return [find()]
    except OutOfReach:
        return []


def _rank(target: CompressionTarget, plan: SearchResult) -> float:
    """The divergence for a target size, else the bytes; infinite beyond the target."""
    trial = plan.trials[-1]
    if trial.comparison is None:
        return math.inf
    if target.limits_size:
        return trial.comparison.kld.mean.value
    holds = upper(value_of(target.kind, trial.comparison)) <= target.limit
    return trial.bytes if holds else math.inf


def _refuse_drop(request: TargetRequest, drop: Drop) -> None:
    """Raise NeuzipError for layers without which no plan is within the target."""
    numbers = ", ".join(map(str, drop.layers))
    if request.target.limits_size:
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
