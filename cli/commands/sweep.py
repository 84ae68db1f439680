"""neuzip sweep: many schemes on one checkpoint, with size, quality, memory and speed of each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from neuzip.cli import options
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import bytes_text, percent_text
from neuzip.cli.threads import let_threads_sleep

if TYPE_CHECKING:
    from neuzip.eval.sweep import Sweep, SweepRow

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip sweep my-model --text wiki.test.raw -o sweep",
    "neuzip sweep my-model --text demo --schemes lossless,k3,k1,k0b64 --blocks ''",
    "neuzip sweep my-model --text demo --blocks 32,64,128,256,512 -o sweep",
]

NEEDS = {"--overwrite": ("--output",)}

COLUMNS = {
    "scheme": 100, "size": 4, "ratio": 50, "bits": 60, "PPL": 99, "NLL difference": 90, "mean KLD": 99,
    "KLD 99.9 %": 70, "top-1": 80, "memory": 40, "peak": 10, "load": 15, "decode": 30, "tokens/s": 35, "": 99,
}  # fmt: skip
"""The columns, and how much each is worth where the window is too narrow for all."""


def command(
    src: options.ModelArgument,
    text: Annotated[
        str,
        typer.Option(
            "--text",  # its name, as in eval.py
            metavar="TEXT",
            help="Text to measure on, as for eval",
            show_default=False,
        ),
    ],
    schemes: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Schemes: lossless, k3 (3 mantissa bits), k3b512 (in blocks of 512)"
        ),
    ] = "lossless,k7,k6,k5,k4,k3,k2,k1,k0",
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Block sizes to try with every k scheme (default: 512); '' for none"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for results and plots; to resume, repeat the command",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens per window (default: 1024, or the model's maximum)"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
    ] = None,
    device: options.RunDeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Compute dtype; auto is float32 for dense weights on a CPU, else the checkpoint's"),
    ] = "auto",
    residency: options.ResidencyOption = "dense",
    jobs: options.JobsOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier results in DIR")] = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure size and quality of many compression schemes"""
    out = Output(json=json, quiet=quiet)
    require_device(device)
    let_threads_sleep()
    out.loading()
    from neuzip.compress.device import choose
    from neuzip.compress.source import weight_bytes
    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.sweep_setup import parse_schemes, work_folder

    asked, document = parse_schemes(schemes, blocks), read_text(text)
    if output is not None:
        with work_folder(output):
            pass  # a folder that cannot be used is told before anything is read
    path = resolved_model(out, src)
    from neuzip.eval.sweep import SweepSetting, sweep

    setting = SweepSetting(
        path, document, window, max_tokens, device, dtype, residency,
        choose(device, weight_bytes(path)), jobs,
    )  # fmt: skip

    found = sweep(setting, asked, output, out.stage, overwrite=overwrite)
    _show(out, found)
    for one in found.failed:
        out.warning(f"{one.scheme} breaks the model: {one.reason}")
    if output is not None:
        out.status(f"wrote {output}: one JSON file per scheme, sweep.svg, sweep.png")
    out.result(
        {
            "src": path,
            "text": found.text,
            "convention": found.rule,
            "device": found.device,
            "front": found.front,
            "resumed": found.resumed,
            "rows": [row.to_json() for row in found.rows],
            "failed": [{"scheme": one.scheme, "reason": one.reason} for one in found.failed],
            "output": output,
        },
        quiet=[f"{row.scheme} {row.bytes} {row.comparison.kld.mean.value}" for row in found.rows],
    )


def _show(out: Output, found: Sweep) -> None:
    from neuzip.eval.measures.estimates import errors_text

    first = found.rows[0]
    c = first.comparison
    if found.resumed:
        count = len(found.rows) + len(found.failed)
        out.status(f"{found.resumed} of {count} schemes were measured already")
    lines = [_original(first), *(_cells(row, row.scheme in found.front) for row in found.rows)]
    known = [
        name for name in COLUMNS if name != "peak" or any(row.peak_bytes is not None for row in found.rows)
    ]
    spare = [name for name in sorted(known, key=lambda name: COLUMNS[name]) if COLUMNS[name] < 100]
    right = set(known) - {"scheme", ""}
    left_out = out.table(known, [[line[name] for name in known] for line in lines], right=right, spare=spare)
    out.text()
    out.text("scheme   k3 keeps 3 mantissa bits; k3b512 adds a scale for each block of 512 weights")
    out.text("KLD      mean and 99.9th percentile, in nats per token; top-1 is top-1 agreement")
    out.text(f"text     {found.text}: {c.tokens:,} tokens, {found.rule}")
    errors = errors_text(c.blocks, c.kld.mean.standard_error)
    out.text(f"errors   {errors}; NLL differences and KLD are paired")
    out.text(f"model    {first.dtype}, residency {first.depends_on['residency']}, on {found.device}")
    out.text("size     weight files; bits are per weight; * on the Pareto front of size and KLD")
    measured = [
        f"{name} ({what})" for name, what in {
            "memory": "parameters", "peak": "loading and running, next to the original",
            "load": "files to loaded model", "decode": "uncompressed bytes, tensor by tensor",
            "tokens/s": "without the output head",
        }.items() if name in known and name not in left_out
    ]  # fmt: skip
    if measured:
        out.text(f"measured once on this machine, without an error: {', '.join(measured)}")
    out.wider(left_out)


def _original(row: SweepRow) -> dict[str, str]:
    blank = dict.fromkeys(COLUMNS, "")
    return blank | {
        "scheme": "original",
        "size": bytes_text(row.original_bytes),
        "ratio": percent_text(1, 1),
        "bits": f"{8 * row.original_bytes / row.weights:.2f}",
        "PPL": f"{math.exp(row.comparison.base_nll.value):,.2f}",
    }


def _cells(row: SweepRow, on_front: bool) -> dict[str, str]:
    c = row.comparison
    difference, error = c.nll_difference.value, c.nll_difference.standard_error
    change = f"{difference:+.4f}" + ("" if error is None else f" ± {error:.4f}")
    return {
        "scheme": row.scheme,
        "size": bytes_text(row.bytes),
        "ratio": percent_text(row.ratio, 1),
        "bits": f"{row.bits_per_weight:.2f}",
        "PPL": f"{row.perplexity.value:,.2f}",
        "NLL difference": "0, all bits" if c.identical else change,
        "mean KLD": f"{c.kld.mean.value:.2e}" if c.kld.mean.value else "0",
        "KLD 99.9 %": f"{c.kld.p999:.2e}" if c.kld.p999 else "0",
        "top-1": percent_text(c.top_1.value, 1),
        "memory": bytes_text(row.memory_bytes),
        "peak": "-" if row.peak_bytes is None else bytes_text(row.peak_bytes),
        "load": f"{row.load_seconds:.2f} s",
        "decode": f"{bytes_text(row.decode_bytes_per_second)}/s",
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "": "*" if on_front else "",
    }
