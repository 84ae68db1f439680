"""Speed and memory of a model in each residency, compared with the dense one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.evaluation import attention_text
from neuzip.cli.text import bytes_text, count_text, percent_text
from neuzip.runtime.kv_bits import in_short, in_words

if TYPE_CHECKING:
    from neuzip.runtime.decode.benchmark import BenchmarkPlan, Speed, Speeds


def show_speeds(out: Output, plan: BenchmarkPlan, speeds: Speeds) -> None:
    """Say what was run, and show a row for each residency and batch."""
    packages = ", ".join(f"{name} {version}" for name, version in speeds.versions.items())
    graphed = {row.graphed for row in speeds.rows}
    how = {True: "as a CUDA graph", False: "without a CUDA graph"}
    steps = ["compiled"] if plan.compiled else []
    steps += [" or ".join(how[one] for one in sorted(graphed))] if plan.device.type == "cuda" else []
    how_steps = f"; steps {', '.join(steps)}" if steps else ""
    out.text(f"path         {plan.path}")
    out.text(f"model        {speeds.dtype} on {speeds.device}; {packages}")
    out.text(
        f"run          {plan.prompt_tokens:,} prompt tokens, {plan.new_tokens:,} new tokens, greedy"
        f"{how_steps}"
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
    if any(row.differing_tokens for row in speeds.rows if row.kv_layers is not None):
        out.text()
        out.text("A quantised KV cache changes the numbers, so different tokens are expected.")
    plain = [
        row
        for row in speeds.rows
        if row.kv_layers is None and row.attention_bits is None and row.activations is None
    ]
    if any(row.differing_tokens for row in plain):
        out.text()
        out.text("Another order of summation rounds differently. Where two tokens are nearly tied,")
        out.text("the other one may be chosen, and the rest of that sequence may differ.")


def _weights(speeds: Speeds) -> str:
    """What the weights of each residency take in memory."""
    sizes = {row.residency: row.weight_bytes for row in speeds.rows}
    host = {row.residency: row.host_bytes for row in speeds.rows}
    return ", ".join(
        f"{name} {bytes_text(n)}"
        + ("" if name == "dense" else f" ({n / sizes['dense']:.2f})")
        + (f" and {bytes_text(host[name])} in host memory" if host[name] else "")
        for name, n in sizes.items()
    )


def _caches(speeds: Speeds) -> str:
    """What keys and values take, of the largest batch."""
    rows = [row for row in speeds.rows if row.batch == speeds.rows[-1].batch]
    plain = next(row.cache_bytes for row in rows if row.kv_layers is None)
    sizes = {in_words(row.kv_layers): row.cache_bytes for row in rows if row.kv_layers is not None}
    few = ", ".join(f"{bits} {bytes_text(n)} ({n / plain:.2f})" for bits, n in sizes.items())
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
        "" if row.kv_layers is None else f"KV {in_short(row.kv_layers)}",
        "" if row.attention_bits is None else f"QK {'/'.join(map(str, few)) or 'full'}",
        "unused" if few and not any(how.endswith(" bits") for how in row.attention_calls) else "",
    ]
    return ", ".join(filter(None, parts))


def _ratio(row: Speed, ratio: float | None) -> str:
    is_base = row.residency == "dense" and row.kv_layers is None and row.attention_bits is None
    return "" if ratio is None or is_base else f" ({ratio:.2f})"


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
