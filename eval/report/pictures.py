"""The pictures of a report, as SVG that takes its colours from the page around it.

Where divergences lie, size against divergence, errors by layer, and the histograms of `neuzip inspect`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from neuzip.eval import figure_files
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS
from neuzip.eval.report import histogram_pictures as inspect_pictures
from neuzip.eval.report.distribution import BINS, LOWEST, Distribution
from neuzip.eval.report.evaluation import EvaluationReport
from neuzip.eval.report.rows import MEAN_KLD
from neuzip.eval.report.sweep_results import SweepPoint, pareto
from neuzip.eval.report.tensors import TensorRow
from neuzip.eval.report.text import number_text, power_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADROOM = 1.2
"""Height of the distribution's axes, where its highest bar is 1: names of lines stand above the bars."""

NAMED = 24
"""Up to as many points of a sweep all have their names beside them; of more, those that matter."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|layer)\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def pictures(report: EvaluationReport) -> dict[str, str]:
    """SVG elements by name; empty text for those for which there are no figures."""
    from matplotlib import style

    drawn = dict.fromkeys(("distribution", "pareto", "layers", "histograms"), "")
    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        if report.distribution is not None and any(report.distribution.counts):
            drawn["distribution"] = _inline(_draw_distribution(report.distribution))
        if report.sweep:
            drawn["pareto"] = _inline(_draw_pareto(report))
        if any(t.error for t in report.tensors):
            drawn["layers"] = _inline(_draw_layers(report.tensors))
    if report.inspection is not None and report.inspection.counts:
        drawn["histograms"] = _inline(inspect_pictures.draw(report.inspection, ""))
    return {name: _unique(svg, name) for name, svg in drawn.items()}


def _inline(figure: Figure) -> str:
    """A figure as an SVG element whose colours are those of the page, in light and dark."""
    picture = figure_files.svg(figure, text_as_text=True).decode()
    picture = re.sub(r' xmlns(:xlink)?="[^"]*"', "", picture[picture.index("<svg") :], count=2)
    for color, name in ((INK, "ink"), (MUTED, "muted"), (FAINT, "faint"), (EXPONENT, "accent"),
                        (OTHERS, "bar"), ("#ffffff", "paper")):  # fmt: skip
        picture = picture.replace(color, f"var(--{name})")
    return picture


def _unique(svg: str, name: str) -> str:
    """The SVG with identifiers that no other picture of a page has."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)


def _axes(width: float, height: float, *, left: float = 0.75, bottom: float = 0.5, right: float = 0.2,
          top: float = 0.35) -> tuple[Figure, Axes]:  # fmt: skip
    """A figure of this size in inches, with one pair of axes in the house style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(which="both", length=0, colors=MUTED, labelsize=9)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    return figure, axes


def _draw_distribution(spread: Distribution) -> Figure:
    """Shares of tokens by divergence on a logarithmic axis, with the share of all up to there as a line."""
    figure, axes = _axes(8, 3.4, right=0.6)
    occupied = np.flatnonzero(spread.counts)
    first, last = int(occupied[0]) // BINS * BINS, -(-(int(occupied[-1]) + 1) // BINS) * BINS
    counts = np.array(spread.counts[first:last])
    edges = LOWEST + np.arange(first, last + 1) / BINS
    shares = counts / max(1, spread.tokens)
    axes.bar(edges[:-1], shares, 0.86 / BINS, align="edge", color=OTHERS)
    axes.set_xlim(edges[0], edges[-1])
    step = max(1, round((edges[-1] - edges[0]) / 10))
    ticks = np.arange(math.ceil(edges[0]), math.floor(edges[-1]) + 1, step)
    axes.set_xticks(ticks, [power_text(int(t)) for t in ticks])
    axes.set_xlabel("KL divergence of a single token, nats", color=MUTED, size=9)
    _percents(axes, float(shares.max()))
    before = spread.zero + spread.below + sum(spread.counts[:first])
    line = axes.twinx()
    for side in line.spines.values():
        side.set_visible(False)
    line.tick_params(length=0, colors=MUTED, labelsize=9)
    line.plot(
        edges, np.r_[before, before + np.cumsum(counts)] / max(1, spread.tokens), color=EXPONENT, lw=1.6
    )
    line.set_ylim(0, HEADROOM)
    line.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    for name in ("median", "99.9 %"):
        value = spread.quantiles.get(name, 0.0)
        if value > 0 and edges[0] <= math.log10(value) <= edges[-1]:
            axes.axvline(math.log10(value), color=INK, lw=0.9, dashes=(4, 3))
            axes.annotate(
                f"{name}: {number_text(value)}", (math.log10(value), 1), (4, -2), ("data", "axes fraction"),
                "offset points", size=9, color=INK, va="top", parse_math=False,
            )  # fmt: skip
    axes.annotate(
        "share of tokens in each bin", (0, 1), (0, 10), "axes fraction", "offset points", size=9, color=OTHERS
    )
    axes.annotate(
        "cumulative share", (1, 1), (0, 10), "axes fraction", "offset points",
        size=9, color=EXPONENT, ha="right",
    )  # fmt: skip
    return figure


def _percents(axes: Axes, highest: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, highest * HEADROOM or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)


def _draw_pareto(report: EvaluationReport) -> Figure:
    """Bits a weight against mean divergence; points that no other beats are joined. 0 lies below the axis."""
    figure, axes = _axes(8, 4.2, right=0.4)
    points, own = report.sweep, _own_point(report)
    positive = [p.kld.value for p in [*points, *own] if p.kld.value > 0]
    floor = 10.0 ** (math.floor(math.log10(min(positive))) - 0.7) if positive else 1e-6
    axes.set_yscale("log")
    front = pareto(report.sweep)

    def place(p: SweepPoint) -> tuple[float, float]:
        return p.bits_per_weight, max(p.kld.value, floor)

    axes.plot(*zip(*map(place, front), strict=True), color=EXPONENT, lw=1.4, zorder=2)
    for p in points:
        color, is_yardstick = EXPONENT if p in front else OTHERS, p.kind == "yardstick"
        axes.scatter(
            *place(p), 30, facecolor="none" if is_yardstick else color, edgecolor=color, zorder=3,
            linewidths=1.2 if is_yardstick else 0, marker="D" if is_yardstick else "o",
        )  # fmt: skip
    for p in own:
        axes.scatter(*place(p), 90, facecolor="none", edgecolor=INK, linewidths=1.4, zorder=4)
    named = sorted(points if len(points) <= NAMED else front, key=lambda p: p.bits_per_weight)
    for number, p in enumerate(named):
        right, up = place(p)
        above = number % 2 == 1 or up == floor
        _name_point(axes, p.scheme, right, up, EXPONENT if p in front else OTHERS, above=above)
    axes.set_xlabel("stored bits per weight", color=MUTED, size=9)
    axes.set_ylim(floor / 1.6, (max(positive) if positive else 1) * 2.5)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.04 * (high - low), high + 0.08 * (high - low))
    axes.grid(color=FAINT, linewidth=0.8)
    axes.minorticks_off()
    ticks = [t for t in range(math.ceil(math.log10(floor * 1.5)), 4) if 10.0**t <= axes.get_ylim()[1]]
    zero = any(p.kld.value <= 0 for p in [*points, *own])
    axes.set_yticks([*([floor] if zero else []), *(10.0**t for t in ticks)],
                    [*(["0"] if zero else []), *map(power_text, ticks)])  # fmt: skip
    axes.annotate(
        "mean KL divergence, nats per token",
        (0, 1),
        (-40, 10),
        "axes fraction",
        "offset points",
        size=9,
        color=MUTED,
    )
    return figure


def _own_point(report: EvaluationReport) -> list[SweepPoint]:
    """The model of the report itself among those of the sweep, if it was measured as they were."""
    if report.sweep_differs:
        return []
    mean = next((row.after for row in report.divergence if row.name == MEAN_KLD), None)
    bits = report.bits_per_weight
    return [] if mean is None or bits is None else [SweepPoint("this", "", bits, 0, mean, mean)]


def _name_point(axes: Axes, name: str, x: float, y: float, color: str, *, above: bool) -> None:
    """Above to the right, or below to the left: where the line along the front does not go."""
    axes.annotate(
        name, (x, y), (4, 4) if above else (-4, -4), textcoords="offset points", size=9,
        color=color, ha="left" if above else "right", va="bottom" if above else "top",
        parse_math=False, zorder=5,
    )  # fmt: skip


def _draw_layers(tensors: Sequence[TensorRow]) -> Figure:
    """A field for each kind of tensor and layer, the stronger its colour the larger the error."""
    places = layer_grid(tensors)
    kinds = list(places)
    layers = 1 + max((layer for row in places.values() for layer in row if layer is not None), default=-1)
    errors = [e for row in places.values() for e in row.values() if e > 0]
    low, high = shade_scale(errors)
    wide = max(layers, 1)
    outside = any(None in row for row in places.values())
    figure, axes = _axes(8, 1.0 + 0.24 * len(kinds), left=2.6, right=0.15, top=0.4)
    for y, kind in enumerate(kinds):
        for layer, error in places[kind].items():
            x = layer if layer is not None else -1 - wide / 40
            depth = shade(error, low, high) if error > 0 else 0.0
            axes.bar(
                x, 0.86, 0.9, y - 0.43, color=EXPONENT if error else FAINT, alpha=depth or 0.6, linewidth=0
            )
    axes.set_ylim(len(kinds) - 0.4, -0.6)
    axes.set_xlim((-1.6 - wide / 40) if outside else -0.6, wide - 0.4)
    axes.set_yticks(range(len(kinds)), kinds, parse_math=False)
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if wide <= 16 * s)
    axes.set_xticks(range(0, wide, step))
    axes.set_xlabel(
        "layer" + ("; leftmost column: tensors outside the layers" if outside else ""), color=MUTED, size=9
    )
    axes.annotate(
        f"relative error: shades from {number_text(low)} (faint) to {number_text(high)} (strong); "
        f"measured {number_text(min(errors))} to {number_text(max(errors))}",
        (0.01, 1), (0, 10), ("figure fraction", "axes fraction"), "offset points",
        size=9, color=MUTED, parse_math=False,
    )  # fmt: skip
    return figure


def shade_scale(errors: Sequence[float]) -> tuple[float, float]:
    """The errors that the faintest and the strongest shade stand for, at least a power of ten apart.

    >>> shade_scale([0.5, 0.9]), shade_scale([0.001, 0.9])
    ((0.09, 0.9), (0.001, 0.9))
    """
    high = max(errors)
    return min(*errors, high / 10), high


def shade(error: float, low: float, high: float) -> float:
    """The opacity of an error, by its logarithm.

    >>> shade(0.09, 0.09, 0.9), shade(0.9, 0.09, 0.9)
    (0.15, 1.0)
    """
    return 0.15 + 0.85 * math.log10(error / low) / math.log10(high / low)


def layer_grid(tensors: Sequence[TensorRow]) -> dict[str, dict[int | None, float]]:
    """Errors by kind of tensor and layer (None outside of layers), of kinds with any error.

    The experts of a layer share a field, which holds the largest of their errors.
    """
    places: dict[str, dict[int | None, float]] = defaultdict(dict)
    for t in tensors:
        if t.error is None or not math.isfinite(t.error):
            continue
        match = _LAYER.search(t.label)
        layer = int(match[1]) if match else None
        kind = t.label[match.end() :] if match else t.label
        kind = _NUMBER.sub("", kind).removesuffix(".weight")
        places[kind][layer] = max(t.error, places[kind].get(layer, 0.0))
    return {kind: row for kind, row in places.items() if any(row.values())}
