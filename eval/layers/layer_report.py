"""What is measured of each layer, and how well cheap metrics predict the divergence without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuzip.eval.layers.distances import Matrix
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate


@dataclass(frozen=True)
class LayerReport:
    """A layer, and what it is worth. `without` is the model without it, None where that is not finite.

    `angular_distance` is at last tokens. `gradient_norm` is None where none was asked for.
    """

    number: int
    parameters: int
    block_influence: Estimate
    angular_distance: Estimate
    angular_distance_all_tokens: Estimate
    gradient_norm: Estimate | None
    without: Comparison | None

    @property
    def kld(self) -> float:
        """The divergence of the model without it, in nats a token; infinite where it is not finite."""
        return math.inf if self.without is None else self.without.kld.mean.value


def rank_correlations(layers: Sequence[LayerReport]) -> dict[str, float | None]:
    """Spearman's rank correlation of each metric with the divergence of the model without the layer."""
    klds = [layer.kld for layer in layers]
    metrics: dict[str, list[float]] = {
        "angular_distance": [layer.angular_distance.value for layer in layers],
        "angular_distance_all_tokens": [layer.angular_distance_all_tokens.value for layer in layers],
        "block_influence": [layer.block_influence.value for layer in layers],
        "depth": [-layer.number for layer in layers],
    }
    norms = [layer.gradient_norm.value for layer in layers if layer.gradient_norm is not None]
    if len(norms) == len(layers):
        metrics["gradient_norm"] = norms
    return {name: spearman(values, klds) for name, values in sorted(metrics.items())}


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share the mean of their ranks. None if either is constant.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / spread if spread else None


def _ranks(values: Sequence[float]) -> Matrix:
    _, place, count = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Matrix = (last - (count - 1) / 2)[place]
    return ranks
