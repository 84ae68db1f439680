"""neuzip export: write a ternary model as other engines read it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.choices import BitnetMode, ExportActivations, ExportEngine, GgufType, LinearClass
from neuzip.cli import options
from neuzip.cli.command_run import RUN
from neuzip.cli.output import Output
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, percent_text, seconds_text
from neuzip.cli.threads import let_threads_sleep

if TYPE_CHECKING:
    pass

PACKAGES = ("torch",)

EXAMPLES = [
    "neuzip export my-model.nz my-model-bitnet --to transformers-bitnet",
    "neuzip export my-model.nz my-model-vllm --to compressed-tensors",
    "neuzip export my-model.nz my-model.gguf --to gguf --gguf-type q2_0",
]

NEEDS = {
    "--gguf-type": ("--to gguf",),
    "--gguf-mixed": ("--to gguf",),
    "--linear-class": ("--to transformers-bitnet",),
    "--mode": ("--to transformers-bitnet",),
    "--activations": ("--to compressed-tensors",),
}


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    to: Annotated[ExportEngine, typer.Option(help="Engine or library to export for", show_default=False)],
    gguf_type: Annotated[
        GgufType | None,
        typer.Option(help="GGUF type: 1.69, 2.06 (default) or 2.25 bits per weight"),
    ] = None,
    gguf_mixed: Annotated[
        bool,
        typer.Option(
            "--gguf-mixed",
            help="Use Q2_0 or Q4_0 for tensors whose rows do not fill whole blocks of --gguf-type",
        ),
    ] = False,
    linear_class: Annotated[
        LinearClass | None,
        typer.Option(
            help="Linear class of transformers (default: bitlinear, or autobitlinear with --mode online)"
        ),
    ] = None,
    mode: Annotated[
        BitnetMode | None,
        typer.Option(help="Packed weights (offline, the default), or floats that transformers quantises"),
    ] = None,
    activations: Annotated[
        ExportActivations | None,
        typer.Option(help="Activations: 8 bits (b1.58, the default) or not quantised"),
    ] = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Export a ternary model for another engine"""
    out = Output(json=json, quiet=quiet)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.export import export, target_of
    from neuzip.compress.sources.folder import weight_bytes

    target = target_of(to, dst, gguf_type, gguf_mixed, linear_class, mode, activations)
    path = resolved(out, src)
    with out.progress("export", weight_bytes(path)) as advance:
        report = export(path, dst, target, overwrite=overwrite, on_bytes=advance)
    for warning in report.warnings:
        out.warning(warning)
    out.text(
        f"{report.ternary} of {len(report.tensors)} tensors are ternary; weights "
        f"{bytes_text(report.source_bytes)} -> {bytes_text(report.exported_bytes)} "
        f"({percent_text(report.exported_bytes, report.source_bytes)})"
    )
    packings = Counter(t.packing for t in report.tensors if t.packing)
    if len(packings) > 1:
        out.text("packed as " + ", ".join(f"{kind} ({n})" for kind, n in packings.most_common()))
    out.text(
        "codes unchanged; "
        + (f"scales rounded by at most {report.scale_error:.2g}" if report.scale_error else "scales exact")
    )
    out.text(f"{report.dst} in {seconds_text(report.seconds)}")
    out.result(
        {
            **vars(report),
            "to": to,
            "target": target,
            "ternary": report.ternary,
            "scale_error": report.scale_error,
            "warnings": [RUN.translate(warning) for warning in report.warnings],
        },
        quiet=[report.dst],
    )
