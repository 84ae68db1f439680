"""neuzip sweep: many schemes on one checkpoint, with size, quality, memory and speed of each."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import SWEEP_SCHEMES, DtypeName
from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.sweep import show_sweep
from neuzip.cli.source import resolved_model
from neuzip.cli.threads import let_threads_sleep
from neuzip.runtime.requirements import require_device

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip sweep my-model --text wiki.test.raw -o sweep",
    "neuzip sweep my-model --text demo --schemes k3 --yardsticks q4_0,nf4",
    "neuzip sweep my-model --text demo --blocks 32,64,128,256,512 -o sweep",
]

NEEDS = {"--overwrite": ("--output",)}


TextOption = Annotated[
    str,
    typer.Option(
        "--text",  # its name, as in eval.py
        metavar="TEXT",
        help="Text to measure on, as for eval",
        show_default=False,
    ),
]
SchemesOption = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        help="Schemes: lossless, bits4.5 (quantised to 4.5 bits per weight), k3 (3 mantissa bits), k3b512"
        " (in blocks of 512)",
    ),
]
BlocksOption = Annotated[
    str | None,
    typer.Option(metavar="N,M", help="Block sizes to try with every k scheme (default: 512); '' for none"),
]
YardsticksOption = Annotated[
    str,
    typer.Option(metavar="A,B", help="Published formats to compare with: all, none, or such as q4_0,nf4,fp8"),
]
CalibrationOption = Annotated[
    str,
    typer.Option(
        metavar="TEXT|auto|none",
        help="Text that calibrates quantised weights; auto takes what --max-tokens leave of --text",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder for results and plots; to resume, repeat the command",
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(help="Compute dtype; auto is float32 for dense weights on a CPU, else the checkpoint's"),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace earlier results in DIR")]


def command(
    src: options.ModelArgument,
    text: TextOption,
    schemes: SchemesOption = SWEEP_SCHEMES,
    blocks: BlocksOption = None,
    yardsticks: YardsticksOption = "all",
    calibration: CalibrationOption = "auto",
    output: OutputOption = None,
    window: options.WindowOption = None,
    max_tokens: MaxTokensOption = None,
    device: options.RunDeviceOption = "auto",
    dtype: DtypeOption = "auto",
    residency: options.ResidencyOption = "dense",
    jobs: options.JobsOption = None,
    overwrite: OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure size and quality of many compression schemes"""
    out = Output(json=json, quiet=quiet)
    require_device(device)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.device import choose
    from neuzip.compress.sources.folder import weight_bytes
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.sweep.setup import parse_schemes, require_quantized, work_folder

    wanted, document = parse_schemes(schemes, blocks, yardsticks), read_text(text)
    is_calibrated = require_quantized(wanted, calibration)
    if output is not None:
        with work_folder(output):
            pass  # a folder that cannot be used is told before anything is read
    path = resolved_model(out, src)
    import_large()
    from neuzip.eval.sweep.run import sweep
    from neuzip.eval.sweep.setting import SweepSetting, with_calibration

    setting = SweepSetting(
        path, document, window, max_tokens, device, dtype, residency,
        choose(device, weight_bytes(path)), jobs,
    )  # fmt: skip
    if is_calibrated:
        setting = with_calibration(setting, text, calibration)
        if setting.calibration is not None and setting.calibration.note:
            out.status(setting.calibration.note)
    result = sweep(setting, wanted, output, out.stage, overwrite=overwrite)
    show_sweep(out, result, setting.calibration)
    for one in result.failed:
        out.warning(f"{one.scheme} has no results: {one.reason}")
    if output is not None:
        out.status(f"wrote {output}: one JSON file per scheme, sweep.svg, sweep.png")
    out.result(
        {
            "src": path,
            "text": result.text,
            "convention": result.rule,
            "calibration": None if setting.calibration is None else setting.calibration.name,
            "device": result.device,
            "front": result.front,
            "resumed": result.resumed,
            "rows": [row.to_json() for row in result.rows],
            "savings": [{**asdict(one), "saved": one.saved} for one in result.savings],
            "failed": [{"scheme": one.scheme, "reason": one.reason} for one in result.failed],
            "output": output,
        },
        quiet=[f"{row.scheme} {row.bytes} {row.comparison.kld.mean.value}" for row in result.rows],
    )
