"""Colours of figures, and figures as bytes of SVG and PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
"""Dots per inch of PNG files."""

INK, MUTED, FAINT = "#1c2733", "#667380", "#dfe4e8"
"""Colours of text, of secondary text and of grid lines."""

EXPONENT, OTHERS = "#d55e00", "#4f7fae"
"""Two colours that people with any kind of colour vision tell apart."""


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
