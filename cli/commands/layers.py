"""neuzip layers: the importance of each layer, and the model without the least important ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.commands.eval import estimate_text, precise_text
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import bytes_text, count_text, percent_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import shell

if TYPE_CHECKING:
    from neuzip.eval.layers.analyse import LayerAnalysis
    from neuzip.eval.layers.layer_report import LayerReport
    from neuzip.eval.layers.left_out import LayerRemoval
    from neuzip.eval.layers.removal import Pruned
    from neuzip.eval.measures.estimates import Estimate

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip layers my-model --text wiki.test.raw --plot layers.svg",
    "neuzip layers my-model.nz --text demo --json",
    "neuzip layers my-model --text my.txt --drop 3 -o pruned",
    "neuzip layers my-model --text my.txt --drop 3 --choice angular",
    "",
    "The layers were chosen on that text; measure the result on another one:",
    "neuzip eval pruned --original my-model --text other.txt",
]

NEEDS = {"--choice": ("--drop",), "--output": ("--drop",), "--overwrite": ("--output", "--plot")}

METRICS = {
    "angular_distance": "angular distance",
    "angular_distance_all_tokens": "angular distance, all tokens",
    "block_influence": "block influence",
    "gradient_norm": "gradient norm",
    "depth": "depth (later layers first)",
}


def command(
    src: options.ModelArgument,
    text: Annotated[
        str,
        typer.Option("--text", metavar="TEXT", help="Text to measure on, as for eval", show_default=False),
    ],
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens per window (default: 1024, or the model's maximum)"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
    ] = 16384,
    gradients: Annotated[
        int, typer.Option(metavar="N", min=0, help="Windows to compute gradients on; 0 for none")
    ] = 8,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also plot distances between layers and their importance: .svg or .png"
        ),
    ] = None,
    drop: Annotated[
        int | None, typer.Option(metavar="N", help="Choose the N least important layers; -o drops them")
    ] = None,
    choice: Annotated[
        Literal["greedy", "block", "angular"],
        typer.Option(
            help="greedy: one layer after the other, by KL divergence. block: consecutive layers, by KL"
            " divergence. angular: consecutive layers, by angular distance"
        ),
    ] = "greedy",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DST", help="Write the model without the layers of --drop, uncompressed"
        ),
    ] = None,
    device: options.RunDeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Compute dtype; auto is float32 on a CPU, else the checkpoint's"),
    ] = "auto",
    overwrite: options.OverwriteBothOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure the importance of each layer, and drop layers

    The command removes each layer in turn and measures the KL divergence and the perplexity of the rest. For
    comparison it shows angular distance, block influence and gradient norm, and how well each of them
    predicts the measured order.
    """
    out = Output(json=json, quiet=quiet)
    require_device(device)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.overwrite_guard import require_free
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.report import histogram_pictures as pictures

    if plot is not None:
        pictures.check_target(plot, overwrite, pictures.IMAGES)
    document = read_text(text)
    path = resolved_model(out, src)
    if output is not None:
        require_free(path, output, overwrite)
    from neuzip.eval.layers import analyse as layers
    from neuzip.eval.layers import removal as layer_removal
    from neuzip.eval.report import layer_pictures

    found = layers.analyse(
        path, document, out.stage, window=window, max_tokens=max_tokens, gradient_windows=gradients,
        drop=drop, choice=choice, device=device, dtype=dtype,
    )  # fmt: skip
    show(out, found)
    recipe = None
    if found.removal is not None:
        recipe = layer_removal.mergekit_yaml(src, len(found.layers), found.removal.layers, found.stored_dtype)
        show_removal(out, found, found.removal, recipe)
    if plot is not None:
        layer_pictures.write(found, Path(src).resolve().name if Path(src).exists() else src, plot)
        out.status(f"wrote {plot}")
    pruned = None
    if output is not None and found.removal is not None:
        with out.progress("write", None) as advance:
            pruned = layer_removal.remove_layers(
                path, output, found.removal.layers, overwrite=overwrite, on_bytes=advance
            )
        show_pruned(out, pruned)
        measure = shell("neuzip", "eval", output, "--original", src, "--text", "TEXT")
        out.status(f"to measure it on another text: {measure}")
    elif found.removal is not None:
        out.status("nothing was written; --output DST writes this model")
    out.result(
        {
            "src": path,
            **vars(found),
            "mergekit": recipe,
            "written": None if pruned is None else pruned.to_json(),
            "plot": plot,
        },
        quiet=quiet_lines(found, output),
    )


def quiet_lines(found: LayerAnalysis, output: Path | None) -> list[object]:
    """The folder that was written; or the layers to drop; or the divergence without each layer."""
    if output is not None:
        return [output]
    if found.removal is not None:
        return list(found.removal.layers)
    return [layer.kld for layer in found.layers]


def show(out: Output, found: LayerAnalysis) -> None:
    """A row for each layer, what the columns mean, and how well metrics predict what is measured."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.eval.measures.estimates import errors_text, exponential

    columns = ["layer", "PPL without", "KLD", "NLL difference", "influence", "angular", "gradient"]
    rows = [_row(layer) for layer in found.layers]
    left_out = out.table(columns, rows, right=columns, spare=["angular", "gradient", "influence"])
    out.text("PPL, KLD and NLL (nats per token) are those of the model without this one layer.")
    out.text("influence  1 - cosine similarity of the layer's input and output")
    out.text("angular    their angle, as a fraction of 180 degrees, at the last token of each window")
    out.text("gradient   norm of the gradient of the layer's parameters")
    out.text()
    predictions = [
        [METRICS[name], "-" if rho is None else f"{rho:+.2f}"]
        for name in METRICS
        if name in found.rank_correlations
        for rho in [found.rank_correlations[name]]
    ]
    out.table(["metric", "Spearman with KLD"], predictions, right=["Spearman with KLD"])
    whole = next((layer.without for layer in found.layers if layer.without is not None), None)
    if whole is not None:
        out.text(f"PPL     {estimate_text(exponential(whole.base_nll))} with all layers")
    windows = f"windows of {found.window:,}{special_text(found.special_tokens)}"
    out.text(f"text    {found.text}: {found.tokens:,} tokens in {windows}")
    error = None if whole is None else whole.base_nll.standard_error
    out.text(f"errors  {errors_text(found.blocks, error)}; over windows for angular and gradient;")
    out.text("        NLL differences and KLD are paired")
    if found.gradient_windows:
        out.text(f"        gradient on {found.gradient_windows} of {count_text(found.windows, 'window')}")
    out.text(f"in      {found.dtype} on {found.device}, {seconds_text(found.seconds)}")
    out.wider(left_out)


def show_removal(out: Output, found: LayerAnalysis, removal: LayerRemoval, recipe: str) -> None:
    """Which layers to drop, and what the model then is."""
    from neuzip.eval.measures.estimates import exponential

    c = removal.comparison
    numbers = ", ".join(map(str, removal.layers))
    before, after = (estimate_text(exponential(nll)) for nll in (c.base_nll, c.other_nll))
    share = percent_text(removal.parameters, found.parameters)
    out.text()
    out.text(f"drop    {numbers}: {removal.parameters:,} parameters, {share} of all")
    if removal.choice == "greedy" and len(removal.order) > 1:
        steps = ", ".join(f"{n} ({kld:.3g})" for n, kld in zip(removal.order, removal.klds, strict=True))
        out.text(f"order   {steps}; in brackets the KLD so far")
    out.text(
        f"KLD     {precise_text(c.kld.mean)} nats per token without them, on the text used to choose them"
    )
    out.text(f"PPL     {before} before, {after} after")
    out.text()
    out.text("as a mergekit configuration:")
    for line in recipe.splitlines():
        out.text(line)


def show_pruned(out: Output, pruned: Pruned) -> None:
    """What was written."""
    for warning in pruned.warnings:
        out.warning(warning)
    out.text()
    sizes = f"weights {bytes_text(pruned.source_bytes)} -> {bytes_text(pruned.bytes)}"
    out.text(f"{pruned.dst}: {count_text(len(pruned.remaining), 'layer')}; {sizes}")


def _row(layer: LayerReport) -> list[str]:
    measured = ["not finite", "-", "-"]
    if layer.without is not None:
        from neuzip.eval.measures.estimates import Estimate, exponential

        c = layer.without
        ppl = Estimate(exponential(c.other_nll).value, None)  # of the difference the error says more
        measured = [estimate_text(ppl), _short(c.kld.mean), _short(c.nll_difference, "+")]
    return [
        str(layer.number), *measured, _short(layer.block_influence), _short(layer.angular_distance),
        "-" if layer.gradient_norm is None else _short(layer.gradient_norm),
    ]  # fmt: skip


def _short(estimate: Estimate, sign: str = "") -> str:
    error = estimate.standard_error
    return f"{estimate.value:{sign}.3g}" + ("" if error is None else f" ± {error:.1g}")
