"""neuzip patch-attention: choose the attention precision layer by layer, and record it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import AttentionMode
from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.attention import attention_json, show_calibration
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.runtime.requirements import require_device

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip patch-attention my-model fast --text held-out.txt",
    "neuzip patch-attention my-model.nz fast.nz --text demo --mode 8bit",
    "neuzip patch-attention my-model mix --text my.txt --mode 4bit --max-kld 0.01",
    "neuzip patch-attention my-model fast --text my.txt --plot layers.svg",
    "",
    "Other commands then use the recorded choice:",
    "neuzip eval fast --original my-model --text other.txt",
    "neuzip generate fast --prompt - < long-document.txt",
]

PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also plot similarity and KL divergence by layer: .svg or .png"),
]
ModeOption = Annotated[
    AttentionMode,
    typer.Option(
        help="auto: 8 bits in as many layers as --max-kld allows. 8bit or 4bit: that precision in all"
        " layers, or in as many as a given --max-kld allows. On Hopper GPUs, 4 bits are not faster than 8"
    ),
]
MaxKldOption = Annotated[
    str | None,
    typer.Option(
        metavar="NATS",
        help="Limit of the mean KL divergence per token, of all layers together (default: 0.001 for auto,"
        " no limit for 8bit and 4bit)",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens per window (default: 2048, or the model's maximum)"),
]


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    text: options.TextOption,
    mode: ModeOption = "auto",
    max_kld: MaxKldOption = None,
    window: WindowOption = None,
    max_tokens: options.MaxTokensOption = 16384,
    device: options.RunDeviceOption = "auto",
    plot: PlotOption = None,
    dry_run: options.DryRunOption = False,
    overwrite: options.OverwriteBothOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Choose the attention precision of each layer and record it

    SageAttention2 quantises keys and queries to 8 or 4 bits, and values to FP8, at every call. The command
    measures each layer: how similar its output is to exact attention, and the KL divergence of the model when
    only this layer is quantised. It copies SRC to DST and writes the choice to config.json; weights stay
    unchanged.
    """
    out = Output(json=json, quiet=quiet)
    require_device(device)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.overwrite_guard import require_free
    from neuzip.compress.workspace import write_file, writing
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.plans import target_values
    from neuzip.eval.report import histogram_pictures as pictures
    from neuzip.formats.checkpoint import find_checkpoint

    if plot is not None:
        pictures.check_target(plot, overwrite, pictures.IMAGES)
    limit = None if max_kld is None else target_values.max_kld(max_kld).limit
    document = read_text(text)
    path = resolved_model(out, src)
    checkpoint = find_checkpoint(path)
    if not dry_run:
        require_free(path, dst, overwrite)
    import_large()
    from neuzip.eval import attention
    from neuzip.eval.report import attention_pictures

    calibration = attention.calibrate(
        path, document, mode, out.stage, max_kld=limit, window=window, max_tokens=max_tokens,
        device=device,
    )  # fmt: skip
    show_calibration(out, calibration)
    if calibration.tokens < calibration.window:
        out.warning(
            f"--text {text}: has {calibration.tokens:,} tokens, fewer than a window of "
            f"{calibration.window:,}",
            "use a longer text",
        )
    title = Path(src).resolve().name if Path(src).exists() else src
    drawn = None if plot is None else attention_pictures.drawn(calibration, title, plot)
    if not dry_run:
        total = sum((checkpoint.root / f).stat().st_size for f in (*checkpoint.weights, *checkpoint.others))
        with out.progress("copy", total) as advance:
            attention.copy_patched(path, dst, calibration.bits, overwrite=overwrite, on_bytes=advance)
        out.text(f"{dst}: recorded in config.json")
    if plot is not None and drawn is not None:
        # Drawn before, as a run that is killed between DST and its picture would have to measure anew.
        with writing(plot):
            write_file(plot, drawn)
        out.status(f"wrote {plot}")
    out.result(
        {"dry_run": dry_run, "src": path, "dst": dst, **attention_json(calibration), "plot": plot},
        quiet=[calibration.comparison.kld.mean.value if dry_run else dst],
    )
