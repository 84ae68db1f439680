"""Packed weights of a uniform grid as torch knows them: the operators `neuzip::grid_*`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from neuzip.kernels.device.first_use import is_checked
from neuzip.kernels.device.products import (
    fitting,
    is_usual,
    multiply_decoded,
    needs_operator,
    on_gpu,
    require_room,
    rows_of,
)
from neuzip.kernels.device.weight_operators import WeightOperators
from neuzip.kernels.grid_linear import first_use, reference
from neuzip.kernels.grid_linear.form import TILE_ROWS
from neuzip.kernels.grid_linear.tensor import ARRAYS, GridTensor

__all__ = ["FEW_ROWS", "compile_products", "compile_rows", "decode", "is_usual", "linear", "product", "rows"]

FEW_ROWS = 64
"""Rows of x that are multiplied from the packed form, at most; with more, weights are decoded first."""


def decode(packed: GridTensor, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
    """The weights that were packed, bit for bit: all rows, or those of a slice without a step, [rows, in].

    They go to `out` where that is given: contiguous, of that shape, dtype and device, else ValueError.
    """
    rows = rows or slice(None)
    start, stop = rows_of(rows.start, rows.stop, rows.step, packed.shape[0])
    if out is None:
        return torch.ops.neuzip.grid_decode(start, stop, *packed.arguments)  # type: ignore[no-any-return]
    require_room(out, stop - start, packed)
    torch.ops.neuzip.grid_decode_into(out, start, *packed.arguments)
    return out


def rows(packed: GridTensor, ids: Tensor) -> Tensor:
    """The rows that `ids`, int32 or int64 of any shape, name: [*ids.shape, in]. Only those are decoded.

    A row that there is not raises IndexError on a CPU, and is NaNs on a GPU, where nobody waits for ids.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids of rows are int32 or int64, not {ids.dtype}")
    return torch.ops.neuzip.grid_rows(ids, *packed.arguments)  # type: ignore[no-any-return]


def linear(x: Tensor, packed: GridTensor, bias: Tensor | None = None) -> Tensor:
    """x @ weights.T + bias, [..., in] to [..., out], with fp32 sums. Gradients flow to x and bias.

    All three have one dtype, else TypeError; under autocast x and bias are cast to that of the weights.
    Raises ValueError for shapes and devices that do not go together.
    """
    if is_usual(x, packed, bias):
        return product(x, packed, bias)
    x, bias = fitting(x, packed, bias)
    if needs_operator(x, packed.words, bias):
        return torch.ops.neuzip.grid_linear(x, bias, *packed.arguments)  # type: ignore[no-any-return]
    return product(x, packed, bias)


def product(x: Tensor, packed: GridTensor, bias: Tensor | None) -> Tensor:
    """x @ weights.T + bias where `is_usual`: up to 64 rows of x from the packed form, else decoded."""
    out, columns = packed.shape
    y = None
    if x.numel() and on_gpu(packed.words):
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        y = _multiply_packed(x, packed, bias)
        if y is not None and not is_checked(first_use.PRODUCTS, packed.device):
            first_use.check_product(x, packed, bias, _multiply_packed)
    if y is None:
        flat = x.reshape(math.prod(x.shape[:-1]), columns)
        y = multiply_decoded(
            flat, out, bias, lambda dense, start: _decode_to(dense, packed, start), TILE_ROWS
        )
    if y.dim() == x.dim():
        return y
    # Not as a view: one that is made without gradients cannot be written to with them.
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], out))  # type: ignore[no-any-return]


def compile_products(packed: GridTensor, rows: int, bias: bool = False) -> None:
    """Compile what `linear` launches for some rows of x and weights like `packed`, for the current GPU.

    `packed` has no values: it is on the meta device.
    """
    out, columns = packed.shape
    x = torch.empty(rows, columns, dtype=packed.dtype, device="meta")
    added = torch.empty(out, dtype=packed.dtype, device="meta") if bias else None
    if _multiply_packed(x, packed, added) is None:
        dense = torch.empty(out, columns, dtype=packed.dtype, device="meta")
        _triton_decode().decode(packed, 0, dense)


def compile_rows(packed: GridTensor) -> None:
    """Compile what `rows` launches for weights like `packed`, on the meta device, for the current GPU."""
    dense = torch.empty(1, packed.shape[1], dtype=packed.dtype, device="meta")
    _triton_decode().rows(packed, torch.empty(1, dtype=torch.int64, device="meta"), dense)


def _decode_to(dense: Tensor, packed: GridTensor, start: int) -> None:
    """Write as many rows as `dense` has, from row `start` on."""
    if on_gpu(packed.words):
        _triton_decode().decode(packed, start, dense)
        first_use.check_decoding(dense, packed, start)
    else:
        dense.copy_(reference.decode(packed, slice(start, start + dense.shape[0])))


def _look_up(packed: GridTensor, ids: Tensor) -> Tensor:
    """The rows that ids [n] name, [n, in]."""
    if on_gpu(packed.words):
        dense = torch.empty(ids.numel(), packed.shape[1], dtype=packed.dtype, device=packed.device)
        _triton_decode().rows(packed, ids, dense)
        return dense
    return reference.decode(packed, ids.to(torch.int64))


def _multiply_packed(x: Tensor, packed: GridTensor, bias: Tensor | None) -> Tensor | None:
    """x @ weights.T + bias for x [..., in] from the packed form; None where decoding first is to be done."""
    count = x.numel() // packed.shape[1]
    if count > FEW_ROWS:
        return None
    return _triton_linear().linear(x.view(count, -1), packed, bias)  # type: ignore[no-any-return]


@functools.cache
def _triton_linear() -> Any:
    """Products of a few rows, which only a machine with Triton can import."""
    from neuzip.kernels.grid_linear.triton import linear

    return linear


@functools.cache
def _triton_decode() -> Any:
    """Decoding on a GPU, which only a machine with Triton can import."""
    from neuzip.kernels.grid_linear.triton import decode

    return decode


WeightOperators(
    "grid",
    ARRAYS,
    "SymInt out_features, SymInt columns, ScalarType dtype, SymInt width",
    GridTensor.of_arguments,
    _decode_to,
    _look_up,
    product,
).register()
