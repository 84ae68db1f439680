"""What compression to a target gives, and what all ways to it share: the key of a search, the last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuzip.compress import CompressionReport, compress
from neuzip.compress.prepared import PreparedCodes
from neuzip.compress.rules import Rule
from neuzip.compress.rules_file import PlanFile, plan_bytes
from neuzip.compress.sources.folder import weight_bytes
from neuzip.compress.workspace import write_file, writing
from neuzip.eval.experts.expert_use import ExpertUse
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.plan_file import plan_path
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.plan_trials import SearchResult
from neuzip.eval.plans.search import upper
from neuzip.eval.plans.target_values import value_of
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.runtime.hf.messages import versions


@dataclass(frozen=True)
class TargetResult:
    """A checkpoint that was compressed to a target.

    plan        file of its rules
    search      result of the search, None if the plan of an interrupted run was used again
    comparison  the compressed checkpoint beside the original, None without a text
    holds       whether the measured value, or the size, is within the target
    dropped     layers that it no longer has
    """

    plan: Path
    search: SearchResult | None
    report: CompressionReport
    comparison: Comparison | None
    holds: bool
    dropped: tuple[int, ...] = ()


def key_of(request: TargetRequest, text: Text | None, baseline: BaselineComparison | None) -> str:
    """A short key of everything that the result of a search depends on."""
    calibration = request.calibration
    values = {
        "checkpoint": fingerprint.of_checkpoint(find_checkpoint(request.src)),
        "text": None if text is None else fingerprint.of_text(text.content),
        "tokens": None if baseline is None else baseline.tokens,
        "rule": None if baseline is None else baseline.reading.convention.rule,
        "device": None if baseline is None else str(baseline.device),
        "target": [request.target.kind, request.target.text],
        "scheme": request.scheme,
        "calibration": None if calibration is None else calibration.fingerprint,
        "method": request.method,
        "rules": [rule.to_json() for rule in request.rules],
        "block_size": request.block_size,
        "drop_layers": request.drop_layers,
        "expert_use": use.to_json() if isinstance(use := request.expert_use, ExpertUse) else use,
        "versions": versions(),
    }
    return fingerprint.of_values(values)


def write_plan(request: TargetRequest, search: SearchResult, comments: Sequence[str]) -> None:
    """Write the plan of a search beside DST. `comments` are its first lines, the search's key among them."""
    path = plan_path(request.dst)
    with writing(path):
        write_file(path, plan_bytes(PlanFile(search.rules, search.dropped, search.mean_step), comments))


def compressed(
    request: TargetRequest,
    rules: Sequence[Rule],
    stage: Stage,
    *,
    verify: bool,
    overwrite: bool,
    prepared: PreparedCodes | None = None,
) -> CompressionReport:
    """Compress by the rules of a plan. Raises NeuzipError."""
    with stage("compress", weight_bytes(request.src), "bytes") as advance:
        return compress(
            request.src, request.dst, rules, verify=verify, jobs=request.jobs, overwrite=overwrite,
            device=request.coder, on_bytes=advance, prepared=prepared,
        )  # fmt: skip


def is_within(request: TargetRequest, report: CompressionReport, comparison: Comparison | None) -> bool:
    """Whether a result is within its target: by its size, or by the measured value with its error."""
    if request.target.limits_size:
        return report.stored_weight_bytes <= request.target.limit
    assert comparison is not None
    return upper(value_of(request.target.kind, comparison)) <= request.target.limit
