"""The three versions of the built-in checkpoint, side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import estimate_text, signed_text
from neuzip.cli.text import bytes_text, percent_text

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport
    from neuzip.eval.measures.perplexity import Evaluation, ModelDifference

BITS = 5
"""Bits per weight of the quantised version."""


def show_versions(out: Output, reports: list[CompressionReport], evaluation: Evaluation) -> None:
    from neuzip.eval.measures.estimates import errors_text

    measured = evaluation.measured[0]
    original, *others = measured.scores
    rows = [
        ["original", bytes_text(reports[0].weight_bytes), percent_text(1, 1),
         f"{8 * reports[0].weight_bytes / reports[0].weights:.2f}", estimate_text(original.token_perplexity)]
    ]  # fmt: skip
    for name, report, score in zip(("lossless", "quantized"), reports, others, strict=True):
        rows.append(
            [name, bytes_text(report.stored_weight_bytes),
             percent_text(report.stored_weight_bytes, report.weight_bytes),
             f"{report.bits_per_weight:.2f}", estimate_text(score.token_perplexity)]
        )  # fmt: skip
    columns = ["version", "size", "ratio", "bits/weight", "perplexity"]
    out.text()
    out.table(columns, rows, right=columns[1:])
    c = measured.convention
    out.text(f"Perplexity: token-level; text: {evaluation.text}")
    out.text(f"{c.windows} {c.rule}; no special tokens")
    error = measured.scores[0].token_perplexity.standard_error
    out.text(errors_text(measured.blocks, error))
    for (name, *_), score in zip(rows[1:], others, strict=True):
        if score.difference is not None:
            out.text(f"{name}: {_difference_text(score.difference)}")


def _difference_text(difference: ModelDifference) -> str:
    """How far two models are apart, in nats and in percent of perplexity."""
    if difference.identical:
        return "bit-identical losses in every window"
    percent = 100 * math.expm1(difference.nll.value)
    return f"{signed_text(difference.nll)} nats per token, perplexity {percent:+.3f} % (paired)"
