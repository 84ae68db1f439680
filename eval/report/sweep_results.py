"""The results of `neuzip sweep` in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuzip.errors import FormatError, NeuzipError, shell
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.plans.allocation import Option, pareto_front
from neuzip.formats.safetensors_file import parse_json

SWEEP_DEPENDS_ON = {
    "checkpoint": "checkpoint",
    "text": "text",
    "rule": "windows",
    "tokens": "number of tokens",
}
"""Conditions that must be equal to compare figures: their names in rows of a sweep, and in words."""


@dataclass(frozen=True)
class SweepPoint:
    """A scheme or yardstick of a sweep: bits per weight, stored bytes, mean divergence and perplexity.

    `kind` is that of `SweepRow`.
    """

    scheme: str
    kind: str
    bits_per_weight: float
    nbytes: int
    kld: Estimate
    perplexity: Estimate


@dataclass(frozen=True)
class SweepResults:
    """The points of a sweep, by size, and what all of them were measured with."""

    points: tuple[SweepPoint, ...]
    depends_on: Mapping[str, Any]

    def differing(self, others: Mapping[str, Any]) -> tuple[str, ...]:
        """The conditions of the sweep that differ from `others`, in words."""
        return differing(others, {name: self.depends_on.get(name) for name in others})


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """The conditions of a sweep that differ between `a` and `b`, in words."""
    others = fingerprint.differing(a, b)
    return tuple(words for name, words in SWEEP_DEPENDS_ON.items() if name in others)


def read_sweep(folder: Path) -> SweepResults:
    """Read a folder of `neuzip sweep --output`. Raises NeuzipError for another one, or several sweeps."""
    from neuzip.eval.sweep.rows import SweepRow

    points = []
    first: tuple[Path, Mapping[str, Any]] | None = None
    for path in sorted(folder.glob("*.json")):
        try:
            row = SweepRow.from_json(parse_json(path.read_bytes(), path))
            first = first or (path, row.depends_on)
            others = differing(first[1], row.depends_on)
        except (AttributeError, KeyError, TypeError) as error:
            raise FormatError(
                path, "is no result of neuzip sweep", hint="give the folder that it wrote"
            ) from error
        if others:
            raise NeuzipError(
                f"{path}: was measured with another {' and another '.join(others)} than {first[0].name}",
                "give a folder with the results of one sweep only",
            )
        kld = row.comparison.kld.mean
        points.append(SweepPoint(row.scheme, row.kind, row.bits_per_weight, row.bytes, kld, row.perplexity))
    if first is None:
        raise NeuzipError(
            f"{folder}: holds no results of neuzip sweep",
            f"first: {shell('neuzip', 'sweep', 'SRC', '--output', folder)}",
        )
    return SweepResults(tuple(sorted(points, key=lambda p: (-p.bits_per_weight, p.scheme))), first[1])


def pareto(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The points that no other beats in both size and mean divergence, the smallest first."""
    return [points[i] for i in pareto_front([Option(p.bits_per_weight, p.kld.value) for p in points])]
