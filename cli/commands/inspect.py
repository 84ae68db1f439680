"""neuzip inspect: show what a checkpoint's weights are made of."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.compressing.delta import is_delta
from neuzip.cli.output import Output
from neuzip.cli.show.delta import show_delta
from neuzip.cli.show.inspection import can_show, show_inspection
from neuzip.cli.show.rates import show_rates
from neuzip.cli.source import resolved
from neuzip.errors import UsageError

if TYPE_CHECKING:
    pass

EXAMPLES = [
    "neuzip inspect my-model",
    "neuzip inspect my-model --tensor '*.mlp.*' --json",
    "neuzip inspect my-model.nz --plot weights.html",
]

NEEDS = {"--overwrite": ("--plot",)}


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
    """Show entropies, histograms, and sizes at several rates"""
    out = Output(json=json, quiet=quiet)
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import FolderSource, weight_bytes
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
    with FolderSource(path, chosen) as source:
        tensors = histograms.select(source, tensor or [])
        with out.progress("inspect", sum(t.info.nbytes for t in tensors)) as advance:
            inspection = histograms.inspect(source, tensors, jobs=jobs, on_bytes=advance)
    if plot is not None:
        pictures.write(inspection, title, plot)
    show_inspection(out, inspection)
    show_rates(out, inspection)
    for counts in inspection.counts:
        out.text()
        for line in pictures.sketch(counts, ascii_only=not can_show(pictures.BLOCKS)):
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
