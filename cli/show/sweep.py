"""The schemes of a sweep, with size, quality, memory and speed of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from neuzip.cli.output import Output
from neuzip.cli.text import bytes_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.plans.calibration_text import CalibrationText
    from neuzip.eval.sweep.rows import Sweep, SweepRow
    from neuzip.eval.sweep.savings import Saving

COLUMNS = {
    "scheme": 100, "size": 4, "ratio": 50, "bits": 60, "PPL": 99, "NLL difference": 90, "mean KLD": 99,
    "KLD 99.9 %": 70, "top-1": 80, "memory": 40, "peak": 10, "load": 15, "decode": 30, "tokens/s": 35, "": 99,
}  # fmt: skip
"""The columns, and how much each is worth where the window is too narrow for all."""


def show_sweep(out: Output, result: Sweep, calibration: CalibrationText | None) -> None:
    from neuzip.eval.measures.estimates import errors_text

    first = result.rows[0]
    c = first.comparison
    if result.resumed:
        count = len(result.rows) + len(result.failed)
        out.status(f"{result.resumed} of {count} schemes were measured already")
    lines = [_original(first), *(_cells(row, row.scheme in result.front) for row in result.rows)]
    known = [name for name in COLUMNS if name != "peak" or any(row.peak_bytes for row in result.rows)]
    spare = [name for name in sorted(known, key=lambda name: COLUMNS[name]) if COLUMNS[name] < 100]
    right = set(known) - {"scheme", ""}
    left_out = out.table(known, [[line[name] for name in known] for line in lines], right=right, spare=spare)
    out.text()
    _show_savings(out, result.savings)
    out.text("scheme   k3 keeps 3 mantissa bits; k3b512 adds a scale for each block of 512 weights")
    if any(row.kind == "quantized" for row in result.rows):
        text = "rounded to nearest" if calibration is None else f"calibrated on {calibration.name}"
        out.text(f"         bits4.5 quantises to about 4.5 bits per weight, {text}")
    _show_yardsticks(out, [row.scheme for row in result.rows if row.kind == "yardstick"])
    out.text("KLD      mean and 99.9th percentile, in nats per token; top-1 is top-1 agreement")
    out.text(f"text     {result.text}: {c.tokens:,} tokens, {result.rule}")
    errors = errors_text(c.blocks, c.kld.mean.standard_error)
    out.text(f"errors   {errors}; NLL differences and KLD are paired")
    out.text(f"model    {first.dtype}, residency {first.depends_on['residency']}, on {result.device}")
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


def _show_savings(out: Output, savings: Sequence[Saving]) -> None:
    """Quantisation at the divergence of each yardstick, and at its size."""
    if all(one.quantized_bits is None and one.quantized_kld is None for one in savings):
        return
    heads = ["yardstick", "bits", "mean KLD", "quantized at this KLD", "smaller", "quantized at these bits"]
    lines = [
        [
            one.yardstick, f"{one.bits:.2f}", f"{one.kld:.2e}",
            _text(one.quantized_bits, lambda bits: f"{bits:.2f} bits"),
            _text(one.saved, lambda share: percent_text(share, 1)),
            _text(one.quantized_kld, lambda kld: f"KLD {kld:.2e}"),
        ]
        for one in savings
    ]  # fmt: skip
    out.table(heads, lines, right=set(heads[1:]), spare=[])
    out.text("- outside of the measured points of quantized; between them, bits and log KLD are interpolated")
    out.text()


def _show_yardsticks(out: Output, names: Sequence[str]) -> None:
    from neuzip.eval.yardsticks.names import NAMES

    if not names:
        return
    out.text("yardsticks: matrices rounded to nearest in a published format, sizes without headers of files")
    for name in names:
        out.text(f"{name:8} {NAMES[name]}")


Number = TypeVar("Number", int, float)


def _text(value: Number | None, words: Callable[[Number], str]) -> str:
    """Words for a figure, and a dash for one that there is not."""
    return "-" if value is None else words(value)


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
        "memory": _text(row.memory_bytes, bytes_text),
        "peak": _text(row.peak_bytes, bytes_text),
        "load": _text(row.load_seconds, lambda seconds: f"{seconds:.2f} s"),
        "decode": _text(row.decode_bytes_per_second, lambda speed: f"{bytes_text(speed)}/s"),
        "tokens/s": _text(row.tokens_per_second, lambda speed: f"{speed:,.0f}"),
        "": "*" if on_front else "",
    }
