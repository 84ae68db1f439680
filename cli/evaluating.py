"""The work of `neuzip eval`: refuses options that do not go together, measures, and writes the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.choices import Activations, Attention, DeviceMap, DeviceName, DtypeName, KvForm
from neuzip.cli.activations import warn_of_plain_inputs
from neuzip.cli.kv_bits import KvRequest, chosen_bits, requested
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.show.evaluation import give_result, show_evaluation, show_sparsity, show_tasks
from neuzip.cli.show.kv_cache import calibration_json
from neuzip.cli.source import resolved_model
from neuzip.cli.text import count_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError, shell
from neuzip.runtime.requirements import require_device, require_expert_memory, require_quantisable
from neuzip.runtime.residencies import Residency

if TYPE_CHECKING:
    from torch import Tensor

    from neuzip.compress.ranks import Ranks
    from neuzip.eval.harness import TaskEvaluation
    from neuzip.eval.kv_calibration import KVCalibration
    from neuzip.eval.measures.convention_names import Name
    from neuzip.eval.measures.perplexity import Evaluation, EvaluationTask
    from neuzip.eval.measures.texts import Text
    from neuzip.eval.report.evaluation import EvaluationReport
    from neuzip.eval.report.rows import ReportRow
    from neuzip.eval.report.sweep_results import SweepResults
    from neuzip.runtime.hf.sparsity import Sparsity
    from neuzip.runtime.kv_bits import KVBits

COUNTED_TOKENS = 8192
"""Tokens that the inputs of layers are counted for."""

LONG = 20_000
"""Tokens, of all conventions and models, that take a CPU so long that a shorter way is worth a word."""


@dataclass(frozen=True)
class EvalOptions:
    """What `neuzip eval` was started with: its options, by the names of their parameters."""

    src: str
    text: str | None
    original: str | None
    conventions: str | None
    window: int | None
    stride: int | None
    max_tokens: int | None
    device: DeviceName
    device_map: DeviceMap | None
    dtype: DtypeName
    residency: Residency
    expert_memory: int | None
    activations: Activations | None
    kv_bits: str | None
    kv_text: str | None
    kv_plan: Path | None
    kv_form: KvForm
    query_bits: int | None
    attention: Attention
    sparsity: bool
    page: Path | None
    sweep: Path | None
    tasks: str | None
    limit: int | None
    overwrite: bool
    json: bool
    quiet: bool


def run(chosen: EvalOptions) -> None:
    """Evaluate as the options say, and report. Raises UsageError for options that do not go together."""
    out = Output(json=chosen.json, quiet=chosen.quiet)
    refuse_contradictions(chosen)
    mode = require_quantisable(chosen.activations, chosen.residency)
    place = None if chosen.device_map is not None else chosen.device
    require_expert_memory(chosen.expert_memory, chosen.residency, device=place)
    if mode is not None and chosen.tasks is not None:
        raise _not_for_tasks("--activations", mode, "follow config.json")
    names = chosen_conventions(chosen.conventions)
    if chosen.stride is not None and names is not None and "strided" not in names:
        raise UsageError(
            f"--stride {chosen.stride} has no effect with --conventions {chosen.conventions}",
            "add strided to --conventions, or leave out --stride",
        )
    request = requested(chosen.kv_bits, chosen.kv_text, chosen.kv_plan, chosen.kv_form, chosen.overwrite)
    let_threads_sleep()
    out.loading()
    if chosen.device_map is None:
        require_device(chosen.device, chosen.residency)
    if chosen.tasks is not None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the harness; tqdm reads it once
        from neuzip.eval import harness  # noqa: F401  # if it is missing, that is told before anything is read
    if chosen.page is not None:
        from neuzip.eval.report.page import check_target

        check_target(chosen.page, chosen.overwrite)
    with joined_ranks() as ranks:
        out = Output(json=chosen.json, quiet=chosen.quiet, silent=not ranks.is_first)
        _measure(out, ranks, chosen, names, mode, request)


def _measure(
    out: Output,
    ranks: Ranks,
    chosen: EvalOptions,
    names: list[Name] | None,
    mode: str | None,
    request: KvRequest,
) -> None:
    """Measure on the text and by tasks, and give the result; `mode` is that of the activations of SRC."""
    from neuzip.eval.measures.texts import read_text

    sources = [path for path in (chosen.original, chosen.src) if path is not None]
    paths, document = ranks.first_before_others(
        lambda: (
            [resolved_model(out, path) for path in sources],
            None if chosen.text is None else read_text(chosen.text),
        )
    )
    import_large()
    from neuzip.eval.measures.perplexity import prepare
    from neuzip.eval.report.sweep_results import read_sweep

    for path, activations in zip(reversed(paths), (chosen.activations, None), strict=False):
        warn_of_plain_inputs(out, path, (chosen.residency,), activations)
    if chosen.sparsity and chosen.residency == "dense":
        out.status(
            "--sparsity: counted on unquantised activations, as --residency dense does not quantise them"
        )
    sweep = None if chosen.sweep is None else read_sweep(chosen.sweep)
    evaluation = zeros = scores = report = page = calibration = None
    if document is not None:
        task = prepare(
            paths, document, conventions=names, window=chosen.window, stride=chosen.stride,
            max_tokens=chosen.max_tokens, device=chosen.device, device_map=chosen.device_map,
            dtype=chosen.dtype, residency=chosen.residency, expert_memory=chosen.expert_memory,
            activations=mode, kv_form=chosen.kv_form, query_bits=chosen.query_bits,
            attention=chosen.attention,
        )  # fmt: skip
        bits, calibration = ranks.on_first(lambda: _bits(out, request, task, chosen.kv_text))
        task = replace(task, kv_bits=bits)
        evaluation = _evaluate_text(out, ranks, task, by_default=names is None)
        if chosen.sparsity and ranks.is_first:
            zeros = count_zeros(out, task)
    try:
        if chosen.tasks is not None:
            scores = _evaluate_tasks(out, paths, chosen.tasks, chosen)
        if evaluation is not None and ranks.is_first and (chosen.page is not None or chosen.json):
            report = _make_report(out, paths, evaluation, scores, document, sweep, chosen)
        if chosen.page is not None and report is not None:
            from neuzip.eval.report.page import write

            write(report, chosen.page)
            page = chosen.page
            out.status(f"wrote {page}")
    finally:  # what took hours is told, whatever becomes of the rest
        give_result(
            out, evaluation, scores, page, zeros, report, calibration_json(calibration, chosen.kv_plan)
        )


def _bits(
    out: Output, request: KvRequest, task: EvaluationTask, kv_text: str | None
) -> tuple[KVBits | None, KVCalibration | None]:
    """The bits of the KV cache. Raises UsageError if one text is to choose them and to measure them."""
    if request.text is None:
        return request.bits, None
    if request.text.content == task.text.content:
        raise UsageError(f"--kv-text {kv_text}: is the text on which the result is measured", "give another")
    from neuzip.eval.measures.perplexity import load

    with out.progress("load", None):
        model = load(task, len(task.paths) - 1)
    return chosen_bits(out, request, task.paths[-1], model, task.kv_form)


def _evaluate_text(out: Output, ranks: Ranks, task: EvaluationTask, *, by_default: bool) -> Evaluation:
    """Measure perplexities, and show them; `by_default` says that no conventions were chosen."""
    from neuzip.eval.measures.perplexity import evaluate

    if by_default and place_is_slow(task):
        first = 100 * task.measured[0].convention.tokens * len(task.paths) / task.tokens
        name = task.measured[0].convention.name
        out.hint(f"--conventions {name} takes about {first:.0f} % of the time, and measures that one alone")
    with out.progress(work_text(task), task.tokens, unit="tokens") as advance:
        evaluation = evaluate(
            task, divergence=len(task.paths) == 2, ranks=ranks, on_tokens=ranks.counting(advance)
        )
    show_evaluation(out, evaluation)
    return evaluation


def _evaluate_tasks(out: Output, paths: Sequence[Path], tasks: str, chosen: EvalOptions) -> TaskEvaluation:
    """Run tasks of lm-evaluation-harness, and show their scores."""
    from neuzip.eval.harness import evaluate_tasks

    with out.progress("tasks", None, unit="requests") as advance:
        scores = evaluate_tasks(
            paths, tasks.split(","), limit=chosen.limit, device=chosen.device,
            device_map=chosen.device_map, dtype=chosen.dtype, residency=chosen.residency,
            expert_memory=chosen.expert_memory, on_requests=advance,
        )  # fmt: skip
    show_tasks(out, scores)
    return scores


def _make_report(
    out: Output,
    paths: Sequence[Path],
    evaluation: Evaluation,
    scores: TaskEvaluation | None,
    document: Text | None,
    sweep: SweepResults | None,
    chosen: EvalOptions,
) -> EvaluationReport:
    """The report that --report writes and --json prints, with what was read of the weights for a page."""
    from neuzip.eval.report.evaluation import build_report

    rows: tuple[ReportRow, ...] = ()
    versions = None
    if scores is not None:
        from neuzip.eval.harness import report_rows

        rows, versions = report_rows(scores), {"lm-eval": scores.harness}
    original = chosen.original
    with out.progress("report", None) as advance:
        return build_report(
            evaluation, paths[-1], paths[0] if original is not None else None, title=name_of(chosen.src),
            base_title=None if original is None else name_of(original),
            command=shell("neuzip", *sys.argv[1:]), text=document, sweep=sweep, tasks=rows,
            versions=versions, read_weights=chosen.page is not None, on_bytes=advance,
        )  # fmt: skip


def refuse_contradictions(chosen: EvalOptions) -> None:
    """Raise UsageError for options that do not go together."""
    if chosen.text is None and chosen.tasks is None:
        raise UsageError("neither --text nor --tasks is given", "give --text demo, or a file, or --tasks")
    if chosen.tasks is None:
        return
    if chosen.kv_bits is not None:
        raise _not_for_tasks("--kv-bits", chosen.kv_bits, "do not quantise the KV cache")
    if chosen.attention != "recorded":
        raise _not_for_tasks("--attention", chosen.attention, "follow config.json")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            "--tasks cannot run under torchrun",
            "leave it out, or run `accelerate launch -m neuzip.eval.harness run --model neuzip ...`",
        )


def _not_for_tasks(option: str, value: str, why: str) -> UsageError:
    return UsageError(
        f"{option} {value} does not apply to --tasks, which {why}", f"leave out {option} or --tasks"
    )


def place_is_slow(task: EvaluationTask) -> bool:
    """Whether all conventions take long, on a CPU."""
    return str(task.device) == "cpu" and len(task.measured) > 1 and task.tokens >= LONG


def work_text(task: EvaluationTask) -> str:
    """What the tokens of the bar are of."""
    models, conventions = len(task.paths), len(task.measured)
    return (
        "eval"
        if models * conventions == 1
        else (f"eval, {count_text(models, 'model')} x {count_text(conventions, 'convention')}")
    )


def count_zeros(out: Output, task: EvaluationTask) -> Sparsity:
    """How sparse the inputs of layers are, of the last checkpoint on the first tokens of the text."""
    from neuzip.eval.measures.perplexity import load
    from neuzip.runtime.hf.sparsity import sparsity

    reading = task.compared
    model = load(task, len(task.paths) - 1)
    first = reading.windows[0]
    windows = reading.windows[: max(1, COUNTED_TOKENS // (first.stop - first.start))]
    with out.progress("sparsity", len(windows), unit="windows") as advance:

        def batches() -> Iterator[Tensor]:
            for window in windows:
                yield reading.ids[None, window.start : window.stop].to(model.device)
                advance(1)

        zeros = sparsity(model, batches())
    show_sparsity(out, zeros)
    return zeros


def name_of(src: str) -> str:
    """What a checkpoint is called on a page: a Hub id, or the name of its folder."""
    return Path(src).resolve().name if Path(src).exists() else src


def chosen_conventions(option: str | None) -> list[Name] | None:
    """The conventions that an option names, in the order in which there are; None for all."""
    if option is None:
        return None
    from neuzip.eval.measures.convention_names import BOS, NAMES

    names = (BOS, *NAMES)
    wanted = {name.strip() for name in option.split(",")}
    if unknown := wanted - set(names):
        raise UsageError(
            f"--conventions {option}: there is no convention {sorted(unknown)[0]!r}",
            f"choose from {', '.join(names)}",
        )
    return [name for name in names if name in wanted]
