"""What `neuzip patch-attention` found, as a picture: similarity and divergence by layer, and the choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.eval.attention import BITS, AttentionCalibration, AttentionLayer, QuantizedAttention
from neuzip.eval.figure_files import EXPONENT, INK, MUTED, OTHERS, plain_axes, png, svg
from neuzip.eval.measures.convention_names import special_text
from neuzip.eval.measures.histograms import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {8: OTHERS, 4: EXPONENT}

OFFSETS = {8: -0.14, 4: 0.14}
"""Offsets of the points of a layer from its middle, in layers."""

LABELLED, TOLD = 24, 48
"""Layers up to which each has its number, and its bits below it."""


def draw(calibration: AttentionCalibration, title: str) -> Figure:
    """Two panels, points by layer: filled where the layer got these bits, hollow where it did not."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        return _draw(calibration, title)


def drawn(calibration: AttentionCalibration, title: str, path: Path) -> bytes:
    """The picture as a file, of the kind that the suffix of `path` names."""
    return (png if path.suffix == ".png" else svg)(draw(calibration, title))


def _draw(calibration: AttentionCalibration, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), facecolor="white")
    figure.text(0.04, 0.94, visible(title), color=INK, size=15, weight="bold", va="center", parse_math=False)
    special = special_text(calibration.special_tokens)
    how = f"{calibration.tokens:,} tokens, windows of {calibration.window:,}{special}"
    budget = f"; dashed: the budget of all, {calibration.limit:g}" if calibration.limit else ""
    subtitle = f"{visible(calibration.text)}: {how}; {choice_text(calibration)}{budget}"
    figure.text(0.04, 0.885, subtitle, color=MUTED, size=10, va="center", parse_math=False)
    panels = (
        (0.075, "Similarity: cosine · (1 − rel. L1), down to the worst window", _scores),
        (0.565, "KLD with this layer alone, nats per token", _divergences),
    )
    for left, name, panel in panels:
        axes = plain_axes(figure, (left, 0.13, 0.40, 0.64), name, "y")
        panel(axes, calibration)
        _number_layers(axes, calibration)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper right", bbox_to_anchor=(0.98, 0.975), ncols=len(labels), frameon=False,
        fontsize=9, labelcolor=INK, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip
    return figure


def choice_text(calibration: AttentionCalibration) -> str:
    """The number of layers for each number of bits, in words.

    For example: 5 of 6 layers in 8 bits, 1 at full precision.
    """
    counts = {bits: calibration.bits.count(bits) for bits in (4, 8, None)}
    names = {4: "in 4 bits", 8: "in 8 bits", None: "at full precision"}
    parts = [f"{count} {names[bits]}" for bits, count in counts.items() if count]
    first, *rest = parts
    number, _, how = first.partition(" ")
    total = len(calibration.layers)
    return ", ".join([f"{number} of {total} layer{'' if total == 1 else 's'} {how}", *rest])


def _scores(axes: Axes, calibration: AttentionCalibration) -> None:
    """The mean of windows, and a line down to the worst."""
    worst = []
    for bits in BITS:
        points = _points(calibration, bits)
        for x, layer, form in points:
            low = form.closeness.worst_score
            axes.plot([x, x], [low, form.closeness.score], color=COLORS[bits], lw=1.2, zorder=2)
            _dot(axes, x, form.closeness.score, bits, layer.bits == bits)
            worst.append(low)
        if points:
            _legend(axes, bits)
    axes.plot([], [], marker="o", ls="", mfc=MUTED, mec=MUTED, label="chosen")
    axes.plot([], [], marker="o", ls="", mfc="white", mec=MUTED, label="not chosen")
    low = min(worst, default=0.0)
    axes.set_ylim(max(-0.02, low - 0.08 * (1 - low) - 1e-6), 1 + 0.05 * (1 - low))


def _divergences(axes: Axes, calibration: AttentionCalibration) -> None:
    """On a logarithmic scale, with standard errors; a divergence of 0 stands at its foot."""
    values = [
        form.kld.value
        for layer in calibration.layers
        for form in layer.forms
        if form.kld and form.kld.value > 0
    ]
    foot = 10.0 ** (math.log10(min(values, default=1e-6)) - 0.5)
    axes.set_yscale("log")
    axes.minorticks_off()
    for bits in BITS:
        for x, layer, form in _points(calibration, bits):
            if form.kld is None:
                continue
            value, error = max(form.kld.value, foot), form.kld.standard_error
            if error is not None:
                low = max(value - error, foot)
                axes.plot([x, x], [low, value + error], color=COLORS[bits], lw=1.2, zorder=2)
            _dot(axes, x, value, bits, layer.bits == bits)
    top = max([*values, *([calibration.limit] if calibration.limit else [])], default=1.0)
    if calibration.limit:
        axes.axhline(calibration.limit, color=INK, linewidth=0.9, dashes=(4, 3), zorder=1)
    axes.set_ylim(foot / 1.5, 3 * top)
    if any(form.kld and form.kld.value <= 0 for layer in calibration.layers for form in layer.forms):
        ticks = [tick for tick in axes.get_yticks() if 2 * foot < tick <= 2 * top]
        axes.set_yticks([foot, *ticks], ["0", *(f"{tick:g}" for tick in ticks)])


def _points(
    calibration: AttentionCalibration, bits: int
) -> list[tuple[float, AttentionLayer, QuantizedAttention]]:
    forms = [(layer, layer.form(bits)) for layer in calibration.layers]
    return [(layer.number + OFFSETS[bits], layer, form) for layer, form in forms if form is not None]


def _dot(axes: Axes, x: float, y: float, bits: int, chosen: bool) -> None:
    axes.plot(x, y, "o", ms=6, mfc=COLORS[bits] if chosen else "white", mec=COLORS[bits], mew=1.4, zorder=3)


def _legend(axes: Axes, bits: int) -> None:
    axes.plot([], [], color=COLORS[bits], lw=3, label=f"{bits} bits")


def _number_layers(axes: Axes, calibration: AttentionCalibration) -> None:
    """Numbers of layers, and the choice below them where there is room."""
    count = len(calibration.layers)
    if count > TOLD:
        axes.set_xticks(range(0, count, 8))
        axes.set_xlim(-0.6, count - 0.4)
        axes.set_xlabel("layer", size=9, color=MUTED)
        return
    step = 1 if count <= LABELLED else 4
    shown = {bits: str(bits) for bits in BITS} | {None: "–"}
    labels = [
        f"{layer.number if layer.number % step == 0 else ''}\n{shown[layer.bits]}"
        for layer in calibration.layers
    ]
    axes.set_xticks(range(count), labels)
    axes.set_xlabel("layer, and below it its bits; – is full precision", size=9, color=MUTED)
    axes.set_xlim(-0.6, count - 0.4)
    if count > LABELLED:
        axes.tick_params(axis="x", labelsize=7)
