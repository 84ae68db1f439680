"""Compression to a target: find a plan, write it, compress with it, and measure the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.compress import CompressionReport, compress
from neuzip.compress.rules import Rule
from neuzip.compress.rules_file import plan_bytes
from neuzip.compress.sources.folder import weight_bytes
from neuzip.compress.workspace import write_file, writing
from neuzip.eval.experts.expert_use import ExpertUse
from neuzip.eval.layers.drops import pruned
from neuzip.eval.layers.removal import Pruned
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import BaselineComparison, ComparisonRun, Stage
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.plan_file import earlier_plan, plan_path
from neuzip.eval.plans.plan_request import Stages, TargetRequest
from neuzip.eval.plans.plan_search import find_plan
from neuzip.eval.plans.plan_trials import SearchResult
from neuzip.eval.plans.search import upper
from neuzip.eval.plans.target_values import value_of
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.runtime.hf.messages import versions

MAX_TOKENS = 16384
"""Tokens of text on which plans are compared, if there are as many."""


def key_of(request: TargetRequest, text: Text | None, baseline: BaselineComparison | None) -> str:
    """A short key of everything that the result of a search depends on."""
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
        "expert_use": use.to_json() if isinstance(use := request.expert_use, ExpertUse) else use,
        "versions": versions(),
    }
    return fingerprint.of_values(values)


@dataclass(frozen=True)
class TargetResult:
    """A checkpoint that was compressed to a target.

    plan     file of its rules
    search   result of the search, None if the plan of an interrupted run was used again
    run      comparison of the compressed checkpoint with the original, None without a text
    holds    whether the measured value, or the size, is within the target
    dropped  layers that it no longer has
    """

    plan: Path
    search: SearchResult | None
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

    The result is not measured again if its weight files are those of the last trial, byte for byte.
    """
    key = key_of(request, text, baseline)
    plan, search = earlier_plan(request.dst, key, overwrite), None
    if plan is None:
        search = find_plan(request, baseline, stage, result=True)
        if search.trials:
            stage = Stages.of(request, stage, trials=True, result=True).at("result")
        plan = search.rules, search.dropped
        with writing(plan_path(request.dst)):
            write_file(
                plan_path(request.dst), plan_bytes(search.rules, [command, f"search {key}"], search.dropped)
            )
    rules, dropped = plan
    if dropped:
        with pruned(request.src, request.dst, dropped, stage) as written:
            report = _compress(replace(request, src=written.dst), rules, stage, verify, overwrite)
        report = _relative_to_original(report, request.src, written)
    else:
        report = _compress(request, rules, stage, verify, overwrite)
    run = None
    if search is not None and search.measured is not None and search.measured.holds_for(request.dst):
        run = search.measured.run
    elif baseline is not None:
        with stage("compare", baseline.tokens, "tokens") as advance:
            run = baseline.run(request.dst, advance)
    if request.target.limits_size:
        value: float = report.stored_weight_bytes
    else:
        assert run is not None
        value = upper(value_of(request.target.kind, run.comparison))
    return TargetResult(plan_path(request.dst), search, report, run, value <= request.target.limit, dropped)


def _compress(
    request: TargetRequest, rules: Sequence[Rule], stage: Stage, verify: bool, overwrite: bool
) -> CompressionReport:
    with stage("compress", weight_bytes(request.src), "bytes") as advance:
        return compress(
            request.src, request.dst, rules, verify=verify, jobs=request.jobs, overwrite=overwrite,
            device=request.coder, on_bytes=advance,
        )  # fmt: skip


def _relative_to_original(report: CompressionReport, src: Path, written: Pruned) -> CompressionReport:
    """The report on a model without some layers, with the sizes of the original as those before."""
    checkpoint = find_checkpoint(src)
    weights = sum(path.stat().st_size for path in checkpoint.weight_paths())
    others = sum((checkpoint.root / name).stat().st_size for name in checkpoint.others)
    return replace(
        report, src=src, weight_bytes=weights, original_bytes=weights + others,
        warnings=(*written.warnings, *report.warnings),
    )  # fmt: skip
