"""neuzip export: write a ternary model as other engines read it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.output import Output, bytes_text, percent_text, seconds_text
from neuzip.cli.source import resolved
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.compress.export import Target

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

Engine = Literal["transformers-bitnet", "compressed-tensors", "gguf"]


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    to: Annotated[Engine, typer.Option(help="Engine or library to export for", show_default=False)],
    gguf_type: Annotated[
        Literal["tq1_0", "tq2_0", "q2_0"] | None,
        typer.Option(help="GGUF type: 1.69, 2.06 (default) or 2.25 bits per weight"),
    ] = None,
    gguf_mixed: Annotated[
        bool,
        typer.Option(
            "--gguf-mixed", help="Store rows that do not fill whole blocks of the type as Q2_0 or Q4_0"
        ),
    ] = False,
    linear_class: Annotated[
        Literal["bitlinear", "autobitlinear"] | None,
        typer.Option(help="Linear class of transformers (default: bitlinear; online: autobitlinear)"),
    ] = None,
    mode: Annotated[
        Literal["offline", "online"] | None,
        typer.Option(help="Packed weights (offline, the default), or floats that transformers quantises"),
    ] = None,
    activations: Annotated[
        Literal["b1.58", "none"] | None,
        typer.Option(help="Activations: 8 bits (b1.58, the default) or not quantised"),
    ] = None,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Export a ternary model for another engine"""
    out = Output(json=json, quiet=quiet)
    if to == "gguf" and dst.suffix != ".gguf":
        raise UsageError(f"{dst}: --to gguf writes one file", "end DST in .gguf")
    let_threads_sleep()
    out.loading()
    target = _target(to, gguf_type, gguf_mixed, linear_class, mode, activations)
    from neuzip.compress.export import export
    from neuzip.compress.source import weight_bytes

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
        "codes as in the source; "
        + (f"scales rounded by {report.scale_error:.2g} at most" if report.scale_error else "scales exact")
    )
    out.text(f"{report.dst} in {seconds_text(report.seconds)}")
    out.result(
        {
            **vars(report),
            "to": to,
            "target": target,
            "ternary": report.ternary,
            "scale_error": report.scale_error,
        },
        quiet=[report.dst],
    )


def _target(
    to: Engine,
    gguf_type: str | None,
    gguf_mixed: bool,
    linear_class: str | None,
    mode: str | None,
    activations: str | None,
) -> Target:
    from neuzip.compress.export import Gguf
    from neuzip.formats.export.compressed_tensors import PackQuantized
    from neuzip.formats.export.transformers_bitnet import TransformersBitnet

    if to == "gguf":
        return Gguf(gguf_type or "tq2_0", gguf_mixed)
    if to == "compressed-tensors":
        return PackQuantized(activations or "b1.58")
    only = "autobitlinear" if mode == "online" else "bitlinear"
    return TransformersBitnet(linear_class or only, mode or "offline")
