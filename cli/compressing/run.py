"""The work of `neuzip compress`: looks through its options, and compresses in the way that they ask for."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from neuzip.cli.compressing.delta import make_delta
from neuzip.cli.compressing.options import EXCLUSIONS, CompressOptions
from neuzip.cli.compressing.stream import compress_on_hub
from neuzip.cli.compressing.target import layers_to_drop, nothing_kept, predict, reach
from neuzip.cli.exclusions import refuse_excluded
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.attention import attention_json, show_calibration
from neuzip.cli.show.compression import show_plan, show_report
from neuzip.cli.show.target import show_method, target_json
from neuzip.cli.source import refuse_before_download, resolved
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.compress import Plan, Rule
    from neuzip.compress.ranks import Ranks
    from neuzip.eval.attention import AttentionCalibration
    from neuzip.eval.plans.plan_request import DropLayers
    from neuzip.eval.plans.target_values import RequestedTarget

TIED_MEASURED = range(1, 5)
"""Mantissa bits K for which benchmarks/tied_embedding.py has measured what K + 1 for a tied embedding do."""

TIED_WORTH = "weight files of SmolLM2-135M 3 to 5 % larger and its KL divergence 27 to 38 % smaller"
"""What they do, by these K."""


def run(out: Output, ranks: Ranks, options: CompressOptions) -> None:
    """Compress as the options say, and report.

    Raises UsageError for options that exclude each other, NeuzipError, and typer.Exit for a missed target.
    """
    from neuzip.eval.plans.target_request import measures_nothing, text_for

    request, goal, attention = options.request, options.goal, options.attention
    request.refuse_conflicts()
    drop_layers = layers_to_drop(
        options.drop_layers, goal, scheme=request.scheme, sensitivity=request.sensitivity,
        excluded="--dry-run" if options.dry_run else "--attention" if attention is not None else None,
    )  # fmt: skip
    if ranks.world > 1:
        _refuse_several_processes(options)
    by_weights = measures_nothing(goal, request.scheme, request.sensitivity, str(request.calibration))
    needed = not by_weights or attention is not None or drop_layers != 0
    text = text_for(options.text, needed=needed)
    rules = request.to_rules()
    refuse_excluded(EXCLUSIONS, options.names(several_processes=ranks.world > 1))
    if options.base is not None:
        make_delta(out, options, options.base, rules)
    elif options.stream or (options.push_to is not None and not options.dry_run):
        compress_on_hub(out, options, rules)
    else:
        _compress_here(out, ranks, options, rules, text, drop_layers)


def _refuse_several_processes(options: CompressOptions) -> None:
    """Raise UsageError for what is measured on a text, which one process does."""
    if options.goal is not None:
        raise UsageError(
            f"`{options.goal.parameter}` does not run under torchrun",
            "run it alone, and pass its plan to --plan here",
        )
    if options.attention is not None:
        raise UsageError(
            f"--attention {options.attention} does not run under torchrun",
            "run neuzip patch-attention on the result",
        )


def _compress_here(
    out: Output,
    ranks: Ranks,
    options: CompressOptions,
    rules: Sequence[Rule],
    text: str | None,
    drop_layers: DropLayers,
) -> None:
    """Compress a checkpoint on this machine, with all that is measured for it on `text`."""
    dst = options.dst
    if not options.dry_run:
        ranks.on_first(lambda: refuse_before_download(options.src, dst, options.overwrite))
    path = ranks.first_before_others(lambda: resolved(out, options.src))
    began = time.monotonic()
    calibration, more = None, {}
    if options.attention is not None:
        assert text is not None
        with nothing_kept():
            calibration = _calibrate(out, path, options, text)
        more = {"attention": attention_json(calibration)}
    if options.goal is not None:
        _compress_to_target(
            out, path, options, options.goal, rules, text, drop_layers, calibration, more, began
        )
    elif not options.dry_run:
        _compress_by_rules(out, ranks, path, options, rules, calibration, more, began)
    elif ranks.is_first:
        allow_destructive = options.request.allow_destructive
        plan, private = _make_plan(path, dst, rules, options.jobs, allow_destructive=allow_destructive)
        show_plan(out, path, dst, plan, private, more)
        _hint_of_tied(out, path, rules, options.request.mantissa_bits)


def _compress_by_rules(
    out: Output,
    ranks: Ranks,
    path: Path,
    options: CompressOptions,
    rules: Sequence[Rule],
    calibration: AttentionCalibration | None,
    more: Mapping[str, object],
    began: float,
) -> None:
    """Compress by rules that are known. `began` is when measuring began, in seconds of time.monotonic."""
    from neuzip.compress import compress
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import weight_bytes

    request = options.request
    total = weight_bytes(path)
    coder = choose(options.device, total)
    with out.progress("compress", total) as advance:
        report = compress(
            path, options.dst, rules, verify=options.verify, jobs=options.jobs, overwrite=options.overwrite,
            device=coder, on_bytes=advance, ranks=ranks, allow_destructive=request.allow_destructive,
            activations=request.activations,
        )  # fmt: skip
    for warning in report.warnings:
        out.warning(warning)
    if calibration is not None:
        _record_attention(out, options.dst, calibration)
        report = replace(report, seconds=time.monotonic() - began)
    show_report(out, report, more, measured=calibration is not None, verified=options.verify)
    _hint_of_tied(out, path, rules, request.mantissa_bits)


def _compress_to_target(
    out: Output,
    path: Path,
    options: CompressOptions,
    goal: RequestedTarget,
    rules: Sequence[Rule],
    text: str | None,
    drop_layers: DropLayers,
    calibration: AttentionCalibration | None,
    more: Mapping[str, object],
    began: float,
) -> None:
    """Search the plan for a target, and compress by it; the exit code is 1 for a result that misses it."""
    from neuzip.compress.rules import block_size_of
    from neuzip.eval.plans.target_request import prepare_search

    request = options.request
    with nothing_kept():
        search = prepare_search(
            goal, path, options.dst, rules, scheme=request.scheme, calibration=str(request.calibration),
            block_size=block_size_of(request.block_size), text=text, sensitivity=request.sensitivity,
            device=options.device, jobs=options.jobs, overwrite=options.overwrite, dry_run=options.dry_run,
            drop_layers=drop_layers, expert_use=request.expert_use, import_models=import_large,
        )  # fmt: skip
        show_method(out, search)
    if options.dry_run:
        with nothing_kept():
            solution = predict(out, search)
        plan, private = _make_plan(path, options.dst, solution.rules, options.jobs)
        show_plan(out, path, options.dst, plan, private, {"target": target_json(search, solution), **more})
        return
    result = reach(out, search, verify=options.verify, overwrite=options.overwrite)
    if calibration is not None:
        _record_attention(out, options.dst, calibration)
    show_report(
        out, replace(result.report, seconds=time.monotonic() - began),
        {"target": target_json(search, result.search, result), **more},
        dropped=bool(result.dropped), measured=True, verified=options.verify,
    )  # fmt: skip
    raise typer.Exit(0 if result.holds else 1)


def _calibrate(out: Output, path: Path, options: CompressOptions, text: str) -> AttentionCalibration:
    """Measure the attention of the original, if it can be compressed to DST at all, and show the choice."""
    from neuzip.compress.entry_checks import require_plain
    from neuzip.compress.overwrite_guard import refuse_existing
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.plans.plan_file import refuse_other_files

    assert options.attention is not None
    with FolderSource(path) as source:
        require_plain(source, options.dst)
    if not options.dry_run:
        refuse = refuse_other_files if options.goal is not None else refuse_existing
        refuse(options.dst, options.overwrite)
    document = read_text(text)
    import_large()
    from neuzip.eval.attention import calibrate

    calibration = calibrate(path, document, options.attention, out.stage, device=options.device)
    show_calibration(out, calibration)
    out.text()
    return calibration


def _record_attention(out: Output, dst: Path, calibration: AttentionCalibration) -> None:
    """Write the choice of bits to the config.json of what was compressed."""
    from neuzip.runtime.hf.attention_config import record_layers

    record_layers(dst, calibration.bits)
    out.status(f"{dst}: config.json records the attention precision of the layers")


def _make_plan(
    path: Path, dst: Path, rules: Sequence[Rule], jobs: int | None, *, allow_destructive: bool = False
) -> tuple[Plan, Mapping[str, str]]:
    """The plan of a dry run with predicted sizes, and the files that look private, each with its kind."""
    from neuzip.compress import make_plan
    from neuzip.compress.entry_checks import require_plain
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.compress.workers import Workers
    from neuzip.formats.hub.private_files import private_files

    with FolderSource(path) as source, Workers(jobs) as workers:
        require_plain(source, dst)
        plan = make_plan(source, rules, workers, predict=True, allow_destructive=allow_destructive)
        return plan, private_files(source.checkpoint)


def _hint_of_tied(out: Output, path: Path, rules: Sequence[Rule], mantissa_bits: int | None) -> None:
    """Say what one bit more for a tied embedding does, if it was given as few bits as all else."""
    from neuzip.compress.rules import choose
    from neuzip.compress.tied import tied_embedding

    if mantissa_bits is None or mantissa_bits not in TIED_MEASURED:
        return
    name = tied_embedding(path)
    if name is None or choose(rules, name, 2).mantissa_bits != mantissa_bits:
        return
    value = shlex.quote(f"{name}={mantissa_bits + 1}")
    out.hint(
        f"{name} is a tied embedding, used as output head too: --bits-for {value} keeps one more bit of it. "
        f"That made {TIED_WORTH}; measure yours with neuzip eval"
    )
