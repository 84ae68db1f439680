"""neuzip inspect: show what a checkpoint's weights are made of."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.compressing.delta import is_delta
from neuzip.cli.output import Output
from neuzip.cli.show.delta import show_delta
from neuzip.cli.show.schemes import legend
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, count_text, percent_text
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.eval.measures.histograms import Inspection, TensorFigures

EXAMPLES = [
    "neuzip inspect my-model",
    "neuzip inspect my-model --tensor '*.mlp.*' --json",
    "neuzip inspect my-model.nz --plot weights.html",
]

NEEDS = {"--overwrite": ("--plot",)}

SPARE = ("sign", "mant", "joint", "stored", "predicted", "dtype", "exp", "shape", "max error", "scheme")
"""Columns that a narrow window does without, the first one first."""

Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also plot the histograms: .png, .svg, or .html with the table"),
]


def command(
    src: options.SourceArgument,
    tensor: options.TensorOption = None,
    plot: Plot = None,
    overwrite: options.OverwriteFileOption = False,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Show entropies, sizes and histograms of a checkpoint"""
    out = Output(json=json, quiet=quiet)
    from neuzip.compress.device import choose
    from neuzip.compress.source import TensorSource, weight_bytes
    from neuzip.eval.measures import histograms
    from neuzip.eval.report import histogram_pictures as pictures
    from neuzip.formats.config_section import own_section, read_config

    if plot is not None:
        pictures.check_target(plot, overwrite)
    path = resolved(out, src)
    if is_delta(path):
        if plot is not None:
            raise UsageError(f"{src} is a delta, which --plot cannot draw", "leave out --plot")
        show_delta(out, path, tensor or [])
        return
    title = Path(src).resolve().name if Path(src).exists() else src
    chosen = choose(device, weight_bytes(path))
    config = Path(path) / "config.json"
    records = own_section(read_config(config), config) if config.is_file() else {}
    with TensorSource(path, chosen) as source:
        tensors = histograms.select(source, tensor or [])
        with out.progress("inspect", sum(t.info.nbytes for t in tensors)) as advance:
            inspection = histograms.inspect(source, tensors, jobs=jobs, on_bytes=advance)
    if plot is not None:
        pictures.write(inspection, title, plot)
    _show_table(out, inspection)
    for counts in inspection.counts:
        out.text()
        for line in pictures.sketch(counts, ascii_only=not _can_show(pictures.BLOCKS)):
            out.text(line)
    if records:
        out.text()
    for name, value in records.items():
        out.text(f"config.json records {name}: {histograms.visible(dumps(value))}")
    if plot is not None:
        out.status(f"wrote {plot}")
    out.result(
        {
            "src": path, "delta": False, "base_name": None, "device": chosen.name, **inspection.to_json(),
            "records": records, "plot": plot,
        },
        quiet=[inspection.after_bytes if plot is None else plot],
    )  # fmt: skip


def _show_table(out: Output, inspection: Inspection) -> None:
    from neuzip.eval.measures.histograms import visible

    stored = "stored" if inspection.compressed else "predicted"
    columns = ["tensor", "dtype", "shape", "scheme", "sign", "exp", "mant", "joint", "bound", stored, "ratio"]
    lines = []
    for t in inspection.tensors:
        e = t.entropies
        entropies = (e.sign, e.exponent, e.mantissa, e.joint) if e is not None else (None,) * 4
        lines.append(
            [t.label, visible(t.dtype), "x".join(map(str, t.shape)) or "scalar", visible(t.short_scheme),
             *("-" if bits is None else f"{bits:.2f}" for bits in entropies), *_sizes(t)]
        )  # fmt: skip
    of = "" if inspection.weight_bytes is None else "weight files: "
    lines.append([f"{of}{count_text(len(lines), 'tensor')}", *[""] * 7, *_sizes(inspection)])
    if inspection.lossy:
        columns.append("max error")
        for line, t in zip(lines, inspection.tensors, strict=False):
            line.append("-" if t.loss is None else percent_text(t.loss.max_relative, 1))
        lines[-1].append("")
    *rows, total = lines
    spare = [name for name in SPARE if name in columns]
    right = set(columns) - {"tensor", "dtype", "shape", "scheme"}
    left_out = out.table(columns, rows, right=right, total=total, spare=spare)
    out.text()
    for note in legend(t.scheme for t in inspection.tensors):
        out.text(note)
    out.text("Entropies in bits per weight; bound and ratio as shares of the original size.")
    out.text("Bound: entropy of the exponents, plus sign and used mantissa bits uncompressed.")
    if inspection.weight_bytes is not None:
        out.text("The last row includes the headers of the files, as `neuzip compress` does.")
    if any(t.scheme.startswith("ternary") for t in inspection.tensors):
        out.text("Bound of ternary tensors: entropy of the codes -1, 0 and 1, without scales.")
    if any(counts.fmt.bits > 16 for counts in inspection.counts):
        out.text("Mantissa entropies of F32 and F64 are upper bounds.")
    out.wider(left_out)


def _sizes(of: TensorFigures | Inspection) -> list[str]:
    """Bound, stored size and ratio: of a tensor, or of all."""
    bound = "-" if of.bound_bytes is None else percent_text(of.bound_bytes, of.nbytes)
    return [bound, bytes_text(of.after_bytes), percent_text(of.after_bytes, of.before_bytes)]


def _can_show(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
