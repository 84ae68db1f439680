"""neuzip decompress: restore a compressed checkpoint."""

from __future__ import annotations

from neuzip.cli import options
from neuzip.cli.output import Output, bytes_text, seconds_text

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
    from neuzip.compress import decompress
    from neuzip.compress.device import choose
    from neuzip.compress.source import weight_bytes
    from neuzip.formats.hub import resolve_source

    path = resolve_source(src, note=out.status, progress=out.watched)
    total = weight_bytes(path)
    chosen = choose(device, total)
    with out.progress("decompress", total) as advance:
        report = decompress(path, dst, jobs=jobs, overwrite=overwrite, device=chosen, on_bytes=advance)
    kind = "byte for byte the original" if report.lossless else "rounded tensors stay rounded"
    if report.was_there:
        out.status("all files were restored already and match the checksums")
    out.text(
        f"{report.dst}: {report.files} files, {bytes_text(report.restored_bytes)}, {kind}, "
        f"in {seconds_text(report.seconds)}"
        + ("" if report.device == "cpu" else f" on {report.device}")
        + ("" if report.was_there else f" ({bytes_text(report.restored_bytes / report.seconds)}/s)")
    )
    out.result(vars(report), quiet=[report.dst])
