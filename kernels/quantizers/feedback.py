"""Error feedback: what rounding a column changes in products with typical inputs, later columns compensate.

GPTQ (arXiv 2210.17323): columns are rounded one after the other, and the error of each is spread over the
columns after it, by the upper Cholesky factor of the inverse of the inputs' products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

DAMPING = 0.01
"""Share of the mean of the diagonal that is added to it: X^T X of inputs never seen is singular."""

BLOCK = 128
"""Columns whose errors are spread over all later ones at once."""

Ahead = Callable[[int], Tensor]
"""ahead(n): columns j to j + n, [n, out], as they are by now."""

QuantizeColumn = Callable[[int, Tensor, Ahead], Tensor]
"""quantize(j, column, ahead): the values [out] that column j, [out], is rounded to."""

RoundColumns = Callable[[slice], Tensor]
"""round_columns(block): rounds the columns of a block, and gives their errors [n, out], each by its pivot."""


def damped(gram: Tensor, damping: float = DAMPING) -> Tensor:
    """X^T X of the inputs, [in, in], damped so that it can be inverted."""
    mean = gram.diagonal().mean() if gram.numel() else gram.sum()
    return gram + (damping * mean + torch.finfo(gram.dtype).tiny) * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )


def spread(energy: Tensor) -> Tensor:
    """How errors are spread: that of column j by row j of the upper Cholesky factor of the inverse, [in, in].

    energy  [in, in], damped X^T X of the inputs, positive definite
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(energy))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.contiguous()


def feed_back(w: Tensor, spread: Tensor, quantize: QuantizeColumn) -> None:
    """Round columns in order, each with the errors of those before it.

    w       [in, out], the weights, a column a row; overwritten
    spread  [in, in], of `spread`
    """

    def round_columns(block: slice) -> Tensor:
        start, stop = block.start, block.stop
        errors = torch.zeros_like(w[block])
        for j in range(start, stop):
            ahead = partial(_ahead, w, spread, errors, start, stop, j)
            errors[j - start] = (w[j] - quantize(j, w[j], ahead)) / spread[j, j]
            w[j:stop] -= torch.outer(spread[j, j:stop], errors[j - start])
        return errors

    feed_back_blocks(w, spread, round_columns)


def feed_back_blocks(w: Tensor, spread: Tensor, round_columns: RoundColumns) -> None:
    """Round blocks of columns in order, each with the errors of those before it; as `feed_back`."""
    for start in range(0, len(w), BLOCK):
        block = slice(start, min(start + BLOCK, len(w)))
        errors = round_columns(block)
        w[block.stop :] -= spread[block, block.stop :].T @ errors


def _ahead(w: Tensor, spread: Tensor, errors: Tensor, start: int, stop: int, j: int, count: int) -> Tensor:
    """Columns j to j + count; errors of the block, `start` to `stop`, have not reached those after it yet."""
    part = w[j : j + count].clone()
    part[stop - j :] -= spread[start:stop, stop : j + count].T @ errors
    return part
