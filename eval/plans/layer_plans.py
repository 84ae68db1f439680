"""Predictions of plans without some layers."""

from __future__ import annotations

import math
from typing import Literal

from neuzip.eval.layers.drops import Drops, pays_from
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.plans.allocation import Option, OverBudget, allocate
from neuzip.eval.plans.plan_trials import Planner
from neuzip.eval.plans.search import upper
from neuzip.eval.plans.target_values import value_of


class LayerPredictions:
    """Predicts plans without some layers, from the sums of single tensors.

    A group of tensors goes with a layer if all of them are the layer's.
    """

    def __init__(self, whole: Planner, layers: dict[str, int]) -> None:
        self._target, self._sensitivity, self._fixed = whole.request.target, whole.sensitivity, whole.fixed
        self._layers = layers

    def __call__(self, dropped: tuple[int, ...], comparison: Comparison | None) -> float:
        """Bytes of a plan of the target quality, or divergence of one of the target size; infinite beyond it.

        comparison  the model without the dropped layers beside the whole one, None if none is dropped
        """
        if not self._target.limits_size:
            cost = 0.0 if comparison is None else upper(value_of(self._target.kind, comparison))
            return self._bytes(dropped, self._target.limit, cost)
        kld = 0.0 if comparison is None else comparison.kld.mean.value
        options, fixed = self._left("bytes", dropped)
        try:
            return kld + allocate(options, self._target.limit - fixed).cost
        except OverBudget:
            return math.inf

    def pays_from(self, drops: Drops) -> float | None:
        """The limit from which the first layer that was not dropped is predicted to pay."""
        least = drops.rejected
        if self._target.limits_size or least is None or least.comparison is None:
            return None
        cost = max(0.0, upper(value_of(self._target.kind, least.comparison)))
        coarsest = math.fsum(max(values) for values in self._sensitivity.divergences)
        return pays_from(
            lambda limit: self._bytes((), limit, 0.0),
            lambda limit: self._bytes(least.layers, limit, cost),
            self._target.limit,
            cost + coarsest,
        )

    def _bytes(self, dropped: tuple[int, ...], limit: float, cost: float) -> float:
        """Bytes of the weight files within a limit of quality, of which dropping layers uses up `cost`."""
        if cost > limit:
            return math.inf
        options, fixed = self._left("divergence", dropped)
        return fixed + allocate(options, limit - max(0.0, cost)).cost

    def _left(
        self, by: Literal["bytes", "divergence"], dropped: tuple[int, ...]
    ) -> tuple[list[list[Option]], int]:
        """The options of the remaining groups, and the bytes of everything else."""
        gone = {name for name, layer in self._layers.items() if layer in dropped}
        groups = zip(self._sensitivity.candidates, self._sensitivity.options(by), strict=True)
        left = [options for c, options in groups if not gone.issuperset(t.name for t in c.group.tensors)]
        return left, self._fixed.without(gone)
