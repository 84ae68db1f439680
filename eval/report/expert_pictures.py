"""What `neuzip experts` counted, as a picture: a map of layers and experts, and the shares of the classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neuzip.compress.workspace import write_file
from neuzip.eval.experts.analyse import ExpertAnalysis
from neuzip.eval.experts.expert_use import CLASSES, UseClass
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS, png, svg
from neuzip.eval.measures.convention_names import special_text
from neuzip.eval.measures.histograms import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPAN = 4
"""Powers of two from the mean of a layer to either end of the colours."""

UNUSED = "#1c2733"
"""The colour of an expert that no token chose."""

COLORS: dict[UseClass, str] = {"hot": EXPONENT, "usual": "#d9dde1", "cold": OTHERS, "unused": UNUSED}


def write(analysis: ExpertAnalysis, title: str, path: Path) -> None:
    """Write the picture, of the kind that the suffix of `path` names."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        figure = _draw(analysis, title)
    write_file(path, (png if path.suffix == ".png" else svg)(figure))


def _draw(analysis: ExpertAnalysis, title: str) -> Figure:
    from matplotlib.figure import Figure

    use = analysis.use
    figure = Figure(figsize=(11, 6), facecolor="white")
    figure.text(0.05, 0.95, visible(title), color=INK, size=15, weight="bold", va="center", parse_math=False)
    figure.text(
        0.05, 0.9,
        f"{visible(use.text)}: {use.tokens:,} tokens, {analysis.windows:,} windows of up to"
        f" {analysis.window:,}{special_text(analysis.special_tokens)}",
        color=MUTED, size=10, va="center", parse_math=False,
    )  # fmt: skip
    _map(figure, analysis)
    _classes(figure, analysis)
    return figure


def _axes(figure: Figure, left: float, width: float, name: str, layers: list[int]) -> Axes:
    axes = figure.add_axes((left, 0.11, width, 0.7))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(which="both", length=0, colors=MUTED, labelsize=9)
    axes.set_axisbelow(True)
    axes.set_title(name, loc="left", size=10.5, color=INK, pad=8)
    step = max(1, math.ceil(len(layers) / 16))
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylim(-0.5, len(layers) - 0.5)
    axes.set_ylabel("layer", size=9, color=MUTED)
    return axes


def _map(figure: Figure, analysis: ExpertAnalysis) -> None:
    """The use of each expert relative to the mean of its layer, on a logarithmic scale."""
    from matplotlib.colors import ListedColormap, TwoSlopeNorm

    layers = analysis.use.layers
    cells = np.full((len(layers), max(len(one.tokens) for one in layers)), np.nan)
    unused = cells.copy()
    for row, one in enumerate(layers):
        tokens = np.array(one.tokens, np.float64)
        with np.errstate(divide="ignore"):
            cells[row, : len(tokens)] = np.log2(tokens / max(tokens.mean(), 1e-300))
        unused[row, : len(tokens)][tokens == 0] = 1
    axes = _axes(
        figure, 0.065, 0.56, "How often experts are chosen, relative to the mean of the layer",
        [one.layer for one in layers],
    )  # fmt: skip
    axes.set_xlabel("expert", size=9, color=MUTED)
    edges = [np.arange(size + 1) - 0.5 for size in reversed(cells.shape)]
    mesh = axes.pcolormesh(
        *edges, np.where(np.isinf(cells), np.nan, cells), cmap="RdYlBu_r", norm=TwoSlopeNorm(0, -SPAN, SPAN),
        rasterized=True,
    )  # fmt: skip
    axes.pcolormesh(*edges, unused, cmap=ListedColormap([UNUSED]), rasterized=True)
    bar = figure.colorbar(mesh, cax=figure.add_axes((0.64, 0.11, 0.012, 0.7)), extend="both")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, colors=MUTED, labelsize=9)
    powers = range(-SPAN, SPAN + 1, 2)
    bar.set_ticks(powers, labels=[f"{2**n} ×" if n >= 0 else f"1/{2**-n} ×" for n in powers])


def _classes(figure: Figure, analysis: ExpertAnalysis) -> None:
    """The share of the layer's experts in each class."""
    layers = analysis.use.layers
    axes = _axes(figure, 0.755, 0.215, "Experts by class", [one.layer for one in layers])
    left = np.zeros(len(layers))
    for name in CLASSES:
        shares = np.array([one.classes.count(name) / len(one.tokens) for one in layers])
        axes.barh(range(len(layers)), shares, 0.8, left, color=COLORS[name], label=name)
        left += shares
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="upper right", bbox_to_anchor=(0.98, 0.975),
        ncols=len(CLASSES), frameon=False, fontsize=9, labelcolor=INK, columnspacing=1.2,
    )  # fmt: skip
