"""Names next to the points of a plot, placed so that they cover neither points nor each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from neuzip.eval.figure_files import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

Point = tuple[float, float]

DIRECTIONS = ((0, 1), (1, 0), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Where a name may stand: to the right and above are positive."""

DISTANCES = (6, 14, 24, 36, 50)
"""Points of 1/72 inch between a marker and its name; far names get a line."""

MARKER = 4
"""Half the width of a marker in points of 1/72 inch."""


STEPS = 24
"""Places along each piece of a line that names keep away from."""


def write_labels(
    axes: Axes, texts: Mapping[Point, str], points: Sequence[Point], lines: Sequence[Sequence[Point]]
) -> None:
    """Write each text near its place, off `points` and off `lines` through some of them.

    All places are in data coordinates. Axes must have their scales.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure()
    assert figure is not None
    pixels = figure.dpi / 72
    axes.autoscale_view()
    half = MARKER * pixels
    taken = [
        Bbox.from_extents(x - half, y - half, x + half, y + half)
        for x, y in axes.transData.transform(list(points))
    ]
    pieces = chain(*(pairwise(axes.transData.transform(list(line))) for line in lines))
    for (x0, y0), (x1, y1) in pieces:
        for part in (i / STEPS for i in range(STEPS + 1)):
            x, y = x0 + part * (x1 - x0), y0 + part * (y1 - y0)
            taken.append(Bbox.from_extents(x - pixels, y - pixels, x + pixels, y + pixels))
    frame = axes.get_window_extent().padded(10 * pixels)
    for point, text in texts.items():
        best: tuple[float, Bbox, tuple[int, int], int] | None = None
        for distance in DISTANCES:
            for direction in DIRECTIONS:
                box = _box(axes, point, text, direction, distance * pixels)
                cost = sum(_overlap(box, other) for other in taken) + _outside(box, frame)
                if best is None or cost < best[0]:
                    best = cost, box, direction, distance
            if best is not None and best[0] == 0:
                break
        assert best is not None
        taken.append(best[1])
        _write(axes, point, text, best[2], best[3])


def _offset(direction: tuple[int, int], distance: float) -> tuple[float, float]:
    shorter = 0.7 if 0 not in direction else 1.0
    return direction[0] * distance * shorter, direction[1] * distance * shorter


def _box(axes: Axes, point: Point, text: str, direction: tuple[int, int], distance: float) -> Bbox:
    """About what a text covers, in pixels: drawing it first would take far longer."""
    from matplotlib.transforms import Bbox

    figure = axes.get_figure()
    assert figure is not None
    pixels = figure.dpi / 72
    width, height = 5.0 * len(text) * pixels, 9 * pixels
    dx, dy = _offset(direction, distance)
    x, y = axes.transData.transform(point)
    left = x + dx - width * (1 - direction[0]) / 2
    foot = y + dy - height * (1 - direction[1]) / 2
    return Bbox.from_bounds(left, foot, width, height)


def _overlap(a: Bbox, b: Bbox) -> float:
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Bbox, frame: Bbox) -> float:
    return box.width * box.height - _overlap(box, frame)


def _write(axes: Axes, point: Point, text: str, direction: tuple[int, int], distance: int) -> None:
    far = distance > DISTANCES[0]
    axes.annotate(
        text, point, _offset(direction, distance), textcoords="offset points", size=8.5, color=INK, zorder=4,
        ha=("right", "center", "left")[direction[0] + 1], va=("top", "center", "bottom")[direction[1] + 1],
        parse_math=False,
        arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkB": 4} if far else None,
    )  # fmt: skip
