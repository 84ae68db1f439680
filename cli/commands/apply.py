"""neuzip apply: restore a checkpoint from its difference to another."""

from __future__ import annotations

from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output, bytes_text, seconds_text

EXAMPLES = [
    "neuzip compress my-model-tuned tuned.delta --against my-model",
    "neuzip apply tuned.delta my-model-tuned --base my-model",
    "neuzip apply me/tuned-delta tuned --base org/model --device cuda",
]


def command(
    delta: Annotated[
        str,
        typer.Argument(
            metavar="DELTA", help="What compress --against made: folder, file or Hub id", show_default=False
        ),
    ],
    dst: options.DestinationArgument,
    base: Annotated[
        str,
        typer.Option(metavar="SRC", help="The checkpoint that it was made against, plain or compressed"),
    ],
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Restore a checkpoint from a delta and its base"""
    out = Output(json=json, quiet=quiet)
    from neuzip.compress import decompress
    from neuzip.compress.device import choose
    from neuzip.compress.source import weight_bytes
    from neuzip.formats.hub import resolve_source

    path = resolve_source(delta, note=out.status, progress=out.watched)
    of_base = resolve_source(base, note=out.status, progress=out.watched)
    total = weight_bytes(path, allow_delta=True)
    chosen = choose(device, total)
    with out.progress("apply", total) as advance:
        report = decompress(
            path, dst, jobs=jobs, overwrite=overwrite, device=chosen, on_bytes=advance, base=of_base
        )
    if report.was_there:
        out.status("all files were restored already and match the checksums")
    out.text(
        f"{report.dst}: {report.files} files, {bytes_text(report.restored_bytes)}, byte for byte the "
        f"original, from a delta of {bytes_text(report.stored_bytes)}, in {seconds_text(report.seconds)}"
        + ("" if report.device == "cpu" else f" on {report.device}")
        + ("" if report.was_there else f" ({bytes_text(report.restored_bytes / report.seconds)}/s)")
    )
    out.result({**vars(report), "base": of_base}, quiet=[report.dst])
