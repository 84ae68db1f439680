"""The check of decoding and of products at their first use on a device, against the reference on the CPU.

The first tile, 16 rows, goes to the CPU. So a check takes a few milliseconds and no kernel beyond those of
the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from neuzip.kernels.device.first_use import check_first_use
from neuzip.kernels.grid_linear import reference
from neuzip.kernels.grid_linear.escapes import turn_count
from neuzip.kernels.grid_linear.form import TILE_ROWS
from neuzip.kernels.grid_linear.tensor import GridTensor

DECODING = "decoding packed codes"
PRODUCTS = "multiplying with packed codes"

SUM_ERROR = 2.0**-16
"""The most that a product may be off, as a share of the sum of the absolute values of its terms.

The rounding of the result to its dtype comes on top.
"""

Multiply = Callable[[torch.Tensor, GridTensor, torch.Tensor | None], torch.Tensor | None]


def check_decoding(dense: torch.Tensor, packed: GridTensor, start: int) -> None:
    """Raise WrongResults if `dense`, rows from `start` on, is the first that was decoded, and is wrong."""
    if dense.numel() and start < TILE_ROWS:
        check_first_use(DECODING, packed.device, partial(_is_same, dense, packed, start))


def check_product(x: torch.Tensor, packed: GridTensor, bias: torch.Tensor | None, multiply: Multiply) -> None:
    """Raise WrongResults if this is the first product on its device, and is wrong for an x of that shape."""
    check_first_use(PRODUCTS, packed.device, partial(_multiplies, x, packed, bias, multiply))


def _is_same(dense: torch.Tensor, packed: GridTensor, start: int) -> bool:
    """Whether rows from `start` on are those packed, bit for bit, as far as the first tile goes."""
    exact = reference.decode(_first_tile(packed))[start : start + len(dense)]
    return torch.equal(dense[: len(exact)].detach().cpu().view(torch.int16), exact.view(torch.int16))


def _multiplies(x: torch.Tensor, packed: GridTensor, bias: torch.Tensor | None, multiply: Multiply) -> bool:
    """Whether the first values of a product with a known x, of the shape of `x`, are within the error bound.

    `multiply` computes products from the packed form for that shape.
    """
    columns = packed.shape[1]
    row = (torch.arange(columns) * 7919 % 12 - 5.5) / 8  # exact in both dtypes, and never 0
    y = multiply(row.to(packed.device, packed.dtype).expand(x.shape).contiguous(), packed, bias)
    assert y is not None
    terms = reference.decode(_first_tile(packed)).double() * row.double()
    values = y.view(-1, packed.shape[0])[[0, -1], : len(terms)].double().cpu()
    exact = terms.sum(1)
    if bias is not None:
        exact = exact + bias[: len(exact)].double().cpu()
    numbers = torch.finfo(packed.dtype)
    rounding = exact.abs().clamp_min(numbers.tiny) * numbers.eps / 2
    bound = terms.abs().sum(1) * SUM_ERROR + rounding + columns * torch.finfo(torch.float32).tiny
    known = exact.abs() < numbers.max / 2
    return bool(((values - exact).abs() <= bound)[:, known].all())


def _first_tile(packed: GridTensor) -> GridTensor:
    """The first 16 rows by themselves, on the CPU."""
    out, columns = packed.shape
    starts = packed.unit_start[: turn_count(columns) + 1].cpu()
    return replace(
        packed,
        shape=(min(out, TILE_ROWS), columns),
        words=packed.words[:1].cpu(),
        row_steps=packed.row_steps[:TILE_ROWS].cpu(),
        row_terms=packed.row_terms[:TILE_ROWS].cpu(),
        column_factors=packed.column_factors.cpu(),
        unit_start=starts,
        escapes=packed.escapes[: int(starts[-1])].cpu(),
    )
