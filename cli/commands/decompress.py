"""neuzip decompress: restore a compressed checkpoint."""

from __future__ import annotations

from pathlib import Path

from neuzip.choices import DeviceName
from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, count_text, seconds_text

EXAMPLES = [
    "neuzip decompress my-model.nz my-model",
    "neuzip decompress model.safetensors restored.safetensors",
]


def command(
    src: options.SourceArgument,
    dst: options.DestinationArgument,
    device: options.DeviceOption = "auto",
    jobs: options.JobsOption = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Restore a compressed checkpoint, byte for byte if lossless"""
    out = Output(json=json, quiet=quiet)
    path = resolved(out, src)
    restore(out, path, dst, verb="decompress", base=None, device=device, jobs=jobs, overwrite=overwrite)


def restore(
    out: Output,
    path: Path,
    dst: Path,
    *,
    verb: str,
    base: Path | None,
    device: DeviceName,
    jobs: int | None,
    overwrite: bool,
) -> None:
    """Restore a checkpoint, a delta with its `base`, and report. `verb` is what was typed."""
    from neuzip.compress import decompress
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import weight_bytes

    total = weight_bytes(path, allow_delta=base is not None)
    chosen = choose(device, total)
    with out.progress(verb, total) as advance:
        report = decompress(
            path, dst, jobs=jobs, overwrite=overwrite, device=chosen, on_bytes=advance, base=base
        )
    kind = "byte for byte the original" if report.lossless else "rounded tensors stay rounded"
    if base is not None:
        kind += f", from a delta of {bytes_text(report.stored_bytes)}"
    if report.was_there:
        one = report.files == 1
        out.status(
            f"{'the file was' if one else 'all files were'} restored already and "
            f"{'matches its' if one else 'match the'} checksums"
        )
    out.text(
        f"{report.dst}: {count_text(report.files, 'file')}, {bytes_text(report.restored_bytes)}, {kind}, "
        f"in {seconds_text(report.seconds)}"
        + ("" if report.device == "cpu" else f" on {report.device}")
        + ("" if report.was_there else f" ({bytes_text(report.restored_bytes / report.seconds)}/s)")
    )
    out.result({**vars(report), "base": base}, quiet=[report.dst])
