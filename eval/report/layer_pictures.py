"""What `neuzip layers` found, as a picture: the map of angular distances, and bars for each layer.

The map is laid out as in Figures 2 to 5 of Mix-LN (arXiv 2412.13795): across the layer that a run of layers
begins with, upwards how many there are in it, the smaller the distance the lighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neuzip.compress.workspace import write_file
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS, png, svg
from neuzip.eval.layers.analyse import LayerAnalysis
from neuzip.eval.layers.layer_report import LayerReport
from neuzip.eval.measures.convention_names import special_text
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.histograms import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = "viridis_r"
"""Light for small distances; its lightness alone tells the order."""

WRITTEN = 10
"""Layers up to which each distance is written into its cell."""

TICKS = 16
"""Numbers beside an axis, at most."""


def draw(analysis: LayerAnalysis, title: str) -> Figure:
    """The map, and beside it divergence, influence and gradient norm of each layer."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        return _draw(analysis, title)


def write(analysis: LayerAnalysis, title: str, path: Path) -> None:
    """Write the picture, of the kind that the suffix of `path` names."""
    write_file(path, (png if path.suffix == ".png" else svg)(draw(analysis, title)))


def _draw(analysis: LayerAnalysis, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), facecolor="white")
    figure.text(0.04, 0.95, visible(title), color=INK, size=15, weight="bold", va="center", parse_math=False)
    figure.text(
        0.04, 0.9,
        f"{visible(analysis.text)}: {analysis.tokens:,} tokens, {analysis.windows:,} windows of up to"
        f" {analysis.window:,}{special_text(analysis.special_tokens)}{_dropped(analysis)}",
        color=MUTED, size=10, va="center", parse_math=False,
    )  # fmt: skip
    _map(figure, analysis)
    bars: tuple[tuple[str, list[Estimate | None]], ...] = (
        ("KL divergence without the layer, nats per token", [_kld(layer) for layer in analysis.layers]),
        ("Block influence, 1 − cos", [layer.block_influence for layer in analysis.layers]),
        ("Gradient norm", [layer.gradient_norm for layer in analysis.layers]),
    )
    for row, (name, values) in enumerate(bars):
        axes = figure.add_axes((0.585, 0.66 - 0.285 * row, 0.385, 0.165))
        _plain(axes, name)
        _bars(axes, values, analysis, logarithmic=row == 0)
        if row == len(bars) - 1:
            axes.set_xlabel("layer", size=9, color=MUTED)
    return figure


def _dropped(analysis: LayerAnalysis) -> str:
    if analysis.removal is None:
        return ""
    numbers = ", ".join(map(str, analysis.removal.layers))
    return f"; dropped: {numbers}"


def _kld(layer: LayerReport) -> Estimate | None:
    return None if layer.without is None else layer.without.kld.mean


def _plain(axes: Axes, name: str) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(which="both", length=0, colors=MUTED, labelsize=9)
    axes.set_axisbelow(True)
    axes.set_title(name, loc="left", size=10.5, color=INK, pad=8)


def _map(figure: Figure, analysis: LayerAnalysis) -> None:
    layers = len(analysis.layers)
    axes = figure.add_axes((0.065, 0.09, 0.4, 0.735))
    _plain(axes, "Angular distance of the states before layers l and l + n, last tokens")
    cells = np.full((layers, layers), np.nan)
    for n, row in enumerate(analysis.last_token.mean):
        cells[n, : len(row)] = row
    edges = np.arange(layers + 1) - 0.5
    mesh = axes.pcolormesh(edges, edges + 1, cells, cmap=COLORS, edgecolors="white", linewidth=0.4)
    axes.set_xlabel("first layer l", size=9, color=MUTED)
    axes.set_ylabel("layers n", size=9, color=MUTED)
    axes.set_xticks(_ticks(0, layers))
    axes.set_yticks(_ticks(1, layers))
    bar = figure.colorbar(mesh, cax=figure.add_axes((0.475, 0.09, 0.012, 0.735)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, colors=MUTED, labelsize=9)
    if layers <= WRITTEN:
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
        for (n, at), value in np.ndenumerate(cells):
            if not math.isnan(value):
                color = "white" if value > middle else INK
                axes.text(at, n + 1, f"{value:.2f}", ha="center", va="center", size=8.5, color=color)


def _ticks(first: int, count: int) -> list[int]:
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500) if count <= s * TICKS)
    return list(range(first if first % step == 0 or step == 1 else step, first + count, step))


def _bars(
    axes: Axes, values: Sequence[Estimate | None], analysis: LayerAnalysis, *, logarithmic: bool = False
) -> None:
    """A bar a layer with its standard error; those that are dropped in another colour.

    Where a scale is logarithmic, and a length would say nothing, there are points.
    """
    known = [(n, value) for n, value in enumerate(values) if value is not None]
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.set_xticks(_ticks(0, len(values)))
    if not known:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=MUTED, size=9)
        return
    gone = set(analysis.removal.layers) if analysis.removal is not None else set()
    numbers, heights = [n for n, _ in known], [value.value for _, value in known]
    colors = [EXPONENT if n in gone else OTHERS for n in numbers]
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if logarithmic and min(heights) > 0:
        _logarithmic(axes, min(heights), max(heights))
        axes.scatter(numbers, heights, 36, color=colors, zorder=3)
    else:
        axes.bar(numbers, heights, 0.72, color=colors)
    for n in set(range(len(values))) - set(numbers):
        axes.text(n, 1, "∞", transform=axes.get_xaxis_transform(), ha="center", va="top", color=EXPONENT)
    for n, value in known:
        if value.standard_error is not None:
            axes.plot(
                [n, n], [value.value - value.standard_error, value.value + value.standard_error],
                color=INK, linewidth=0.9,
            )  # fmt: skip


def _logarithmic(axes: Axes, lowest: float, highest: float) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.8, highest * 1.8)
    wide = highest > 30 * lowest
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5), numticks=6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
