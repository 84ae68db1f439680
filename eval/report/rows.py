"""Rows of the tables of a report: figures of the original and of the compared model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuzip.eval.measures.estimates import Estimate, exponential, over, without_meaning

if TYPE_CHECKING:
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.perplexity import (
        ConventionScores,
        MeasuredModel,
        ModelDifference,
        PeakMemory,
    )

MEAN_KLD = "mean KLD"

SPEED = "tokens/s"
"""Unit of figures that were measured once: they are printed roughly, without a change."""


@dataclass(frozen=True)
class ReportRow:
    """A figure of the original (`before`, if it was measured) and of what was made of it.

    `note` is what it must be told with: its convention. `unit` is "", "bytes", "count", or what stands behind
    the figure. `change` is in percent of `before`, paired, where more is known than the two figures.
    """

    name: str
    after: Estimate | None
    before: Estimate | None = None
    note: str = ""
    unit: str = ""
    change: Estimate | None = None


def perplexity_rows(measured: ConventionScores, both: bool) -> Iterator[ReportRow]:
    """The perplexities of a convention: per word and byte in lm-eval's, per token in the others."""
    c, after = measured.convention, measured.scores[-1]
    before = measured.scores[0] if both else None
    special = "; no special tokens" if c.special_tokens == "none" else ""
    errors = over(measured.blocks, after.token_perplexity.standard_error)
    note = f"{c.rule}{special}; {c.tokens:,} tokens; {errors}"
    names = {"token_perplexity": f"{'token-level' if c.name == 'token' else c.name} perplexity"}
    if c.name == "token":
        names["nll"] = "NLL per token"
    if c.name == "lm-eval":
        names = {
            "word_perplexity": "word-level perplexity, lm-eval",
            "byte_perplexity": "byte-level perplexity, lm-eval",
            "bits_per_byte": "bits per byte, lm-eval",
        }
    for field_name, name in names.items():
        figure = getattr(after, field_name)
        if figure is not None:
            was = None if before is None else getattr(before, field_name)
            unit = "nats" if field_name == "nll" else ""
            figure_note = note
            if "perplexity" in field_name and any(without_meaning(x) for x in (figure, was) if x is not None):
                figure_note = f"tells nothing: its error is more than half of it; use a longer text; {note}"
            yield ReportRow(name, figure, was, figure_note, unit, _change(field_name, was, after.difference))


def _change(of: str, before: Estimate | None, difference: ModelDifference | None) -> Estimate | None:
    """The change of a figure in percent, from the paired difference of losses."""
    if before is None or difference is None:
        return None
    if of == "bits_per_byte" and difference.nll_per_byte is not None:
        return difference.nll_per_byte.times(100 / math.log(2) / before.value)
    differences = {
        "token_perplexity": difference.nll,
        "word_perplexity": difference.nll_per_word,
        "byte_perplexity": difference.nll_per_byte,
    }
    nll = differences.get(of)
    if nll is None:
        return None
    ratio = exponential(nll)
    return Estimate(100 * (ratio.value - 1), ratio.times(100).standard_error)


def divergence_rows(comparison: Comparison, windows: str) -> tuple[ReportRow, ...]:
    exact = [
        ("median KLD", comparison.kld.median),
        ("99.9 % KLD", comparison.kld.p999),
        ("largest KLD", comparison.kld.max),
    ]
    return (
        ReportRow(
            MEAN_KLD,
            comparison.kld.mean,
            unit="nats",
            note=f"KL(original || this model), full vocabulary; {windows}",
        ),
        *(ReportRow(name, Estimate(value, None), unit="nats", note="per token") for name, value in exact),
        ReportRow(
            "top-1 agreement", comparison.top_1.times(100), unit="%", note="both rank the same token first"
        ),
        ReportRow(f"top-{comparison.k} overlap", comparison.top_k.times(100), unit="%", note="in any order"),
        ReportRow("perplexity ratio", comparison.perplexity_ratio, note="this model / original, paired"),
        ReportRow(
            "tokens",
            Estimate(float(comparison.tokens), None),
            note=over(comparison.blocks, comparison.kld.mean.standard_error),
            unit="count",
        ),
    )


def cost_rows(last: MeasuredModel, before: MeasuredModel | None, peak: PeakMemory) -> tuple[ReportRow, ...]:
    def row(name: str, of: str, unit: str, note: str) -> ReportRow:
        was = None if before is None else Estimate(getattr(before, of), None)
        return ReportRow(name, Estimate(getattr(last, of), None), was, note, unit)

    rows = [
        row("weights in memory", "weight_bytes", "bytes", "the parameters"),
        row("speed", "tokens_per_second", SPEED, "one pass without an error; `neuzip bench` measures speed"),
    ]
    if peak.bytes is not None:
        everything = peak.of + (", with both models" if before is not None else "")
        rows.append(
            ReportRow("peak memory", Estimate(float(peak.bytes), None), note=everything, unit="bytes")
        )
    return tuple(rows)
