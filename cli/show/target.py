"""A quality or size target of `neuzip compress`: how it is going to be reached, and how it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import change_text
from neuzip.cli.show.schemes import scheme_text
from neuzip.cli.text import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.layers.drops import Drop
    from neuzip.eval.measures.estimates import Estimate
    from neuzip.eval.plans.plan_trials import ExpertsOfUse, SearchResult, Trial
    from neuzip.eval.plans.target_request import PreparedSearch
    from neuzip.eval.plans.target_result import TargetResult
    from neuzip.eval.plans.target_values import CompressionTarget

METHODS = {
    "measured": "one run per tensor and precision",
    "fisher": "Fisher information from one backward pass",
    "weights": "squared rounding errors of the weights, about 22 CPU seconds per GB",
}


def show_method(out: Output, search: PreparedSearch) -> None:
    """Say how the target is going to be reached."""
    request, within = search.request, search.lossless
    if within is not None:
        share = percent_text(within.lossless, within.original)
        out.status(
            f"{request.target}: lossless compression fits, about {bytes_text(within.lossless)} ({share}):"
            " nothing is lost"
        )
    elif request.scheme == "rounded":
        out.status(f"sensitivity: {request.method} ({METHODS[request.method]})")
    elif request.calibration is None:
        out.status("calibration: none (every weight is rounded to the nearest code)")
    else:
        calibration = request.calibration
        out.status(f"calibration: {count_text(len(calibration.ids), 'token')} of {calibration.name}")
        if calibration.note:
            out.status(calibration.note)


def show_result(out: Output, search: PreparedSearch, result: TargetResult) -> None:
    """Say what was asked for next to the result, and by which plan."""
    from neuzip.eval.measures.estimates import errors_text

    target, report, solution = search.request.target, result.report, result.search
    size = f"{bytes_text(report.stored_weight_bytes)}, {percent_text(report.ratio, 1)}"
    rows = []
    if result.comparison is not None:
        c = result.comparison
        rows = [
            ["max-kld", "mean KLD, nats per token", _pm(c.kld.mean, 5)],
            ["max-ppl-increase", "perplexity", change_text(c.perplexity_ratio)],
        ]
    rows.append(["bits", "bits per weight", f"{report.bits_per_weight:.3f}"])
    rows.append(["target-size", "weight files", size])
    out.table(
        ["", "target", "result"],
        [[name, target.text if kind == target.kind else "", value] for kind, name, value in rows],
        right=["target", "result"],
    )
    if result.comparison is not None:
        c = result.comparison
        name = search.text.name if search.text else ""
        errors = errors_text(c.blocks, c.kld.mean.standard_error)
        rule = search.baseline.reading.convention.rule if search.baseline else ""
        out.text(f"measured on {c.tokens:,} tokens of {name}, in {rule}; another text may give more; "
                 f"{errors}")  # fmt: skip
        if target.kind == "max-ppl-increase":
            out.text("the target is met if the increase plus its standard error is within it")
            _warn_of_errors(out, search, result)
    if solution is None:
        out.text(f"plan {result.plan}: from an earlier run")
    else:
        counts = ", ".join(
            f"{count_text(count, 'tensor')} {'at ' if scheme.startswith('k=') else ''}{scheme_text(scheme)}"
            for scheme, count in _in_order(solution.schemes)
        )
        fitted = ""
        if solution.mean_step is not None and search.request.calibration is not None:
            fitted = f", fitted to {search.request.calibration.name}"
        out.text(f"plan {result.plan}: {counts}{fitted}")
        if solution.estimated:
            unit = "group of tensors" if search.request.scheme == "rounded" else "tensor"
            groups = count_text(solution.estimated, unit)
            out.status(f"{groups} estimated from their weights alone")
        if solution.nearest:
            whose = "its" if solution.nearest == 1 else "their"
            out.status(
                f"{count_text(solution.nearest, 'tensor')} rounded to nearest: the calibration text says"
                f" nothing of {whose} inputs"
            )
    if solution is not None and solution.experts:
        _show_experts(out, solution.experts)
    if search.request.drop_layers:
        _show_layers(out, search, result)
    if not result.holds:
        out.warning(
            f"{target}: the result misses it",
            f"{result.plan} is from an earlier run and may have been edited; --overwrite searches again"
            if solution is None
            else "measurements of this model may not repeat exactly; a stricter target leaves room",
        )
    out.text()


def _show_experts(out: Output, experts: Sequence[ExpertsOfUse]) -> None:
    """What experts get, by how often they are chosen."""
    columns = ["experts", "number", "share of choices", "bits/weight"]
    out.text()
    out.table(
        columns,
        [[e.use, e.experts, f"{e.token_share:.1%}", f"{e.bits_per_weight:.2f}"] for e in experts],
        right=columns[1:],
    )


def _show_layers(out: Output, search: PreparedSearch, result: TargetResult) -> None:
    """Which layers were dropped, beside what was predicted with one less and one more; or why none were."""
    solution, target = result.search, search.request.target
    dropped = _numbers(result.dropped)
    if solution is None or solution.drops is None:
        out.text(f"dropped layers: {dropped}, as in the earlier run")
        return
    by_size = target.limits_size
    tried = {solution.dropped: solution.trials[-1]}
    if solution.passed_over is not None:
        tried[() if solution.dropped else solution.drops.chosen.layers] = solution.passed_over
    drops = [*solution.drops.steps, *([] if solution.drops.rejected is None else [solution.drops.rejected])]
    columns = [
        "without layers",
        "KLD of that alone",
        *(f"{'KLD' if by_size else 'size'} {w}" for w in ("predicted", "tried")),
    ]
    out.text()
    out.table(
        columns,
        [
            [_numbers(drop.layers), f"{drop.kld:.3g}", _predicted(drop, by_size),
             _tried(tried.get(drop.layers), by_size)]
            for drop in drops
        ],
        right=columns[1:],
    )  # fmt: skip
    if result.dropped:
        out.text(f"dropped layers: {dropped}; the remaining layers are renumbered")
    elif solution.pays_from is not None:
        out.text(
            "dropped layers: none, as that does not pay off here; predicted to pay off from about "
            f"--{target.kind} {_limit_text(target, solution.pays_from)}"
        )
    else:
        out.text("dropped layers: none, as that does not pay off here")
    for reason in solution.drops.refused:
        out.status(f"not considered: {reason}")


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _predicted(drop: Drop, by_size: bool) -> str:
    if math.isinf(drop.predicted):
        return "out of reach"
    return f"{drop.predicted:.3g}" if by_size else bytes_text(round(drop.predicted))


def _tried(trial: Trial | None, by_size: bool) -> str:
    if trial is None:
        return ""
    if not by_size:
        return bytes_text(trial.bytes)
    return "not finite" if trial.comparison is None else f"{trial.comparison.kld.mean.value:.3g}"


def _limit_text(target: CompressionTarget, limit: float) -> str:
    """A limit in the unit of the option."""
    return f"{limit:.2g}" if target.kind == "max-kld" else f"{100 * math.expm1(limit):.2g}%"


def _warn_of_errors(out: Output, search: PreparedSearch, result: TargetResult) -> None:
    """Say if it is the length of the text that decided: for the result, or for a plan refused."""
    from neuzip.eval.plans.calibration_text import most_compared

    assert result.comparison is not None and search.baseline is not None
    most = most_compared(search.request.scheme, search.baseline.device)
    target = search.request.target
    trials = result.search.trials if result.search is not None else ()
    tried = [trial.comparison.nll_difference for trial in trials if trial.comparison is not None]
    known = [result.comparison.nll_difference, *(d for d in tried if d.value <= target.limit)]
    error = max(difference.standard_error or 0.0 for difference in known)
    if error <= target.limit / 2:
        return
    longer = result.comparison.tokens < most
    out.warning(
        f"{target}: the standard error is up to {100 * math.expm1(error):.3f} %, over half of the target",
        f"give a longer --text, of up to {most:,} tokens"
        if longer
        else "longer texts are not used; allow a larger increase, or use --max-kld",
    )


def _special_tokens(search: PreparedSearch) -> str:
    """What stands in front of each window of the calibration text, "none" too where there is no text."""
    return "none" if search.baseline is None else search.baseline.reading.convention.special_tokens


def _in_order(schemes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(schemes, key=lambda item: (item[0] != "lossless", item[0]), reverse=True)


def _pm(estimate: Estimate, digits: int) -> str:
    error = estimate.standard_error
    return f"{estimate.value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def target_json(
    search: PreparedSearch, solution: SearchResult | None, result: TargetResult | None = None
) -> dict[str, object]:
    """What `--json` says of a target; `result` is None for a dry run."""
    request = search.request
    calibration = request.calibration
    return {
        "option": f"--{request.target.kind}",
        "asked": request.target.text,
        "limit": request.target.limit,
        "met": None if result is None else result.holds,
        "scheme": request.scheme,
        "calibration": None if calibration is None else calibration.name,
        "calibration_tokens": None if calibration is None else len(calibration.ids),
        "sensitivity": request.method,
        "text": None if search.text is None else search.text.name,
        "special_tokens": _special_tokens(search),
        "plan": None if result is None else result.plan,
        "mean_step": None if solution is None else solution.mean_step,
        "delivered": None if result is None else result.comparison,
        "predicted_kld": None if solution is None or request.method == "weights" else solution.predicted_kld,
        "schemes": None if solution is None else dict(solution.schemes),
        "estimated_groups": None if solution is None else solution.estimated,
        "nearest_tensors": None if solution is None else solution.nearest,
        "experts": None if solution is None else solution.experts,
        "trials": None if solution is None else solution.trials,
        "dropped_layers": () if result is None else result.dropped,
        "drops": None if solution is None else solution.drops,
        "passed_over": None if solution is None else solution.passed_over,
        "pays_from": None if solution is None else solution.pays_from,
    }
