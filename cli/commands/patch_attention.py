"""neuzip patch-attention: choose the attention precision layer by layer, and record it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuzip.cli import options
from neuzip.cli.commands.eval import estimate_text, precise_text, signed_text
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import count_text, seconds_text
from neuzip.cli.threads import let_threads_sleep

if TYPE_CHECKING:
    from neuzip.eval.attention import AttentionCalibration, AttentionLayer, QuantizedAttention

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

Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also plot similarity and KL divergence by layer: .svg or .png"),
]


def command(
    src: options.ModelArgument,
    dst: options.DestinationArgument,
    text: Annotated[
        str,
        typer.Option("--text", metavar="TEXT", help="Text to measure on, as for eval", show_default=False),
    ],
    mode: Annotated[
        options.AttentionMode,
        typer.Option(
            help="auto: 8 bits in as many layers as --max-kld allows. 8bit or 4bit: that precision in all"
            " layers, or in as many as a given --max-kld allows. On Hopper GPUs, 4 bits are not faster than 8"
        ),
    ] = "auto",
    max_kld: Annotated[
        str | None,
        typer.Option(
            metavar="NATS",
            help="Limit of the mean KL divergence per token, of all layers together (default: 0.001 for auto,"
            " no limit for 8bit and 4bit)",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens per window (default: 2048, or the model's maximum)"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
    ] = 16384,
    device: options.RunDeviceOption = "auto",
    plot: Plot = None,
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
    from neuzip.eval import attention
    from neuzip.eval.report import attention_pictures

    found = attention.calibrate(
        path, document, mode, out.stage, max_kld=limit, window=window, max_tokens=max_tokens,
        device=device,
    )  # fmt: skip
    show(out, found)
    if found.tokens < found.window:
        out.warning(
            f"--text {text}: has {found.tokens:,} tokens, fewer than a window of {found.window:,}",
            "use a longer text",
        )
    title = Path(src).resolve().name if Path(src).exists() else src
    drawn = None if plot is None else attention_pictures.drawn(found, title, plot)
    if not dry_run:
        total = sum((checkpoint.root / f).stat().st_size for f in (*checkpoint.weights, *checkpoint.others))
        with out.progress("copy", total) as advance:
            attention.copy_patched(path, dst, found.bits, overwrite=overwrite, on_bytes=advance)
        out.text(f"{dst}: recorded in config.json")
    if plot is not None and drawn is not None:
        # Drawn before, as a run that is killed between DST and its picture would have to measure anew.
        with writing(plot):
            write_file(plot, drawn)
        out.status(f"wrote {plot}")
    out.result(
        {"dry_run": dry_run, "src": path, "dst": dst, **result_of(found), "plot": plot},
        quiet=[found.comparison.kld.mean.value if dry_run else dst],
    )


def result_of(found: AttentionCalibration) -> dict[str, object]:
    """What a machine reads of a calibration: its fields, and the bits of each layer."""
    return {**vars(found), "bits": found.bits}


def show(out: Output, found: AttentionCalibration) -> None:
    """A row for each layer and bits that it was offered, then what all of them do together."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.eval.measures.estimates import errors_text
    from neuzip.eval.report.attention_pictures import choice_text

    rows = [row for layer in found.layers for row in _rows(layer, found)]
    columns = ["layer", "bits", "cosine", "rel. L1", "RMSE", "score", "rank", "KLD", ""]
    out.table(columns, rows, right=set(columns) - {""})
    out.text(
        f"Similarities are means of {count_text(found.similarity_windows, 'window')}; "
        "score is cosine x (1 - rel. L1), and"
    )
    out.text("rank orders by score. KLD, in nats per token, is with only this layer quantised.")
    for layer in found.layers:
        if layer.refused is not None:
            out.text(f"layer {layer.number} stays at full precision: {layer.refused}")
    c = found.comparison
    out.text()
    out.text(f"choice    {choice_text(found)}")
    if found.limit is not None:
        out.text(
            f"budget    {found.limit:g} nats per token; single layers sum up to {found.sum_of_layers:.3g}"
        )
    if c.identical:
        out.text("together  identical: every loss has the same bits, and every KL divergence is 0")
    else:
        from neuzip.eval.measures.estimates import exponential

        out.text(f"together  KL divergence {precise_text(c.kld.mean)} nats per token")
        before, after = (estimate_text(exponential(nll)) for nll in (c.base_nll, c.other_nll))
        out.text(f"PPL       {before} before, {after} after: {percent(c.perplexity_ratio)}")
        out.text(f"NLL       {signed_text(c.nll_difference)} nats per token, paired")
    windows = f"windows of {found.window:,}{special_text(found.special_tokens)}"
    out.text(f"text      {found.text}: {c.tokens:,} tokens in {windows}")
    out.text(f"errors    {errors_text(c.blocks, c.kld.mean.standard_error)}")
    out.text(f"in        {found.dtype} on {found.device}, {seconds_text(found.seconds)}")


def percent(ratio: Any) -> str:
    """A ratio of perplexities as the change that it is."""
    error = ratio.standard_error
    return f"{100 * (ratio.value - 1):+.3f} %" + ("" if error is None else f" ± {100 * error:.3f} %")


def _rows(layer: AttentionLayer, found: AttentionCalibration) -> list[list[str]]:
    """Those of the forms that were measured in the model; a layer that has none is told below the table."""
    forms = [form for form in layer.forms if form.bits in found.offered]
    return [
        [
            "" if number else str(layer.number),
            str(form.bits),
            *_closeness(form),
            str(found.rank(layer, form.bits)),
            "not finite" if form.kld is None else _kld(form),
            "chosen" if form.bits == layer.bits else "" if layer.bits or number else "full",
        ]
        for number, form in enumerate(forms)
    ]


def _closeness(form: QuantizedAttention) -> list[str]:
    mean = form.closeness.mean
    return [
        f"{mean.cosine:.5f}", f"{mean.relative_l1:.4f}", f"{mean.rmse:.2e}",
        f"{form.closeness.score:.4f}",
    ]  # fmt: skip


def _kld(form: QuantizedAttention) -> str:
    assert form.kld is not None
    error = form.kld.standard_error
    return f"{form.kld.value:.2e}" + ("" if error is None else f" ± {error:.0e}")
