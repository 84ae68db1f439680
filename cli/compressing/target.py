"""The targets of neuzip compress, such as --bits and --max-kld: search a plan, and compress by it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuzip.choices import Sensitivity, TargetScheme
from neuzip.cli.output import Output
from neuzip.cli.show.target import show_result
from neuzip.errors import DiskFull, NeuzipError, UsageError, shell

if TYPE_CHECKING:
    from neuzip.eval.plans.plan_request import DropLayers
    from neuzip.eval.plans.plan_trials import SearchResult
    from neuzip.eval.plans.target_request import PreparedSearch
    from neuzip.eval.plans.target_result import TargetResult
    from neuzip.eval.plans.target_values import RequestedTarget

_HINTS = {
    "--attention": "run neuzip patch-attention on the result",
    "--dry-run": "neuzip layers shows the importance of each layer; trials find how many to drop",
}


def layers_to_drop(
    text: str,
    goal: RequestedTarget | None,
    *,
    excluded: str | None,
    scheme: TargetScheme,
    sensitivity: Sensitivity,
) -> DropLayers:
    """The value of --drop-layers: a number, 0 for none, or auto. `excluded` names an option beside it.

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
    require_droppable(layers, goal, scheme, sensitivity)
    if excluded is not None:
        raise UsageError(f"--drop-layers {text} excludes {excluded}", _HINTS[excluded])
    return layers


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


def predict(out: Output, search: PreparedSearch) -> SearchResult:
    """The plan as far as it can be known without trying it, for --dry-run."""
    from neuzip.eval.plans.deliver import predicted_plan

    result = predicted_plan(search.request, search.baseline, out.stage)
    if search.request.method != "weights" and result.predicted_kld is not None:
        out.status(f"predicted mean KL divergence of the plan: {result.predicted_kld:.3g} nats per token")
    if any(scheme != "lossless" for scheme, _ in result.schemes):
        out.status("without --dry-run, compress measures plans and corrects them")
    return result


def reach(out: Output, search: PreparedSearch, *, verify: bool, overwrite: bool) -> TargetResult:
    """Find the plan, compress and measure; show the target next to the result."""
    from neuzip.eval.plans.deliver import compress_to_target
    from neuzip.eval.plans.plan_file import is_search_of
    from neuzip.eval.plans.target_result import key_of

    command = shell("neuzip", *sys.argv[1:])  # also of `python -m neuzip.cli`
    request, text, baseline = search.request, search.text, search.baseline

    def plan_is_kept() -> bool:
        return not overwrite and is_search_of(request.dst, key_of(request, text, baseline))

    with nothing_kept(unless=plan_is_kept):
        result = compress_to_target(
            request, text, baseline, out.stage, command=command, verify=verify, overwrite=overwrite
        )
    for warning in result.report.warnings:
        out.warning(warning)
    show_result(out, search, result)
    return result
