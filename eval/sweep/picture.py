"""The picture of a sweep: size against divergence and against perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS
from neuzip.eval.measures.estimates import exponential
from neuzip.eval.measures.histograms import visible
from neuzip.eval.plans.allocation import Option, pareto_front

from .labels import write_labels
from .rows import Sweep, SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = (OTHERS, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6d46")
"""Colours of block sizes, the first without blocks; people with any colour vision tell them apart."""


def draw(results: Sweep, title: str) -> Figure:
    """Size against divergence and against perplexity, with the schemes that no other beats joined."""
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
        axes = figure.add_axes((left, 0.10, 0.415, 0.66))
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, colors=MUTED, labelsize=9)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(name, loc="left", size=10.5, color=INK, pad=10)
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
    """The schemes by size, a marker for each kind and block size, and a line along those that none beats."""
    bits = {row.scheme: row.bits_per_weight for row in results.rows}
    names = list(bits)
    front = [names[i] for i in pareto_front([Option(bits[name], heights[name]) for name in names])]
    axes.plot(
        [bits[name] for name in front], [heights[name] for name in front],
        color=MUTED, linewidth=1.1, zorder=2,
    )  # fmt: skip
    series: dict[str, list[str]] = {}
    for row in sorted(results.rows, key=_place_in_legend):
        series.setdefault(_series_of(row), []).append(row.scheme)
    colors = iter(SERIES * len(series))
    for label, members in series.items():
        style: dict[str, Any] = {
            "quantized": {"color": EXPONENT, "marker": "s", "s": 30},
            "yardsticks": {"facecolor": "white", "edgecolor": INK, "marker": "D", "s": 26, "linewidths": 1.2},
        }.get(label) or {"color": next(colors), "s": 34, "linewidths": 0}
        axes.scatter(
            [bits[n] for n in members], [heights[n] for n in members], label=label, zorder=3, **style
        )  # fmt: skip
    axes.margins(x=0.07)
    texts: dict[tuple[float, float], str] = {}
    said: set[str] = set()
    for name in sorted(bits, key=lambda name: (bits[name], not name.startswith("l"))):
        text = name.partition("b")[0] if name.startswith("k") else name  # the colours tell blocks apart
        if text not in said:
            texts.setdefault((bits[name], heights[name]), text)
        said.add(text)
    write_labels(axes, texts, *([(bits[name], heights[name]) for name in group] for group in (names, front)))


def _place_in_legend(row: SweepRow) -> tuple[int, int]:
    kinds = ("quantized", "lossless", "rounded", "yardstick")
    return kinds.index(row.kind) if row.kind != "lossless" else 2, _block_of(row.scheme)


def _series_of(row: SweepRow) -> str:
    """The name of a point's series in the legend."""
    if row.kind in ("quantized", "yardstick"):
        return "quantized" if row.kind == "quantized" else "yardsticks"
    block = _block_of(row.scheme)
    return f"rounded, blocks of {block}" if block else "rounded"


def _block_of(label: str) -> int:
    return int(label.partition("b")[2] or 0) if label.startswith("k") else 0
