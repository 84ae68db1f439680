"""Factors of rows and columns by the spread of their weights, for rounding to nearest."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import cpu
from .reference import factor_bytes

Sums = npt.NDArray[np.float64]


class Spread:
    """Sums of squares of the rows and columns of a tensor of `numel` weights, `columns` in a row.

    The weights are added in pieces, in their order. So sums have the same bits on every machine.
    """

    def __init__(self, numel: int, columns: int) -> None:
        self._rows: Sums = np.zeros(numel // columns)
        self._columns: Sums = np.zeros(columns)
        self._next = 0

    def add(self, values: Sums) -> None:
        """Add the next weights, as fp64."""
        cpu.add_squares(values, self._next, self._rows, self._columns)
        self._next += values.size

    @property
    def row_factors(self) -> Tensor:
        """Factor bytes (uint8 [R]): of the square root of a row's rms, divided by the tensor's."""
        return self._factors(self._rows, self._columns.size)

    @property
    def column_factors(self) -> Tensor:
        """Factor bytes (uint8 [C]): of the square root of a column's rms, divided by the tensor's."""
        return self._factors(self._columns, self._rows.size)

    def _factors(self, sums: Sums, count: int) -> Tensor:
        """Those of `sums` of `count` weights each; of a tensor of zeros, or with sums too large, all 1."""
        mean = math.fsum(self._rows) / (self._rows.size * self._columns.size)
        if not 0 < mean < math.inf:
            return factor_bytes(torch.ones(sums.size))
        return factor_bytes(torch.from_numpy(np.sqrt(np.sqrt(sums / count / mean))))
