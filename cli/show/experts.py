"""How often experts are chosen: a row for each layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.text import count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from neuzip.eval.experts.analyse import ExpertAnalysis
    from neuzip.eval.experts.expert_use import LayerUse

SPARE = ["per token", "least", "most"]
"""Columns that a narrow window does without, the first one first."""


def quiet_lines(analysis: ExpertAnalysis, output: Path | None) -> list[object]:
    """The file that was written; or layer, expert and tokens of each expert."""
    if output is not None:
        return [output]
    return [
        f"{layer.layer} {expert} {tokens}"
        for layer in analysis.use.layers
        for expert, tokens in enumerate(layer.tokens)
    ]


def show_experts(out: Output, analysis: ExpertAnalysis) -> None:
    """A row for each layer, and what the columns mean."""
    from neuzip.eval.experts.expert_use import CLASSES, COLD, HOT
    from neuzip.eval.measures.convention_names import special_text

    use = analysis.use
    columns = ["layer", "experts", "per token", *CLASSES, "most", "least"]
    rows = [_row(layer, use.tokens) for layer in use.layers]
    left_out = out.table(columns, rows, right=columns, spare=SPARE)
    out.text(f"hot     chosen at least {HOT:g} times as often as the mean of the layer")
    out.text(f"usual   chosen {COLD:g} to {HOT:g} times as often")
    out.text(f"cold    chosen less than {COLD:g} times as often")
    out.text("unused  chosen by no token of this text; another text may choose them")
    out.text("most, least: the expert that is chosen most and least often, and by which share of the tokens")
    out.text()
    windows = f"windows of {analysis.window:,}{special_text(analysis.special_tokens)}"
    out.text(f"text    {use.text}: {use.tokens:,} tokens in {windows}")
    if any(layer.weights is None for layer in use.layers):
        out.text("weights not seen: this model calls each expert by itself")
    out.text(f"in      {analysis.dtype} on {analysis.device}, {seconds_text(analysis.seconds)}")
    experts = sum(len(layer.tokens) for layer in use.layers)
    unused = sum(layer.classes.count("unused") for layer in use.layers)
    if unused:
        out.status(f"{count_text(unused, 'expert')} of {experts:,} unused on {use.tokens:,} tokens")
    out.wider(left_out)


def _row(layer: LayerUse, tokens: int) -> list[object]:
    from neuzip.eval.experts.expert_use import CLASSES

    classes = layer.classes
    ends = [
        f"{layer.tokens.index(count)} ({percent_text(count, tokens)})"
        for count in (max(layer.tokens), min(layer.tokens))
    ]
    counts = [classes.count(name) or "-" for name in CLASSES]
    return [layer.layer, len(layer.tokens), f"{sum(layer.tokens) / tokens:.3g}", *counts, *ends]
