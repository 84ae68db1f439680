"""Histograms of sign, exponent and mantissa as pictures: for a terminal, as PNG and SVG, and as a web page.

The picture follows Figure 1 of NeuZip (arXiv 2410.20650): three panels side by side, with their entropies. A
checkpoint with several float formats gets a row of panels for each. The same counts give the same bytes.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from neuzip.compress.workspace import write_file
from neuzip.distribution import require
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS, png, svg
from neuzip.eval.measures.entropies import Histogram
from neuzip.eval.measures.expert_figures import sum_up_experts
from neuzip.eval.measures.histograms import Counts, Inspection, bias, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = (".png", ".svg")

KINDS = (*IMAGES, ".html")

_ACROSS = ("", *"▏▎▍▌▋▊▉█")

_UP = " ▁▂▃▄▅▆▇█"

BLOCKS = "".join(_ACROSS) + _UP
"""Characters of `sketch`; a terminal that lacks one of them gets an ASCII form."""

RARE = 0.001
"""Share below which an exponent at either end is counted with its neighbours."""


@dataclass(frozen=True)
class Bar:
    """Weights that share an exponent. `power` is None for those that share no power of two."""

    label: str
    count: int
    power: int | None = None


def exponent_bars(counts: Counts, most: int) -> list[Bar]:
    """Exponents as powers of two, rising; at most `most` of them, the others in a bar at either end.

    Zeros with any subnormals, and infinities with NaNs, have bars of their own where there are any.
    """
    fmt, histogram = counts.fmt, counts.exponents
    end = histogram.size if fmt.finite else histogram.size - 1
    first, last = _window(histogram[1:end], most)
    first, last = first + 1, last + 1
    lowest, highest = f"2^{first - bias(fmt)}", f"2^{last - 1 - bias(fmt)}"
    bars = [
        Bar("0" if counts.zeros == histogram[0] else "0, subnormal", int(histogram[0])),
        Bar(f"below {lowest}", int(histogram[1:first].sum())),
        *(Bar(f"2^{e - bias(fmt)}", int(histogram[e]), e - bias(fmt)) for e in range(first, last)),
        Bar(f"above {highest}", int(histogram[last:end].sum())),
        Bar("inf, NaN", int(histogram[end:].sum())),
    ]
    return [bar for bar in bars if bar.count or bar.power is not None]


def _window(histogram: Histogram, most: int) -> tuple[int, int]:
    """The range from the first to the last entry that is not rare, or its heaviest part of `most` entries."""
    rare = min(RARE * histogram.sum(), histogram.max(initial=0))
    common = np.flatnonzero(histogram >= max(1, rare))
    if not common.size:
        return 0, 0
    first, last = int(common[0]), int(common[-1]) + 1
    if last - first > most:
        weight = np.convolve(histogram[first:last], np.ones(most, np.int64), "valid")
        first += int(weight.argmax())
        last = first + most
    return first, last


def sketch(counts: Counts, *, ascii_only: bool = False) -> list[str]:
    """The three histograms of one float format as lines of text, less than 80 columns wide."""
    fmt, bits, total = counts.fmt, counts.entropies, counts.numel
    plus, minus = map(int, counts.signs)
    lines = [headline(counts)]
    for title, needed, width, bars in (
        ("sign", bits.sign, 1, [Bar("+", plus), Bar("-", minus)]),
        ("exponent", bits.exponent, fmt.exponent_bits, exponent_bars(counts, 24)[::-1]),
    ):
        lines += ["", f"  {title}: {_of_bits(needed, width)}"]
        highest = max(1, *(bar.count for bar in bars))
        for bar in bars:
            drawn = _row(bar.count / highest, 54, ascii_only)
            lines.append(f" {bar.label:>12} {drawn:<54} {_percent(bar.count, total):>8}")
    lines += ["", f"  mantissa: {_of_bits(bits.mantissa, fmt.mantissa_bits, bits.joint is None)}"]
    parts = _significands(counts, 64)
    heights = np.repeat(parts / max(1, parts.max()), 64 // parts.size)
    lines += [f"{'':14}{line}".rstrip() for line in _columns(heights, 4, ascii_only)]
    lines.append(f"{'':14}{'1':<16}{'1.25':<16}{'1.5':<16}{'1.75':<16}2")
    return lines


def headline(counts: Counts) -> str:
    """The headline of a row of histograms."""
    return f"{counts.fmt.name}: {counts.numel:,} weights"


def summary(inspection: Inspection) -> str:
    """A sentence that sums up the histograms."""
    size = f"{inspection.nbytes:,} bytes"
    if inspection.bound_bytes is None or not inspection.nbytes:
        return size
    return f"{size}; coding the exponents leaves {100 * inspection.bound_bytes / inspection.nbytes:.2f} %"


def _of_bits(needed: float, width: int, bound: bool = False) -> str:
    return f"{'at most ' * bound}{needed:.2f} of {width} {'bit' if width == 1 else 'bits'}"


def _percent(count: int, total: int) -> str:
    share = 100 * count / total if total else 0.0
    return "< 0.01 %" if 0 < share < 0.005 else f"{share:.2f} %"


def _significands(counts: Counts, most: int) -> Histogram:
    """Weights by mantissa, neighbours put together until there are at most `most` bars."""
    mantissas = counts.mantissas
    return np.asarray(mantissas.reshape(min(most, mantissas.size), -1).sum(1))


def _row(share: float, width: int, ascii_only: bool) -> str:
    """A bar from left to right; what is not nothing is seen."""
    if ascii_only:
        return "#" * round(share * width) or ("." if share else "")
    whole, eighths = divmod(round(share * width * 8), 8)
    return _ACROSS[8] * whole + _ACROSS[eighths] or (_ACROSS[1] if share else "")


def _columns(shares: npt.NDArray[np.float64], height: int, ascii_only: bool) -> list[str]:
    """Bars from the bottom up, a column each, as lines from the top down."""
    steps = " .:#" if ascii_only else _UP
    full = len(steps) - 1
    filled = np.round(shares * height * full).astype(int)
    return [
        "".join(steps[min(max(n - line * full, 0), full)] for n in filled) for line in reversed(range(height))
    ]


def draw(inspection: Inspection, title: str) -> Figure:
    """The picture, a row of panels for each float format; without `title`, no head."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        return _draw(inspection, title)


def _draw(inspection: Inspection, title: str) -> Figure:
    from matplotlib.figure import Figure

    left, right = (0.04, 0.97) if title else (0.0, 0.99)
    panels = (
        (left, 0.13, _signs),
        (left + 0.195, 0.37, _exponents),
        (left + 0.625, right - left - 0.625, _mantissas),
    )
    head, row = (0.8 if title else 0.0), 3.3
    height = head + len(inspection.counts) * row
    figure = Figure(figsize=(11, height), facecolor="white")
    if title:
        for line, down, style in (
            (visible(title), 0.34, {"size": 15, "weight": "bold"}),
            (summary(inspection), 0.64, {"size": 10.5}),
        ):
            figure.text(left, 1 - down / height, line, color=INK, va="center", parse_math=False, **style)
    for number, counts in enumerate(inspection.counts):
        top = height - head - number * row
        figure.text(left, (top - 0.2) / height, headline(counts), size=10.5, color=MUTED, va="center")
        for start, width, panel in panels:
            axes = figure.add_axes((start, (top - row + 0.4) / height, width, (row - 1.3) / height))
            for side in axes.spines.values():
                side.set_visible(False)
            axes.tick_params(length=0, colors=MUTED, labelsize=9)
            axes.set_axisbelow(True)
            panel(axes, counts)
    return figure


def _head(axes: Axes, name: str, bits: str, color: str) -> None:
    axes.annotate(
        name, (0, 1), (0, 27), "axes fraction", "offset points", size=10, color=MUTED, annotation_clip=False
    )
    axes.annotate(
        bits, (0, 1), (0, 11), "axes fraction", "offset points",
        size=12.5, weight="bold", color=color, annotation_clip=False,
    )  # fmt: skip


def _scale(axes: Axes, highest: float) -> None:
    """Horizontal lines at round percentages."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(0, highest * 1.08 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
    axes.grid(axis="y", color=FAINT, linewidth=0.8)


def _signs(axes: Axes, counts: Counts) -> None:
    _head(axes, "Sign", _of_bits(counts.entropies.sign, 1), INK)
    shares = counts.signs / max(1, counts.numel)
    axes.bar([0, 1], shares, 0.72, color=OTHERS)
    for at, share in enumerate(shares):
        axes.annotate(
            f"{share:.1%}".replace("%", " %"), (at, share), (0, 3), textcoords="offset points",
            ha="center", size=9, color=INK,
        )  # fmt: skip
    axes.set_xticks([0, 1], ["+", "−"])
    axes.set_ylim(0, max(shares) * 1.12 or 1)
    axes.set_yticks([])


def _exponents(axes: Axes, counts: Counts) -> None:
    needed = _of_bits(counts.entropies.exponent, counts.fmt.exponent_bits)
    _head(axes, "Exponent (power of two)", needed, EXPONENT)
    bars = exponent_bars(counts, 40)
    shares = [bar.count / max(1, counts.numel) for bar in bars]
    places = _places(bars)
    axes.bar(places, shares, 0.84, color=EXPONENT)
    _scale(axes, max(shares, default=0))
    step = next(s for s in (1, 2, 4, 8) if len(bars) <= 10 * s)
    labels = [
        _END[bar.label.split()[0]] if bar.power is None
        else "" if bar.power % step
        else "2" + str(bar.power).translate(_RAISED)
        for bar in bars
    ]  # fmt: skip
    axes.set_xticks(places, labels)


def _places(bars: list[Bar]) -> list[float]:
    """The positions of bars, with a gap for the labels of those at the ends."""
    places: list[float] = []
    for at, bar in enumerate(bars):
        apart = at > 0 and (bar.power is None or bars[at - 1].power is None)
        places.append(places[-1] + 1 + apart * max(0.4, len(bars) / 11 - 0.5) if places else 0.0)
    return places


_END = {"0": "0", "0,": "≈ 0", "below": "less", "above": "more", "inf,": "inf,\nNaN"}

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _mantissas(axes: Axes, counts: Counts) -> None:
    bits = counts.entropies
    needed = _of_bits(bits.mantissa, counts.fmt.mantissa_bits, bits.joint is None)
    _head(axes, "Mantissa (1 to 2)", needed, INK)
    parts = _significands(counts, 128)
    shares = parts / max(1, counts.numel)
    edges = 1 + np.arange(parts.size + 1) / parts.size
    axes.stairs(shares, edges, fill=True, color=OTHERS)
    _scale(axes, float(shares.max()))
    axes.axhline(1 / parts.size, color=INK, linewidth=0.9, dashes=(4, 3))
    axes.annotate(
        "uniform", (2, 1 / parts.size), (-2, 4), textcoords="offset points", ha="right", size=8.5, color=INK
    )
    axes.set_xlim(1, 2)
    axes.set_xticks([1, 1.25, 1.5, 1.75, 2], ["1", "1.25", "1.5", "1.75", "2"])


def page(inspection: Inspection, title: str) -> bytes:
    """A web page with the picture, the totals and a table that can be sorted: one file that loads nothing."""
    import jinja2
    from markupsafe import Markup

    picture = svg(draw(inspection, ""), text_as_text=True).decode()
    picture = picture[picture.index("<svg") :]
    picture = re.sub(r' xmlns(:xlink)?="[^"]*"', "", picture, count=2)
    for color, name in ((INK, "ink"), (MUTED, "muted"), (FAINT, "faint"), (EXPONENT, "accent"),
                        (OTHERS, "bar"), ("#ffffff", "paper")):  # fmt: skip
        picture = picture.replace(color, f"var(--{name})")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = files("neuzip.eval.report").joinpath("inspect.html.j2").read_text(encoding="utf-8")
    text = environment.from_string(source).render(
        title=visible(title),
        inspection=inspection,
        rows=sum_up_experts(inspection.tensors),
        picture=Markup(picture),
        visible=visible,
    )
    return text.encode()


def check_target(path: Path, overwrite: bool, kinds: Sequence[str] = KINDS) -> None:
    """Raise NeuzipError unless a picture can be written to `path`: asked before the long work begins."""
    if path.suffix not in kinds:
        raise UsageError(
            f"{path}: {path.suffix or 'a name without a suffix'} is no kind of picture",
            f"choose a name that ends in {', '.join(kinds[:-1])} or {kinds[-1]}",
        )
    if path.is_dir():
        raise NeuzipError(f"{path}: is a folder", "give the name of a file in it")
    if path.exists() and not overwrite:
        raise WouldOverwrite(f"{path}: exists already", "choose another name, or give `overwrite=True`")
    require(f"{path}: a picture", "matplotlib", *(["jinja2"] if path.suffix == ".html" else []))
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be written: {os.strerror(error.errno or errno.EIO)}") from error


def write(inspection: Inspection, title: str, path: Path) -> None:
    """Write the picture, of the kind that the suffix of `path` names."""
    if path.suffix == ".html":
        data = page(inspection, title)
    else:
        data = (png if path.suffix == ".png" else svg)(draw(inspection, title))
    write_file(path, data)
