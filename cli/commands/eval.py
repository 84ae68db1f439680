"""neuzip eval: perplexity of a checkpoint on a text by all conventions, before and after compression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuzip.choices import Attention, DeviceMap, DtypeName
from neuzip.cli import options
from neuzip.cli.kv_bits import NEEDS as KV_NEEDS

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip eval my-model.nz --text demo",
    "neuzip eval small --original my-model --text wiki.test.raw",
    "neuzip eval s.nz --text hf://datasets/Salesforce/wikitext/wikitext-2-raw-v1",
    "neuzip eval small --text my-texts --conventions token --window 2048",
    "neuzip eval small --original my-model --text demo --report page.html",
    "neuzip eval my-model --original my-model --text demo --kv-bits 4",
    "neuzip eval my-model --text a.txt --kv-bits auto:0.01 --kv-text b.txt",
    "neuzip eval my-model --original my-model --text demo --attention 8bit",
    "neuzip eval small --tasks arc_easy,hellaswag --limit 200",
    "torchrun --nproc-per-node 8 --no-python neuzip eval small --text demo",
]

GROUPS = {
    "Text and perplexity": ("text", "original", "conventions", "window", "stride", "max_tokens"),
    "How the model runs": (
        "residency", "expert_memory", "activations", "kv_bits", "kv_text", "kv_plan", "kv_form",
        "query_bits", "attention", "dtype", "device", "device_map",
    ),
    "Benchmark tasks": ("tasks", "limit"),
    "Report": ("page", "sweep", "sparsity", "overwrite"),
}  # fmt: skip

NEEDS = {
    **dict.fromkeys(
        ("--conventions", "--window", "--stride", "--max-tokens", "--activations", "--kv-bits",
         "--query-bits", "--attention", "--sparsity", "--report"), ("--text",),
    ),
    **KV_NEEDS,
    "--sweep": ("--report",),
    "--overwrite": ("--report", "--kv-plan"),
    "--limit": ("--tasks",),
}  # fmt: skip

TextOption = Annotated[
    str | None,
    typer.Option(
        "--text",  # typer 0.27 takes a name like its metavar from that: --TEXT
        metavar="TEXT",
        help="Text to predict: UTF-8 file, folder of files, hf://datasets/..., or demo",
        show_default=False,
    ),
]
OriginalOption = Annotated[
    str | None,
    typer.Option("--original", metavar="ORIGINAL", help="Also evaluate this checkpoint, and compare"),
]
ConventionsOption = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Perplexity conventions: token, strided, llama.cpp, lm-eval, bos (default: all)",
    ),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens between starts of strided windows (default: 512, or half a window)",
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Use only the first N tokens of the text")
]
DeviceMapOption = Annotated[
    DeviceMap | None,
    typer.Option(
        metavar="auto|balanced|...",
        help="Spread each model over all GPUs, as accelerate does",
    ),
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(help="Compute dtype; auto is float32 for dense weights on a CPU, else the checkpoint's"),
]
AttentionOption = Annotated[
    Attention,
    typer.Option(
        help="Attention precision of SRC: as recorded in config.json, not quantised (none), or 8- or"
        " 4-bit QK^T"
    ),
]
SparsityOption = Annotated[
    bool,
    typer.Option(
        "--sparsity", help="Show the share of zero activations (sparsity) at the inputs of linear layers"
    ),
]
PageOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Also write a report: .html, .md or .json"),
]
SweepOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Add the results of `neuzip sweep -o DIR` to the report"),
]
TasksOption = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Tasks of lm-evaluation-harness: names, patterns or YAML files"),
]
LimitOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Use only the first N documents of each task")
]


def command(
    src: options.ModelArgument,
    text: TextOption = None,
    original: OriginalOption = None,
    conventions: ConventionsOption = None,
    window: options.WindowOption = None,
    stride: StrideOption = None,
    max_tokens: MaxTokensOption = None,
    device: options.RunDeviceOption = "auto",
    device_map: DeviceMapOption = None,
    dtype: DtypeOption = "auto",
    residency: options.ResidencyOption = "dense",
    expert_memory: options.ExpertMemoryOption = None,
    activations: options.ActivationsOption = None,
    kv_bits: options.KvBitsOption = None,
    kv_text: options.KvTextOption = None,
    kv_plan: options.KvPlanOption = None,
    kv_form: options.KvFormOption = "rotated",
    query_bits: options.QueryBitsOption = None,
    attention: AttentionOption = "recorded",
    sparsity: SparsityOption = False,
    page: PageOption = None,
    sweep: SweepOption = None,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    overwrite: options.OverwriteFileOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure perplexity on a text, before and after compression"""
    from neuzip.cli.evaluating import EvalOptions, run

    run(
        EvalOptions(
            src=src, text=text, original=original, conventions=conventions, window=window, stride=stride,
            max_tokens=max_tokens, device=device, device_map=device_map, dtype=dtype, residency=residency,
            expert_memory=options.size(expert_memory), activations=activations, kv_bits=kv_bits,
            kv_text=kv_text, kv_plan=kv_plan, kv_form=kv_form, query_bits=query_bits, attention=attention,
            sparsity=sparsity, page=page, sweep=sweep, tasks=tasks, limit=limit, overwrite=overwrite,
            json=json, quiet=quiet,
        )
    )  # fmt: skip
