"""neuzip verify: prove that a compressed checkpoint is intact."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.show.schemes import legend
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, count_text

if TYPE_CHECKING:
    from neuzip.compress.tensor_checks import TensorVerdict

EXAMPLES = [
    "neuzip verify my-model.nz",
    "neuzip verify my-model.nz --original my-model",
    "neuzip verify tuned.delta --base my-model",
]


def command(
    src: options.SourceArgument,
    original: Annotated[
        str | None,
        typer.Option(
            "--original",
            metavar="ORIGINAL",
            help="Also compare every tensor with this checkpoint, bit for bit",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Base of a delta, needed to decode all of it"),
    ] = None,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check all checksums of a compressed checkpoint and decode it"""
    out = Output(json=json, quiet=quiet)
    from neuzip.compress import verify
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import weight_bytes

    path = resolved(out, src)
    of_original = resolved(out, original) if original is not None else None
    of_base = resolved(out, base) if base is not None else None
    total = weight_bytes(path, allow_delta=True)
    chosen = choose(device, total)
    with out.progress("verify", total) as advance:
        report = verify(path, of_original, jobs=jobs, device=chosen, on_bytes=advance, base=of_base)
    if report.different:
        out.table(
            ["tensor", "scheme", "largest relative error", "relative L2 error"],
            [[t.name, t.scheme, f"{t.max_relative:.4g}", f"{t.relative_l2:.4g}"] for t in report.different],
            right=["largest relative error", "relative L2 error"],
        )
        for line in legend(t.scheme for t in report.different):
            out.text(line)
    held = f"{count_text(len(report.tensors), 'tensor')} ({bytes_text(report.nbytes)})"
    files = count_text(report.files, "file")
    apart = sum(t.base_missing for t in report.tensors)
    if apart:
        out.text(f"intact without the base: {held} in {files}, every checksum right")
        out.text(without_base_text(apart))
        out.hint("--base BASE decodes them too")
    else:
        of_delta = "" if base is None else f" with the base {base}"
        out.text(f"intact: {held} in {files}, every checksum right, everything decoded{of_delta}")
    if original is not None:
        same = len(report.tensors) - len(report.different)
        rounded = f"{len(report.different)} rounded as recorded"
        out.text(f"against {original}: {count_text(same, 'tensor')} identical, {rounded}")
    out.result(
        {
            "src": path,
            "original": of_original,
            "base": of_base,
            "intact": True,
            "files": report.files,
            "device": report.device,
            "identical": None if original is None else not report.different,
            "tensors": [_told(t) for t in report.tensors],
        },
        quiet=[t.name for t in report.different],
    )


def without_base_text(count: int) -> str:
    """What was not checked of a delta whose base was not given.

    >>> without_base_text(1)
    '1 tensor not restored: it needs the base; only its stored data was checked'
    """
    need, their = ("it needs", "its") if count == 1 else ("they need", "their")
    return (
        f"{count_text(count, 'tensor')} not restored: {need} the base; only {their} stored data was checked"
    )


def _told(tensor: TensorVerdict) -> dict[str, object]:
    """A tensor for `--json`; its size is called as everywhere."""
    values = asdict(tensor)
    return {"original_bytes" if key == "nbytes" else key: value for key, value in values.items()}
