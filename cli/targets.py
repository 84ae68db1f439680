"""What `neuzip compress` does when it is given a target instead of mantissa bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.schemes import scheme_text
from neuzip.cli.text import bytes_text, count_text, percent_text
from neuzip.errors import DiskFull, NeuzipError, UsageError, shell

if TYPE_CHECKING:
    from neuzip.eval.layers.drops import Drop
    from neuzip.eval.measures.estimates import Estimate
    from neuzip.eval.plans.deliver import TargetResult
    from neuzip.eval.plans.plan_request import DropLayers
    from neuzip.eval.plans.plan_trials import SearchResult, Trial
    from neuzip.eval.plans.target_request import PreparedSearch, Sensitivity
    from neuzip.eval.plans.target_values import CompressionTarget, RequestedTarget

METHODS = {
    "measured": "one run per tensor and precision",
    "fisher": "Fisher information from one backward pass",
    "weights": "squared rounding errors of the weights, about 22 CPU seconds per GB",
}


def layers_to_drop(
    text: str, goal: RequestedTarget | None, *, excluded: str | None, sensitivity: Sensitivity
) -> DropLayers:
    """What --drop-layers asks for: a number, 0 for none, or auto. `excluded` names an option beside it.

    Raises UsageError, also where nothing would be measured.
    """
    from neuzip.eval.plans.target_request import MOST_LAYERS, require_droppable

    if text == "none":
        return 0
    is_number = text.isdecimal() and 0 < int(text) < MOST_LAYERS
    if text != "auto" and not is_number:
        raise UsageError(
            f"--drop-layers {text}: not a number of layers", "give a number of at least 1, auto or none"
        )
    layers: DropLayers = int(text) if is_number else "auto"
    require_droppable(layers, goal, sensitivity)
    if excluded is not None:
        raise UsageError(f"--drop-layers {text} excludes {excluded}", _HINTS[excluded])
    return layers


_HINTS = {
    "--attention": "run neuzip patch-attention on the result",
    "--dry-run": "neuzip layers shows the importance of each layer; trials find how many to drop",
}


class Interrupted(NeuzipError):
    """Ctrl-C where nothing was written that the same command would go on with."""

    exit_code = 130


@contextmanager
def nothing_kept(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let Ctrl-C and a full disk be told without what the command line adds, `unless` there is work kept.

    Raises Interrupted and NeuzipError instead of KeyboardInterrupt and DiskFull.
    """
    try:
        yield
    except KeyboardInterrupt:
        if unless():
            raise
        raise Interrupted("interrupted") from None
    except DiskFull as full:
        if unless():
            raise
        raise NeuzipError(full.message, full.hint) from full


def tell(out: Output, asked: PreparedSearch) -> None:
    """Say how the target is going to be reached."""
    request, within = asked.request, asked.lossless
    if within is None:
        out.status(f"sensitivity: {request.method} ({METHODS[request.method]})")
        return
    share = percent_text(within.lossless, within.original)
    out.status(
        f"{request.target}: lossless compression fits, about {bytes_text(within.lossless)} ({share}): nothing"
        " is rounded"
    )


def find(out: Output, asked: PreparedSearch) -> SearchResult:
    """The plan as far as it can be known without trying it, for --dry-run."""
    from neuzip.eval.plans.plan_search import find_plan

    found = find_plan(asked.request, asked.baseline, out.stage, trials=False)
    if asked.request.method != "weights":
        out.status(f"predicted mean KL divergence of the plan: {found.predicted_kld:.3g} nats per token")
    if any(scheme != "lossless" for scheme, _ in found.schemes):
        out.status("without --dry-run, compress measures plans and corrects them")
    return found


def deliver(out: Output, asked: PreparedSearch, *, verify: bool, overwrite: bool) -> TargetResult:
    """Find the plan, compress, measure; say what was asked for next to what was delivered."""
    from neuzip.eval.plans.deliver import compress_to_target, key_of
    from neuzip.eval.plans.plan_file import is_search_of

    command = shell("neuzip", *sys.argv[1:])  # also of `python -m neuzip.cli`
    request, text, baseline = asked.request, asked.text, asked.baseline

    def plan_is_kept() -> bool:
        return not overwrite and is_search_of(request.dst, key_of(request, text, baseline))

    with nothing_kept(unless=plan_is_kept):
        delivered = compress_to_target(
            request, text, baseline, out.stage, command=command, verify=verify, overwrite=overwrite
        )
    for warning in delivered.report.warnings:
        out.warning(warning)
    _show(out, asked, delivered)
    return delivered


def _show(out: Output, asked: PreparedSearch, delivered: TargetResult) -> None:
    from neuzip.eval.measures.estimates import errors_text

    target, report, found = asked.request.target, delivered.report, delivered.search
    size = f"{bytes_text(report.stored_weight_bytes)}, {percent_text(report.ratio, 1)}"
    rows = []
    if delivered.run is not None:
        c = delivered.run.comparison
        rows = [
            ["max-kld", "mean KLD, nats per token", _pm(c.kld.mean, 5)],
            ["max-ppl-increase", "perplexity", _percent_pm(c.perplexity_ratio)],
        ]
    rows.append(["target-size", "weight files", size])
    out.table(
        ["", "target", "result"],
        [[name, target.text if kind == target.kind else "", value] for kind, name, value in rows],
        right=["target", "result"],
    )
    if delivered.run is not None:
        c = delivered.run.comparison
        name = asked.text.name if asked.text else ""
        errors = errors_text(c.blocks, c.kld.mean.standard_error)
        rule = asked.baseline.reading.convention.rule if asked.baseline else ""
        out.text(f"measured on {c.tokens:,} tokens of {name}, in {rule}; another text may give more; "
                 f"{errors}")  # fmt: skip
        if target.kind == "max-ppl-increase":
            out.text("the target is met if the increase plus its standard error is within it")
            _warn_of_errors(out, target, delivered)
    if found is None:
        out.text(f"plan {delivered.plan}: from an earlier run")
    else:
        counts = ", ".join(
            f"{count_text(count, 'tensor')} {'at ' if scheme.startswith('k=') else ''}{scheme_text(scheme)}"
            for scheme, count in _in_order(found.schemes)
        )
        out.text(f"plan {delivered.plan}: {counts}")
        if found.estimated:
            groups = count_text(found.estimated, "group")
            out.status(f"{groups} of tensors estimated from their weights alone")
    if asked.request.drop_layers:
        _show_layers(out, asked, delivered)
    if not delivered.holds:
        out.warning(
            f"{target}: the result misses it",
            f"{delivered.plan} is from an earlier run and may have been edited; --overwrite searches again"
            if found is None
            else "measurements of this model may not repeat exactly; a stricter target leaves room",
        )
    out.text()


def _show_layers(out: Output, asked: PreparedSearch, delivered: TargetResult) -> None:
    """Which layers were dropped, beside what was predicted with one less and one more; or why none were."""
    found, target = delivered.search, asked.request.target
    dropped = _numbers(delivered.dropped)
    if found is None or found.drops is None:
        out.text(f"dropped layers: {dropped}, as in the earlier run")
        return
    by_size = target.kind == "target-size"
    tried = {found.dropped: found.trials[-1]}
    if found.passed_over is not None:
        tried[() if found.dropped else found.drops.chosen.layers] = found.passed_over
    drops = [*found.drops.steps, *([] if found.drops.rejected is None else [found.drops.rejected])]
    columns = ["without layers", "KLD of that alone", *(f"{'KLD' if by_size else 'size'} {w}" for w in WORDS)]
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
    if delivered.dropped:
        out.text(f"dropped layers: {dropped}; the remaining layers are renumbered")
    elif found.pays_from is not None:
        out.text(
            "dropped layers: none, as that does not pay off here; predicted to pay off from about "
            f"--{target.kind} {_limit_text(target, found.pays_from)}"
        )
    else:
        out.text("dropped layers: none, as that does not pay off here")
    for reason in found.drops.refused:
        out.status(f"not considered: {reason}")


WORDS = ("predicted", "tried")


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


def _warn_of_errors(out: Output, target: CompressionTarget, delivered: TargetResult) -> None:
    """Say if it is the length of the text that decided: for what was delivered, or for a plan refused."""
    from neuzip.eval.plans.deliver import MAX_TOKENS

    assert delivered.run is not None
    trials = delivered.search.trials if delivered.search is not None else ()
    tried = [trial.comparison.nll_difference for trial in trials if trial.comparison is not None]
    known = [delivered.run.comparison.nll_difference, *(d for d in tried if d.value <= target.limit)]
    error = max(difference.standard_error or 0.0 for difference in known)
    if error <= target.limit / 2:
        return
    longer = delivered.run.comparison.tokens < MAX_TOKENS
    out.warning(
        f"{target}: the standard error is up to {100 * math.expm1(error):.3f} %, over half of the target",
        f"give a longer --text, of up to {MAX_TOKENS:,} tokens"
        if longer
        else "longer texts are not used; allow a larger increase, or use --max-kld",
    )


def _special_tokens(asked: PreparedSearch) -> str:
    """What stands in front of each window of the calibration text, "none" too where there is no text."""
    return "none" if asked.baseline is None else asked.baseline.reading.convention.special_tokens


def _in_order(schemes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(schemes, key=lambda item: (item[0] != "lossless", item[0]), reverse=True)


def _pm(estimate: Estimate, digits: int) -> str:
    error = estimate.standard_error
    return f"{estimate.value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _percent_pm(ratio: Estimate) -> str:
    error = ratio.standard_error
    return f"{100 * (ratio.value - 1):+.3f} %" + ("" if error is None else f" ± {100 * error:.3f} %")


def result_of(
    asked: PreparedSearch, found: SearchResult | None, delivered: TargetResult | None = None
) -> dict[str, object]:
    """What `--json` says of a target; `delivered` is None for a dry run."""
    request = asked.request
    run = None if delivered is None else delivered.run
    return {
        "option": f"--{request.target.kind}",
        "asked": request.target.text,
        "limit": request.target.limit,
        "met": None if delivered is None else delivered.holds,
        "sensitivity": request.method,
        "text": None if asked.text is None else asked.text.name,
        "special_tokens": _special_tokens(asked),
        "plan": None if delivered is None else delivered.plan,
        "delivered": None if run is None else run.comparison,
        "predicted_kld": None if found is None or request.method == "weights" else found.predicted_kld,
        "schemes": None if found is None else dict(found.schemes),
        "estimated_groups": None if found is None else found.estimated,
        "trials": None if found is None else found.trials,
        "dropped_layers": () if delivered is None else delivered.dropped,
        "drops": None if found is None else found.drops,
        "passed_over": None if found is None else found.passed_over,
        "pays_from": None if found is None else found.pays_from,
    }
