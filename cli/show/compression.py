"""A compression, planned or done: in words, and under `--json` with the same keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.components import Component, components, show_components
from neuzip.cli.show.schemes import legend, scheme_text
from neuzip.cli.text import bytes_text, count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport, Plan
    from neuzip.compress.plan import PlannedTensor

WORTH_A_WORD = 1 << 16
"""Bytes of a tensor whose unexpected scheme is mentioned; norms and biases are raw as a rule."""

PLAN_SPARE = ["dtype", "shape", "tensors"]
"""Columns of the table of a plan that a narrow window does without, the least useful first."""


def compression_json(
    *,
    dry_run: bool,
    src: object,
    dst: object,
    original_bytes: int,
    stored_bytes: int | None,
    weight_bytes: int,
    stored_weight_bytes: int | None,
    weights: int,
    lossless: bool | None,
    tensors: Sequence[object],
    components: Sequence[Component],
    private_files: Sequence[str],
    more: Mapping[str, object],
    seconds: float | None = None,
    device: str | None = None,
    resumed_files: int = 0,
    warnings: Sequence[str] = (),
) -> dict[str, object]:
    """What `--json` says of a compression, the same keys of a dry run, whose sizes are predicted.

    `more` replaces some of the keys that are null for most runs.
    """
    stored = stored_weight_bytes
    further = dict.fromkeys(("target", "attention", "base", "base_name", "stream", "pushed"))
    if unknown := more.keys() - {*further, "dst"}:
        raise ValueError(f"no keys of compress: {', '.join(sorted(unknown))}")
    return {
        "dry_run": dry_run,
        "src": src,
        "dst": dst,
        "original_bytes": original_bytes,
        "stored_bytes": stored_bytes,
        "weight_bytes": weight_bytes,
        "stored_weight_bytes": stored,
        "weights": weights,
        "ratio": None if stored is None or not weight_bytes else stored / weight_bytes,
        "bits_per_weight": None if stored is None or not weights else 8 * stored / weights,
        "lossless": lossless,
        "seconds": seconds,
        "device": device,
        "resumed_files": resumed_files,
        "warnings": warnings,
        "private_files": private_files,
        "tensors": tensors,
        "components": components,
        **further,
        **more,
    }


def planned_json(tensors: Sequence[PlannedTensor]) -> list[dict[str, object]]:
    """What `--json` says of tensors before they are compressed."""
    return [
        {
            "file": t.tensor.file,
            "name": t.tensor.name,
            "dtype": t.tensor.info.dtype,
            "shape": t.tensor.info.shape,
            "scheme": _scheme_of(t),
            "original_bytes": t.tensor.info.nbytes,
            "stored_bytes": t.predicted,
            "loss": None,
            "note": t.note,
        }
        for t in tensors
    ]


def planned_components(tensors: Sequence[PlannedTensor]) -> list[Component]:
    """The components of a pipeline before it is compressed."""
    return components((t.tensor.file, _scheme_of(t), t.tensor.info.nbytes, t.predicted) for t in tensors)


def _scheme_of(tensor: PlannedTensor) -> str:
    return "alias" if tensor.alias_of is not None else str(tensor.scheme)


def alike(tensors: Sequence[PlannedTensor]) -> dict[tuple[str, ...], list[PlannedTensor]]:
    """Tensors by name without its numbers, shape, dtype and scheme, in the order of their first."""
    groups: dict[tuple[str, ...], list[PlannedTensor]] = {}
    for t in tensors:
        info = t.tensor.info
        scheme = str(t.scheme) if t.alias_of is None else f"same as {pattern(t.alias_of.name)}"
        shape = "x".join(map(str, info.shape)) or "scalar"
        groups.setdefault((pattern(info.name), shape, info.dtype, scheme), []).append(t)
    return {
        (group[0].tensor.info.name if len(group) == 1 else key[0], *key[1:]): group
        for key, group in groups.items()
    }


def pattern(name: str) -> str:
    """A name with its numbers left out.

    >>> pattern("model.layers.12.mlp.experts.3.w1.weight")
    'model.layers.*.mlp.experts.*.w1.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def show_report(
    out: Output,
    report: CompressionReport,
    more: Mapping[str, object],
    *,
    dropped: bool = False,
    measured: bool = False,
    verified: bool = True,
    page: str | None = None,
) -> None:
    """Say what was compressed, and give it to machines.

    more      keys of the JSON object that only some runs have
    dropped   whether layers were dropped
    measured  whether the seconds are those of trials and comparisons too, which say nothing of a speed
    verified  whether every tensor was decoded and compared
    page      address of what was pushed, if nothing stayed on this machine
    """
    _show_resumed_and_notes(out, report)
    parts = components((t.file, t.scheme, t.original_bytes, t.stored_bytes) for t in report.tensors)
    show_components(out, parts)
    out.table(
        ["", "before", "after", "ratio", "bits/weight"],
        [
            ["weights", bytes_text(report.weight_bytes), bytes_text(report.stored_weight_bytes),
             percent_text(report.stored_weight_bytes, report.weight_bytes), f"{report.bits_per_weight:.2f}"],
            ["all files", bytes_text(report.original_bytes), bytes_text(report.stored_bytes),
             percent_text(report.stored_bytes, report.original_bytes), ""],
        ],
        right=["before", "after", "ratio", "bits/weight"],
    )  # fmt: skip
    is_lossy = _show_loss(out, report)
    if not is_lossy and not dropped:
        how = "bit for bit" if verified else "by their schemes; nothing was decoded to verify it"
        out.text(f"lossless: all {count_text(len(report.tensors), 'tensor')}, {how}")
    speed = f" ({bytes_text(report.weight_bytes / report.seconds)}/s)"
    if measured:
        speed = ", planning and measuring included"
    elif report.resumed_files:
        speed = ""
    on = "" if report.device == "cpu" else f" on {report.device}"
    out.text(f"{page or report.dst} in {seconds_text(report.seconds)}{on}{speed}")
    out.result(
        compression_json(
            dry_run=False, src=report.src, dst=report.dst, original_bytes=report.original_bytes,
            stored_bytes=report.stored_bytes, weight_bytes=report.weight_bytes,
            stored_weight_bytes=report.stored_weight_bytes, weights=report.weights,
            lossless=not is_lossy and not dropped, tensors=report.tensors, components=parts,
            private_files=report.private_files, seconds=report.seconds, device=report.device,
            resumed_files=report.resumed_files, warnings=report.warnings, more=more,
        ),
        quiet=[page or report.dst],
    )  # fmt: skip


def _show_resumed_and_notes(out: Output, report: CompressionReport) -> None:
    """Say which files were finished already, and which large tensors have an unexpected scheme."""
    if report.resumed_files:
        one = report.resumed_files == 1
        how = "was finished already and matches" if one else "were finished already and match"
        out.status(f"{count_text(report.resumed_files, 'file')} {how} the source")
    notes = Counter((t.scheme, t.note) for t in report.tensors if t.note)
    large = {(t.scheme, t.note) for t in report.tensors if t.original_bytes >= WORTH_A_WORD}
    for (scheme, note), count in notes.items():
        if (scheme, note) not in large or any(note in warning for warning in report.warnings):
            continue
        out.status(
            f"stored {scheme_text(scheme)}: {count_text(count, 'tensor')}, {note}; --json has their names"
        )


def _show_loss(out: Output, report: CompressionReport) -> bool:
    """Say what rounding did, and return whether there was any.

    Relative errors of single weights say nothing of those that become 0: there, norms are compared.
    """
    losses = [(t.scheme, t.loss) for t in report.tensors if t.loss is not None]
    count = count_text(len(report.tensors), "tensor")
    rounded = [loss for _, loss in losses if loss.relative_l2 is None]
    if rounded:
        out.text(
            f"{len(rounded)} of {count} rounded: "
            f"largest relative error {max(x.max_relative for x in rounded):.3g}, "
            f"largest RMS error {max(x.rms_relative for x in rounded):.3g}"
        )
    for words, is_of in (("quantised", True), ("rounded to ternary", False)):
        of_scheme = [loss for scheme, loss in losses if scheme.startswith("quantized") is is_of]
        norms = [loss.relative_l2 for loss in of_scheme if loss.relative_l2 is not None]
        if norms:
            out.text(
                f"{len(norms)} of {count} {words}: they differ from the original by "
                f"{min(norms):.0%} to {max(norms):.0%} in the L2 norm"
            )
    return bool(losses)


def show_plan(
    out: Output, path: Path, dst: Path, plan: Plan, private: Mapping[str, str], more: Mapping[str, object]
) -> None:
    """Say what a run would do, and give it to machines; `private` names files that look private, and why."""
    from neuzip.compress.plan import rounds_nothing
    from neuzip.formats.hub.private_files import listed

    for line in listed(private):
        out.warning(f"looks private, and would be copied: {line}")
    predicted, predicted_weights = plan.predicted_bytes or 0, plan.predicted_weight_bytes or 0
    rows = [
        [name, f"{len(group):,}", shape, dtype, scheme, bytes_text(sum(t.tensor.info.nbytes for t in group)),
         percent_text(sum(t.predicted or 0 for t in group), sum(t.tensor.info.nbytes for t in group))]
        for (name, shape, dtype, scheme), group in alike(plan.tensors).items()
    ]  # fmt: skip
    columns = ["name", "tensors", "shape", "dtype", "scheme", "bytes", "predicted"]
    left_out = out.table(columns, rows, right=["tensors", "bytes", "predicted"], spare=PLAN_SPARE)
    out.wider(left_out)
    for line in legend(str(t.scheme) for t in plan.tensors):
        out.text(line)
    if len(rows) < len(plan.tensors):
        out.text("* is any number: tensors of one kind share a row, and --json lists every tensor")
    show_notes(out, plan.tensors)
    parts = planned_components(plan.tensors)
    show_components(out, parts)
    for name, before, after in (
        ("weights", plan.weight_bytes, predicted_weights), ("all files", plan.original_bytes, predicted),
    ):  # fmt: skip
        share = percent_text(after, before)
        out.text(f"{name}: {bytes_text(before)}, predicted {bytes_text(after)} ({share})")
    out.result(
        compression_json(
            dry_run=True, src=path, dst=dst, original_bytes=plan.original_bytes, stored_bytes=predicted,
            weight_bytes=plan.weight_bytes, stored_weight_bytes=predicted_weights, weights=plan.weights,
            lossless=rounds_nothing(plan.tensors), tensors=planned_json(plan.tensors),
            components=parts, private_files=list(private), more=more,
        ),
        quiet=[predicted],
    )  # fmt: skip


def show_notes(out: Output, tensors: Sequence[PlannedTensor]) -> None:
    """Say of how many tensors the scheme was chosen for a reason, by scheme and reason."""
    for (scheme, note), count in Counter((str(t.scheme), t.note) for t in tensors if t.note).items():
        out.text(f"{scheme_text(scheme)}: {count_text(count, 'tensor')}, {note}")
