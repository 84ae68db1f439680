"""neuzip bench: speed and memory of a checkpoint in each residency, compared with the dense model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from neuzip.cli import options
from neuzip.cli.activations import warn_of_plain_inputs
from neuzip.cli.commands.eval import attention_text
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output
from neuzip.cli.residency import require_device
from neuzip.cli.text import bytes_text, count_text, percent_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import UsageError

if TYPE_CHECKING:
    from neuzip.runtime.decode.benchmark import BenchmarkPlan, Speed, Speeds

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip bench my-model.nz",
    "neuzip bench my-model.nz --residency packed,ans --batch 1,8",
    "neuzip bench my-model.nz --kv-bits 3 --prompt-tokens 4096",
    "neuzip bench my-model --attention 8bit --prompt-tokens 16384 --batch 1",
    "neuzip bench my-model.nz --compile --batch 1",
    "neuzip bench my-model.nz --prompt-tokens 2048 --new-tokens 64 --json",
]


def command(
    src: options.ModelArgument,
    residency: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            help="Weight formats to compare with dense: packed, ans (default: packed on a GPU, none on a"
            " CPU)",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Batch sizes")] = "1,8,32",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens per prompt (default: 512, or the model's maximum)"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="New tokens per prompt")] = 128,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs per measurement; the table shows medians")
    ] = 3,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="Run decoding steps as a CUDA graph (GPU only)")
    ] = True,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile all steps with torch.compile, those of the dense model too"),
    ] = False,
    kv_bits: Annotated[
        options.KvBits | None,
        typer.Option(
            "--kv-bits", help="Also measure with the KV cache quantised to N bits", show_default=False
        ),
    ] = None,
    attention: Annotated[
        options.Attention,
        typer.Option(
            help="Quantised attention to measure too: as recorded in config.json, none, or 8- or 4-bit QK^T"
        ),
    ] = "recorded",
    device: options.RunDeviceOption = "auto",
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Measure tokens/s and memory, compared with the dense model"""
    out = Output(json=json, quiet=quiet)
    residencies, batches = None if residency is None else _names(residency), _numbers(batch)
    let_threads_sleep()
    out.loading()
    for name in residencies or ("dense",):
        require_device(device, name)
    path = resolved_model(out, src)
    from neuzip.runtime.decode.benchmark import make_plan, measure
    from neuzip.runtime.devices import choose_device

    place = choose_device(device)
    plan = make_plan(
        path,
        residencies or (["dense"] if place.type == "cpu" else ["packed"]),
        batches=batches,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
        device=place,
        graph=graph,
        kv_bits=options.bits(kv_bits),
        attention=attention,
        compiled=compiled,
    )
    if residencies is None and place.type == "cpu":
        out.status(
            "on a CPU bench measures dense only; --residency packed runs here too, by slow reference code"
        )
    warn_of_plain_inputs(out, path, plan.residencies)
    if compiled:
        out.status("--compile: compiling takes about a minute for each weight format and batch size")
    with out.progress("bench", plan.runs, unit="runs") as advance:
        speeds = measure(plan, on_run=advance)
    report(out, plan, speeds)
    out.result(
        {
            "src": plan.path,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "rounds": plan.rounds,
            "compiled": plan.compiled,
            **vars(speeds),
        },
        quiet=[row.decode_tokens_per_second for row in speeds.rows],
    )


def report(out: Output, plan: BenchmarkPlan, speeds: Speeds) -> None:
    """Say what was run, and show a row for each residency and batch."""
    packages = ", ".join(f"{name} {version}" for name, version in speeds.versions.items())
    graphed = {row.graphed for row in speeds.rows}
    how = {True: "as a CUDA graph", False: "without a CUDA graph"}
    steps = ["compiled"] if plan.compiled else []
    steps += [" or ".join(how[one] for one in sorted(graphed))] if plan.device.type == "cuda" else []
    told = f"; steps {', '.join(steps)}" if steps else ""
    out.text(f"path         {plan.path}")
    out.text(f"model        {speeds.dtype} on {speeds.device}; {packages}")
    out.text(
        f"run          {plan.prompt_tokens:,} prompt tokens, {plan.new_tokens:,} new tokens, greedy{told}"
    )
    out.text(f"weights      {_weights(speeds)}")
    if any(row.activations for row in speeds.rows):
        modes = {r.residency: r.activations.text if r.activations else "not quantised" for r in speeds.rows}
        out.text(f"activations  {', '.join(f'{name} {mode}' for name, mode in modes.items())}")
    if plan.kv_bits is not None:
        out.text(f"KV cache     {_caches(speeds)}")
        out.text(f"KV reading   {', '.join(sorted({row.attention for row in speeds.rows if row.attention}))}")
    attending = [row for row in speeds.rows if row.attention_bits is not None]
    for text in dict.fromkeys(attention_text(r.attention_bits or (), r.attention_calls) for r in attending):
        out.text(f"attention    {text}")
    apart = max(row.decode_spread for row in speeds.rows)
    spread = f", decode times up to {100 * apart:.1f} % apart" if plan.rounds > 1 else ", spread unknown"
    out.text(f"medians      of {count_text(plan.rounds, 'run')}{spread}; in brackets the ratio to dense")
    out.text()
    columns = ["residency", "batch", "prefill tok/s", "decode tok/s", "peak memory", "same tokens"]
    out.table(columns, [_cells(row) for row in speeds.rows], right=columns[1:])
    if any(row.differing_tokens for row in attending):
        out.text()
        out.text("Quantised attention changes the numbers, so different tokens are expected.")
    if any(row.differing_tokens for row in speeds.rows if row.activations):
        out.text()
        out.text("Quantised activations change the numbers, so different tokens are expected.")
    if any(row.differing_tokens for row in speeds.rows if row.kv_bits is not None):
        out.text()
        out.text(f"A KV cache of {plan.kv_bits} bits changes the numbers, so different tokens are expected.")
    plain = [
        row
        for row in speeds.rows
        if row.kv_bits is None and row.attention_bits is None and row.activations is None
    ]
    if any(row.differing_tokens for row in plain):
        out.text()
        out.text("Another order of summation rounds differently. Where two tokens are nearly tied,")
        out.text("the other one may be chosen, and the rest of that sequence may differ.")


def _weights(speeds: Speeds) -> str:
    """What the weights of each residency take in memory."""
    sizes = {row.residency: row.weight_bytes for row in speeds.rows}
    return ", ".join(
        f"{name} {bytes_text(n)}" + ("" if name == "dense" else f" ({n / sizes['dense']:.2f})")
        for name, n in sizes.items()
    )


def _caches(speeds: Speeds) -> str:
    """What keys and values take, of the largest batch."""
    rows = [row for row in speeds.rows if row.batch == speeds.rows[-1].batch]
    plain = next(row.cache_bytes for row in rows if row.kv_bits is None)
    sizes = {row.kv_bits: row.cache_bytes for row in rows if row.kv_bits is not None}
    few = ", ".join(f"{bits} bits {bytes_text(n)} ({n / plain:.2f})" for bits, n in sizes.items())
    return f"unquantised {bytes_text(plain)}, {few}, at batch {rows[0].batch}"


def _cells(row: Speed) -> list[str]:
    peak = "-" if row.peak_bytes is None else bytes_text(row.peak_bytes) + _ratio(row, row.peak_ratio)
    return [
        _name(row),
        str(row.batch),
        _rate(row.prefill_tokens_per_second) + _ratio(row, row.prefill_ratio),
        _rate(row.decode_tokens_per_second) + _ratio(row, row.decode_ratio),
        peak,
        "all" if not row.differing_tokens else percent_text(row.tokens - row.differing_tokens, row.tokens),
    ]


def _name(row: Speed) -> str:
    few = sorted({bits for bits in row.attention_bits or () if bits is not None})
    parts = [
        row.residency,
        "" if row.kv_bits is None else f"KV {row.kv_bits}",
        "" if row.attention_bits is None else f"QK {'/'.join(map(str, few)) or 'full'}",
        "unused" if few and not any(how.endswith(" bits") for how in row.attention_calls) else "",
    ]
    return ", ".join(filter(None, parts))


def _ratio(row: Speed, ratio: float | None) -> str:
    is_base = row.residency == "dense" and row.kv_bits is None and row.attention_bits is None
    return "" if ratio is None or is_base else f" ({ratio:.2f})"


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def _names(text: str) -> list[str]:
    """The residencies of `packed,ans`."""
    names, known = [part.strip() for part in text.split(",")], get_args(options.Residency)
    for name in names:
        if name not in known:
            raise UsageError(f"--residency {text}: there is no {name!r}", f"choose from {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    """The batches of `1,8,32`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--batch {text}: not a list of numbers of at least 1", "give them as 1,8,32")
    return [int(part) for part in parts]
