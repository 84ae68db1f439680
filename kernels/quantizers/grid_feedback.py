"""Codes on a grid for what comes in: they keep products with typical inputs, not weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuzip.kernels.grid import MAX_CODE, MIN_CODE, Grid

from .feedback import DAMPING, Ahead, damped, feed_back, feed_back_blocks, spread

ROWS = 2048
"""Rows that a CPU rounds at a time, so that a block of their columns stays in its caches."""


@dataclass(frozen=True, eq=False)
class ErrorSpread:
    """How errors of columns are compensated, for inputs of some kind.

    order   int64 [in], the columns as they are rounded: by falling energy of their inputs
    spread  fp32 [in, in], in that order: the upper Cholesky factor of the inverse of X^T X
    """

    order: Tensor
    spread: Tensor

    @classmethod
    def of(cls, gram: Tensor, damping: float = DAMPING) -> ErrorSpread:
        """From X^T X of the inputs, [in, in]; computed in fp64."""
        order = gram.diagonal().argsort(descending=True, stable=True)
        return cls(order, spread(damped(gram[order][:, order].double(), damping)).float())

    def pivots(self) -> Tensor:
        """What an error in each column costs after compensation, fp32 [in], in the units of X^T X."""
        pivots = torch.empty_like(self.spread[0])
        pivots[self.order] = self.spread.diagonal().square().reciprocal()
        return pivots

    def to(self, device: torch.device) -> ErrorSpread:
        """On another device."""
        return ErrorSpread(self.order.to(device), self.spread.to(device))


def grid_feedback(weight: Tensor, grid: Grid, errors: ErrorSpread, dtype: torch.dtype) -> Tensor:
    """Codes, int16 [out, in], whose values times inputs X are near to the products of the weights.

    weight  fp32 [out, in], finite
    grid    steps of the weights
    errors  on the device of the weights
    dtype   that of the values, whose rounding is part of the errors

    fp32. Codes beyond 16 bits are clamped. A GPU rounds all rows at once, with a kernel for each block of
    columns.
    """
    codes = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
    if weight.is_cuda:
        codes.T[errors.order] = codes_of_all_rows(weight, grid, errors, dtype)
        return codes
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        part = grid if grid.rows is None else replace(grid, rows=grid.rows[rows])
        codes.T[errors.order, rows] = codes_by_column(weight[rows], part, errors, dtype)
    return codes


def codes_by_column(weight: Tensor, grid: Grid, errors: ErrorSpread, dtype: torch.dtype) -> Tensor:
    """The codes of `grid_feedback`, [in, out] in the order of `errors`, column by column in torch."""
    w = weight.T[errors.order].contiguous()
    steps = grid.steps(weight.shape, weight.device).T[errors.order]
    codes = torch.empty_like(w, dtype=torch.int16)

    def quantize(j: int, column: Tensor, ahead: Ahead) -> Tensor:
        code = (column / steps[j]).round_().clamp_(MIN_CODE, MAX_CODE)
        codes[j] = code
        return code.mul_(steps[j]).to(dtype).to(column.dtype)

    feed_back(w, errors.spread, quantize)
    return codes


def codes_of_all_rows(weight: Tensor, grid: Grid, errors: ErrorSpread, dtype: torch.dtype) -> Tensor:
    """The codes of `codes_by_column`, with a launch for each block of columns. Needs Triton."""
    from .triton.feedback import round_block

    w = weight.T[errors.order].contiguous()
    steps = grid.steps(weight.shape, weight.device).T
    if grid.columns is not None:
        steps = steps[errors.order]
    codes = torch.empty_like(w, dtype=torch.int16)

    def round_columns(block: slice) -> Tensor:
        of_block = torch.empty_like(w[block])
        part = steps[block], errors.spread[block, block], codes[block], of_block
        round_block(w[block], *part, dtype)
        return of_block

    feed_back_blocks(w, errors.spread, round_columns)
    return codes
