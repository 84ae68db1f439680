"""The picture of a sweep: size against divergence and against perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neuzip.eval.figure_files import EXPONENT, INK, MUTED, OTHERS, plain_axes
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.measures.histograms import visible

from .labels import write_labels
from .rows import Sweep, SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = ("#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d46")
"""Colours of block sizes; people with any colour vision tell them apart."""

_STYLES: dict[str, dict[str, Any]] = {
    "quantized": {"color": EXPONENT, "marker": "s", "s": 30, "linewidths": 0},
    "rounded": {"color": OTHERS, "s": 34, "linewidths": 0},
    "lossless": {"color": INK, "s": 34, "linewidths": 0},
    "yardsticks": {"facecolor": "white", "edgecolor": INK, "marker": "D", "s": 26, "linewidths": 1.2},
}
"""Markers of the series that have no blocks."""


def draw(results: Sweep, title: str) -> Figure:
    """Size against divergence and against perplexity; blocks of weights are of those that are rounded."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        return _draw(results, title)


def _draw(results: Sweep, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), facecolor="white")
    tokens = results.rows[0].comparison.tokens
    figure.text(0.04, 0.955, visible(title), color=INK, size=15, weight="bold", va="center", parse_math=False)
    subtitle = f"{visible(results.text)}: {tokens:,} tokens, {results.rule}"
    figure.text(0.04, 0.908, subtitle, color=MUTED, size=10, va="center", parse_math=False)
    panels = (
        (0.07, "KL divergence from the original, nats per token", _divergences),
        (0.565, "Perplexity, token-level", _perplexities),
    )
    for left, name, panel in panels:
        axes = plain_axes(figure, (left, 0.10, 0.415, 0.66), name)
        axes.set_xlabel("stored bits per weight", size=9, color=MUTED)
        panel(axes, results)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.03, 0.89), ncols=len(labels), frameon=False,
        fontsize=9, labelcolor=INK, handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    return figure


def _divergences(axes: Axes, results: Sweep) -> None:
    """On a logarithmic scale; a divergence of 0, of what is lossless, stands at its foot."""
    values = {row.scheme: row.comparison.kld.mean.value for row in results.rows}
    positive = [v for v in values.values() if v > 0]
    foot = 10.0 ** math.floor(math.log10(min(positive, default=1e-6)) - 0.5)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_ylim(foot / 2, 3 * max(positive, default=1.0))
    _points(axes, results, {name: max(v, foot) for name, v in values.items()})
    if len(positive) < len(values):
        ticks = [t for t in axes.get_yticks() if foot * 2 < t <= 2 * max(positive, default=1.0)]
        axes.set_yticks([foot, *ticks], ["0", *(f"{t:g}" for t in ticks)])
    axes.set_ylim(foot / 2, 3 * max(positive, default=1.0))


def _perplexities(axes: Axes, results: Sweep) -> None:
    original = exponential(results.rows[0].comparison.base_nll).value
    highest = max(row.perplexity.value for row in results.rows)
    if highest > 3 * original:
        axes.set_yscale("log")
    axes.axhline(original, color=INK, linewidth=0.9, dashes=(4, 3), zorder=1)
    _points(axes, results, {row.scheme: row.perplexity.value for row in results.rows})
    axes.annotate(
        f"original: {original:.2f}", (0, original), (4, -4), ("axes fraction", "data"), "offset points",
        size=8.5, color=INK, va="top",
    )  # fmt: skip


def _points(axes: Axes, results: Sweep, heights: Mapping[str, float]) -> None:
    """The schemes by size, a marker for each kind and block size; lines join quantised and rounded ones."""
    from matplotlib.ticker import MultipleLocator

    bits = {row.scheme: row.bits_per_weight for row in results.rows}
    series: dict[str, list[str]] = {}
    for row in sorted(results.rows, key=_place_in_legend):
        series.setdefault(_series_of(row), []).append(row.scheme)
    colors = iter(SERIES * len(series))
    lines = []
    for label, members in series.items():
        places = sorted((bits[name], heights[name]) for name in members)
        style = _STYLES.get(label) or {"color": next(colors), "s": 16, "linewidths": 0}
        shown = "_nolegend_" if label == "lossless" else label
        axes.scatter(*zip(*places, strict=True), label=shown, zorder=3, **style)
        if label in ("quantized", "rounded"):
            axes.plot(*zip(*places, strict=True), color=style["color"], linewidth=1.1, alpha=0.6, zorder=2)
            lines.append(places)
    axes.margins(x=0.07)
    axes.xaxis.set_major_locator(MultipleLocator(1))
    texts: dict[tuple[float, float], str] = {}
    written: set[str] = set()
    named = [row.scheme for row in results.rows if row.kind != "quantized"]  # bits4 is 4 on the axis
    for name in sorted(named, key=lambda name: (bits[name], not name.startswith("l"))):
        text = name.partition("b")[0] if name.startswith("k") else name  # the colours tell blocks apart
        if text not in written:
            texts.setdefault((bits[name], heights[name]), text)
        written.add(text)
    write_labels(axes, texts, [(bits[name], heights[name]) for name in bits], lines)


def _place_in_legend(row: SweepRow) -> tuple[int, int]:
    return ("quantized", "rounded", "lossless", "yardstick").index(row.kind), _block_of(row.scheme)


def _series_of(row: SweepRow) -> str:
    """The name of a point's series in the legend."""
    if row.comparison.identical and row.kind != "yardstick":
        return "lossless"
    if row.kind != "rounded":
        return "yardsticks" if row.kind == "yardstick" else row.kind
    block = _block_of(row.scheme)
    return f"blocks of {block}" if block else "rounded"


def _block_of(label: str) -> int:
    return int(label.partition("b")[2] or 0) if label.startswith("k") else 0
