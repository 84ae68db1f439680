"""Colours of figures, and figures as bytes of SVG and PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal
from warnings import catch_warnings, filterwarnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
"""Dots per inch of PNG files."""

INK, MUTED, FAINT = "#1c2733", "#667380", "#dfe4e8"
"""Colours of text, of secondary text and of grid lines."""

EXPONENT, OTHERS = "#d55e00", "#4f7fae"
"""Two colours that people with any kind of colour vision tell apart."""


def plain_axes(
    figure: Figure,
    box: tuple[float, float, float, float],
    title: str,
    grid: Literal["both", "x", "y"] = "both",
) -> Axes:
    """Axes without a frame in a box of the figure (left, foot, width, height), with faint lines of a grid."""
    axes = figure.add_axes(box)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)
    axes.grid(axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", size=10.5, color=INK, pad=10)
    return axes


def png(figure: Figure) -> bytes:
    """A figure as a PNG file, equal bytes for equal figures."""
    return _saved(figure, "png", {"Software": None})


def svg(figure: Figure, *, text_as_text: bool = False) -> bytes:
    """A figure as an SVG file, equal bytes for equal figures. Text becomes outlines unless `text_as_text`."""
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    return _saved(figure, "svg", nothing, "none" if text_as_text else "path")


def _saved(figure: Figure, kind: str, metadata: dict[str, None], fonttype: str = "path") -> bytes:
    from matplotlib import style

    target = io.BytesIO()
    settings = {"svg.hashsalt": "neuzip", "svg.fonttype": fonttype}
    with style.context(["default", settings]), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # a title may be in any script
        figure.savefig(target, format=kind, dpi=DPI, metadata=metadata)
    return target.getvalue()
