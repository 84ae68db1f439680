"""neuzip verify: prove that a compressed checkpoint is intact."""

from __future__ import annotations

from typing import Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output, bytes_text

EXAMPLES = [
    "neuzip verify my-model.nz",
    "neuzip verify my-model.nz --against my-model",
    "neuzip verify tuned.delta --base my-model",
]


def command(
    src: options.SourceArgument,
    against: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="Compare every tensor with this checkpoint, bit for bit"),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Decode a delta too, with the checkpoint that it was made against"),
    ] = None,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check every checksum of a compressed checkpoint, decode it"""
    out = Output(json=json, quiet=quiet)
    from neuzip.compress import verify
    from neuzip.compress.device import choose
    from neuzip.compress.source import weight_bytes
    from neuzip.formats.hub import resolve_source

    path = resolve_source(src, note=out.status, progress=out.watched)
    original = resolve_source(against, note=out.status, progress=out.watched) if against is not None else None
    of_base = resolve_source(base, note=out.status, progress=out.watched) if base is not None else None
    total = weight_bytes(path, allow_delta=True)
    chosen = choose(device, total)
    with out.progress("verify", total) as advance:
        report = verify(path, original, jobs=jobs, device=chosen, on_bytes=advance, base=of_base)
    if report.different:
        out.table(
            ["tensor", "scheme", "largest relative error", "relative L2 error"],
            [[t.name, t.scheme, f"{t.max_relative:.4g}", f"{t.relative_l2:.4g}"] for t in report.different],
            right=["largest relative error", "relative L2 error"],
        )
    out.text(
        f"intact: {len(report.tensors)} tensors ({bytes_text(report.nbytes)}) in {report.files} files, "
        "every checksum right, everything decoded"
    )
    if apart := sum(t.base_missing for t in report.tensors):
        out.text(f"a delta: {apart} tensors need its base, and were checked as far as that goes without")
        out.hint("--base BASE checks what they restore to")
    if original is not None:
        same = len(report.tensors) - len(report.different)
        out.text(f"against {against}: {same} tensors identical, {len(report.different)} rounded as recorded")
    out.result(
        {
            "src": path,
            "against": original,
            "base": of_base,
            "intact": True,
            "files": report.files,
            "device": report.device,
            "identical": None if original is None else not report.different,
            "tensors": report.tensors,
        },
        quiet=[t.name for t in report.different],
    )
