"""neuzip layers: the importance of each layer, and the model without the least important ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import DtypeName, LayerChoice
from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.layers import quiet_lines, show_layers, show_pruned, show_removal
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import shell
from neuzip.runtime.requirements import require_device

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


GradientsOption = Annotated[
    int, typer.Option(metavar="N", min=0, help="Windows to compute gradients on; 0 for none")
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Also plot distances between layers and their importance: .svg or .png"
    ),
]
DropOption = Annotated[
    int | None, typer.Option(metavar="N", help="Choose the N least important layers; -o drops them")
]
ChoiceOption = Annotated[
    LayerChoice,
    typer.Option(
        help="greedy: one layer after the other, by KL divergence. block: consecutive layers, by KL"
        " divergence. angular: consecutive layers, by angular distance"
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="DST", help="Write the model without the layers of --drop, uncompressed"
    ),
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(help="Compute dtype; auto is float32 on a CPU, else the checkpoint's"),
]


def command(
    src: options.ModelArgument,
    text: options.TextOption,
    window: options.WindowOption = None,
    max_tokens: options.MaxTokensOption = 16384,
    gradients: GradientsOption = 8,
    plot: PlotOption = None,
    drop: DropOption = None,
    choice: ChoiceOption = "greedy",
    output: OutputOption = None,
    device: options.RunDeviceOption = "auto",
    dtype: DtypeOption = "auto",
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
    import_large()
    from neuzip.eval.layers import analyse as layers
    from neuzip.eval.layers import removal as layer_removal
    from neuzip.eval.report import layer_pictures

    analysis = layers.analyse(
        path, document, out.stage, window=window, max_tokens=max_tokens, gradient_windows=gradients,
        drop=drop, choice=choice, device=device, dtype=dtype,
    )  # fmt: skip
    show_layers(out, analysis)
    recipe = None
    if analysis.removal is not None:
        recipe = layer_removal.mergekit_yaml(
            src, len(analysis.layers), analysis.removal.layers, analysis.stored_dtype
        )
        show_removal(out, analysis, analysis.removal, recipe)
    if plot is not None:
        layer_pictures.write(analysis, Path(src).resolve().name if Path(src).exists() else src, plot)
        out.status(f"wrote {plot}")
    pruned = None
    if output is not None and analysis.removal is not None:
        with out.progress("write", None) as advance:
            pruned = layer_removal.remove_layers(
                path, output, analysis.removal.layers, overwrite=overwrite, on_bytes=advance
            )
        show_pruned(out, pruned)
        measure = shell("neuzip", "eval", output, "--original", src, "--text", "TEXT")
        out.status(f"to measure it on another text: {measure}")
    elif analysis.removal is not None:
        out.status("nothing was written; --output DST writes this model")
    out.result(
        {
            "src": path,
            **vars(analysis),
            "mergekit": recipe,
            "written": None if pruned is None else pruned.to_json(),
            "plot": plot,
        },
        quiet=quiet_lines(analysis, output),
    )
