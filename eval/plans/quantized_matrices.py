"""The matrices of a checkpoint that a target quantises, and the rules that store their codes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from neuzip.compress import Plan
from neuzip.compress.rules import Rule, Scheme
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.eval.plans.reach import FixedBytes, before_lossless
from neuzip.eval.plans.tensor_groups import exact_glob, find_matrices
from neuzip.kernels.grid import Grid

FINEST = 2.0**-16
"""Share of the coarsest step below which no step is tried."""

PRECISE = 1e-4
"""Relative difference of two steps at which a bisection ends."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrices:
    """The matrices of floats of a checkpoint that a plan leaves lossless.

    tensors   without those that are stored as another one
    aliases   by the name of a tensor, the names of those that are stored as it
    fixed     predicted bytes of the weight files without the matrices
    lossless  predicted bytes of the weight files if nothing is quantised
    """

    source: FolderSource
    tensors: tuple[SourceTensor, ...]
    aliases: Mapping[str, Sequence[str]]
    fixed: int
    lossless: int

    @classmethod
    def of(cls, source: FolderSource, plan: Plan) -> QuantizedMatrices:
        """The matrices that a plan with predictions leaves lossless. Raises NeuzipError if there are none."""
        matrices = find_matrices(source, plan)
        aliases: dict[str, list[str]] = defaultdict(list)
        for t in matrices:
            if t.alias_of is not None:
                aliases[t.alias_of.name].append(t.tensor.name)
        fixed = FixedBytes.of(source, plan, {t.tensor.name for t in matrices}).total
        tensors = tuple(t.tensor for t in matrices if t.alias_of is None)
        return cls(source, tensors, aliases, fixed, fixed + sum(t.predicted or 0 for t in matrices))

    @property
    def count(self) -> int:
        """Number of tensors, those included that are stored as another one."""
        return len(self.tensors) + sum(map(len, self.aliases.values()))

    @property
    def weights(self) -> int:
        """Number of weights of the tensors."""
        return sum(tensor.info.numel for tensor in self.tensors)

    def rules(self, grids: Mapping[str, Grid], rules: Iterable[Rule]) -> tuple[Rule, ...]:
        """Rules that quantise the tensors with grids, before the first of `rules` that says lossless."""
        quantised = [
            Rule(exact_glob(name), _scheme(grid), min_dimensions=2)
            for holder, grid in grids.items()
            for name in (holder, *self.aliases.get(holder, ()))
        ]
        return before_lossless(tuple(rules), quantised)


def _scheme(grid: Grid) -> Scheme:
    return Scheme(
        "quantized",
        step=grid.step,
        row_factors=grid.rows is not None,
        column_factors=grid.columns is not None,
    )


def step_within(nbytes: float, expected_bytes: Callable[[float], float], largest: float) -> float:
    """The finest mean step that is expected to take at most `nbytes`, or `largest` if none does."""
    low, high = largest * FINEST, largest
    while high > low * (1 + PRECISE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected_bytes(middle) > nbytes else (low, middle)
    return high
