"""What products with packed weights are measured for: shapes, numbers of rows, targets of groups of rows.

Nothing here needs torch: the pages of results read it as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Shape = tuple[int, int]

SHAPES: tuple[Shape, ...] = (
    (4096, 4096), (14336, 4096), (4096, 14336), (5120, 13824), (18944, 3584), (3584, 18944), (28672, 4096),
    (6144, 4096), (5120, 5120), (2560, 2560), (128256, 4096),
)  # fmt: skip
"""Rows and columns of the weights, out x in: those of models from 4B to 70B parameters."""

LAW_NAMES = {"gaussian": "N(0, 0.02)", "trained-like": "trained-like"}
"""Laws of weights as results have them, and as a reader knows them."""


@dataclass(frozen=True)
class Group:
    """Numbers of rows of x that share targets: times cuBLAS, the least and the mean over all shapes."""

    name: str
    rows: tuple[int, ...]
    least: float
    mean: float
    stretch: float


GROUPS = (
    Group("1", (1,), 1.15, 1.35, 1.45),
    Group("2 to 16", (2, 4, 8, 16), 1.0, 1.18, 1.3),
    Group("32, 64", (32, 64), 0.95, 1.05, 1.2),
    Group("128, 256", (128, 256), 0.9, 1.0, 1.15),
    Group("512, 1,024", (512, 1024), 0.9, 0.95, 1.02),
    Group("2,048, 4,096", (2048, 4096), 0.92, 0.96, 1.0),
)

ROWS = tuple(rows for group in GROUPS for rows in group.rows)


@dataclass(frozen=True)
class GroupFigures:
    """Speeds of a group with weights of one law, times cuBLAS, and the shape and rows of the least.

    `missing` counts the cases of the group that were not measured: with any, no target is met.
    """

    group: Group
    law: str
    least: float
    least_case: str
    mean: float
    missing: int

    @property
    def least_met(self) -> bool:
        """Whether every case was measured and none is below its target."""
        return not self.missing and self.least >= self.group.least

    @property
    def mean_met(self) -> bool:
        """Whether every case was measured and their mean reaches its target."""
        return not self.missing and self.mean >= self.group.mean

    @property
    def stretched(self) -> bool:
        """Whether every case was measured and their mean reaches the stretch target."""
        return not self.missing and self.mean >= self.group.stretch


def group_of(rows: int) -> Group:
    """The group that so many rows of x belong to."""
    return next(group for group in GROUPS if rows in group.rows)


def lossless(results: Sequence[Row]) -> list[Row]:
    """Results of weights that keep all mantissa bits. Raises ValueError for results without a law."""
    if any("law" not in row for row in results):
        raise ValueError(
            "benchmarks/results/packed_linear.json has a layout without laws of weights; "
            "measure it again with benchmarks/packed_linear.py"
        )
    return [row for row in results if row["kept"] == 7]


def group_figures(results: Sequence[Row]) -> list[GroupFigures]:
    """Figures of every group and law of which something was measured, on the shapes of SHAPES."""
    figures = []
    plain = [row for row in lossless(results) if (row["out"], row["in"]) in SHAPES]
    for law in LAW_NAMES:
        for group in GROUPS:
            cases = [row for row in plain if row["law"] == law and row["rows"] in group.rows]
            if not cases:
                continue
            worst = min(cases, key=lambda row: row["speedup"])
            name = f"{worst['out']} x {worst['in']}, {worst['rows']:,} row{'s' * (worst['rows'] > 1)}"
            mean = statistics.fmean(row["speedup"] for row in cases)
            missing = len(SHAPES) * len(group.rows) - len(cases)
            figures.append(GroupFigures(group, law, worst["speedup"], name, mean, missing))
    return figures
