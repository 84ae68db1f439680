"""neuzip experts: how often each expert of a mixture is chosen on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import DtypeName
from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.experts import quiet_lines, show_experts
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.runtime.requirements import require_device

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip experts my-mixture --text my.txt --plot experts.svg",
    "neuzip experts my-mixture --text my.txt -o use.json",
    "",
    "A target then gives rarely chosen experts fewer bits:",
    "neuzip compress my-mixture fits --target-size 40% --expert-use use.json",
]

NEEDS = {"--overwrite": ("--output", "--plot")}


PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also plot a map of layers and experts: .svg or .png"),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the counts to a JSON file, for compress --expert-use"
    ),
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(help="Compute dtype; auto is float32 for dense weights on a CPU, else the checkpoint's"),
]


def command(
    src: options.ModelArgument,
    text: options.TextOption,
    output: OutputOption = None,
    plot: PlotOption = None,
    window: options.WindowOption = None,
    max_tokens: options.MaxTokensOption = 65536,
    device: options.RunDeviceOption = "auto",
    dtype: DtypeOption = "auto",
    residency: options.ResidencyOption = "dense",
    overwrite: options.OverwriteFileOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Count how often each expert of a mixture is chosen

    The command runs the model on a text. For each layer it counts the tokens that chose each expert, and sums
    up their routing weights.
    """
    out = Output(json=json, quiet=quiet)
    require_device(device)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.overwrite_guard import refuse_existing
    from neuzip.compress.workspace import write_file, writing
    from neuzip.eval.experts.expert_use import use_bytes
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.report import histogram_pictures as pictures

    if plot is not None:
        pictures.check_target(plot, overwrite, pictures.IMAGES)
    if output is not None:
        refuse_existing(output, overwrite, file=True)
    document = read_text(text)
    path = resolved_model(out, src)
    import_large()
    from neuzip.eval.experts.analyse import analyse_experts
    from neuzip.eval.report import expert_pictures

    analysis = analyse_experts(
        path, document, out.stage, window=window, max_tokens=max_tokens, device=device, dtype=dtype,
        residency=residency,
    )  # fmt: skip
    show_experts(out, analysis)
    if output is not None:
        with writing(output):
            write_file(output, use_bytes(analysis.use))
        out.status(f"wrote {output}")
    if plot is not None:
        expert_pictures.write(analysis, Path(src).resolve().name if Path(src).exists() else src, plot)
        out.status(f"wrote {plot}")
    values = {key: value for key, value in vars(analysis).items() if key != "use"}
    out.result(
        {"src": path, **analysis.use.to_json(), **values, "output": output, "plot": plot},
        quiet=quiet_lines(analysis, output),
    )
