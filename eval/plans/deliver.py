"""Compression to a target: find a plan, write it, compress with it, and measure the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from neuzip.compress import CompressionReport
from neuzip.eval.layers.drops import pruned
from neuzip.eval.layers.removal import Pruned
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.plan_file import earlier_plan, plan_path
from neuzip.eval.plans.plan_request import Stages, TargetRequest
from neuzip.eval.plans.plan_search import find_plan
from neuzip.eval.plans.plan_trials import SearchResult
from neuzip.eval.plans.quantized_search import QuantizedPlanner
from neuzip.eval.plans.target_result import TargetResult, compressed, is_within, key_of, write_plan
from neuzip.formats.checkpoint import find_checkpoint


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

    The result is not measured again if its weights are those of the last trial.
    """
    key = key_of(request, text, baseline)
    comments = [command, f"search {key}"]
    deliver = _quantized if request.scheme == "quantized" else _rounded
    return deliver(request, key, comments, baseline, stage, verify, overwrite)


def predicted_plan(request: TargetRequest, baseline: BaselineComparison | None, stage: Stage) -> SearchResult:
    """The plan for a target as far as it is known without trials. Raises NeuzipError."""
    if request.scheme == "rounded":
        return find_plan(request, baseline, stage, trials=False)
    stages = Stages.of(request, stage, trials=False, result=False)
    with QuantizedPlanner.opened(request, baseline, stages) as planner:
        return planner.untried()


def _rounded(
    request: TargetRequest,
    key: str,
    comments: list[str],
    baseline: BaselineComparison | None,
    stage: Stage,
    verify: bool,
    overwrite: bool,
) -> TargetResult:
    """Compress with fewer mantissa bits, and perhaps without some layers."""
    plan, search = earlier_plan(request.dst, key, overwrite), None
    if plan is None:
        search = find_plan(request, baseline, stage, result=True)
        if search.trials:
            stage = Stages.of(request, stage, trials=True, result=True).at("result")
        write_plan(request, search, comments)
        rules, dropped = search.rules, search.dropped
    else:
        rules, dropped = plan.rules, plan.dropped_layers
    if dropped:
        with pruned(request.src, request.dst, dropped, stage) as written:
            remaining = replace(request, src=written.dst)
            report = compressed(remaining, rules, stage, verify=verify, overwrite=overwrite)
        report = _relative_to_original(report, request.src, written)
    else:
        report = compressed(request, rules, stage, verify=verify, overwrite=overwrite)
    return _measured(request, search, report, baseline, stage, dropped)


def _quantized(
    request: TargetRequest,
    key: str,
    comments: list[str],
    baseline: BaselineComparison | None,
    stage: Stage,
    verify: bool,
    overwrite: bool,
) -> TargetResult:
    """Compress with integer codes on uniform grids."""
    plan, search = earlier_plan(request.dst, key, overwrite), None
    stages = Stages.of(request, stage, trials=plan is None, result=True)
    with QuantizedPlanner.opened(request, baseline, stages) as planner:
        if plan is None:
            search = planner.best()
            write_plan(request, search, [*comments, *planner.comments(search)])
            rules, step = search.rules, search.mean_step
        else:
            rules, step = plan.rules, plan.mean_step
        show = stages.at("result")
        prepared = None if step is None else planner.prepared(step, key)
        report = compressed(request, rules, show, verify=verify, overwrite=overwrite, prepared=prepared)
    return _measured(request, search, report, baseline, show)


def _measured(
    request: TargetRequest,
    search: SearchResult | None,
    report: CompressionReport,
    baseline: BaselineComparison | None,
    stage: Stage,
    dropped: tuple[int, ...] = (),
) -> TargetResult:
    """The result, compared with the original unless the last trial had these weights."""
    comparison = None
    if search is not None and search.measured is not None and search.measured.holds_for(request.dst):
        comparison = search.measured.comparison
    elif baseline is not None:
        with stage("compare", baseline.tokens, "tokens") as advance:
            comparison = baseline.run(request.dst, advance).comparison
    holds = is_within(request, report, comparison)
    return TargetResult(plan_path(request.dst), search, report, comparison, holds, dropped)


def _relative_to_original(report: CompressionReport, src: Path, written: Pruned) -> CompressionReport:
    """The report on a model without some layers, with the sizes of the original as those before."""
    checkpoint = find_checkpoint(src)
    weights = sum(path.stat().st_size for path in checkpoint.weight_paths())
    others = sum((checkpoint.root / name).stat().st_size for name in checkpoint.others)
    return replace(
        report, src=src, weight_bytes=weights, original_bytes=weights + others,
        warnings=(*written.warnings, *report.warnings),
    )  # fmt: skip
