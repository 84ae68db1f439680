"""The distribution of divergences over tokens, in a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOWEST, HIGHEST = -12, 2
"""Powers of ten between which divergences are counted."""

BINS = 5
"""Counters per power of ten."""

QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "99.9 %": 0.999}


@dataclass(frozen=True)
class Distribution:
    """The distribution of the divergences of `tokens` tokens, in nats.

    `counts` are those from 10**LOWEST to 10**HIGHEST in steps of 10**(1 / BINS); `zero` is how many are
    exactly 0, `below` and `above` lie outside, `not_finite` are infinite or no number. `quantiles` are over
    all that are finite.
    """

    tokens: int
    zero: int
    below: int
    counts: tuple[int, ...]
    above: int
    not_finite: int
    quantiles: Mapping[str, float]
    largest: float


def distribution(divergences: npt.ArrayLike) -> Distribution:
    """Count the divergences of single tokens, in nats. What rounding made negative counts as `below`."""
    values = np.asarray(divergences, np.float64).ravel()
    finite = values[np.isfinite(values)]
    edges = 10.0 ** (LOWEST + np.arange((HIGHEST - LOWEST) * BINS + 1) / BINS)
    inside = finite[(finite >= edges[0]) & (finite < edges[-1])]
    at = np.searchsorted(edges, inside, "right") - 1
    quantiles = np.quantile(finite, list(QUANTILES.values())).tolist() if finite.size else []
    return Distribution(
        tokens=values.size,
        zero=int((finite == 0).sum()),
        below=int(((finite < edges[0]) & (finite != 0)).sum()),
        counts=tuple(np.bincount(at, minlength=edges.size - 1).tolist()),
        above=int((finite >= edges[-1]).sum()),
        not_finite=values.size - finite.size,
        quantiles=dict(zip(QUANTILES, quantiles, strict=False)),
        largest=float(finite.max()) if finite.size else math.nan,
    )
