"""Packed weights as torch knows them: the operators `neuzip::packed_*`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

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
from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.device.weight_operators import WeightOperators
from neuzip.kernels.packed_linear import first_use, reference
from neuzip.kernels.packed_linear.form import TILE_ROWS, ExponentWindow, Packed
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor, format_of
from neuzip.kernels.packed_linear.turns import by_turn

__all__ = [
    "FEW_ROWS",
    "compile_products",
    "decode",
    "is_usual",
    "linear",
    "needs_operator",
    "pack",
    "product",
    "rows",
]

FEW_ROWS = 64
"""Rows of x that any GPU multiplies from the packed form, at most; with more, Hopper alone does."""


def pack(weight: torch.Tensor) -> PackedTensor:
    """Pack bf16 or fp16 weights [out, in], contiguous: with Triton on a GPU, by the reference on a CPU.

    Mantissa bits that no weight uses are not held. On a GPU the host waits for it. Raises TypeError for other
    dtypes, and ValueError for other shapes, strides and devices, and for more than 65,536 columns.
    """
    fmt = format_of(weight.dtype)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            f"pack takes a contiguous matrix, not shape {tuple(weight.shape)}, strides {weight.stride()}; "
            "call contiguous() on it"
        )
    weight = weight.detach()
    if on_gpu(weight):
        from neuzip.kernels.packed_linear.triton import pack as triton_pack

        packed_there = triton_pack.pack(weight)
        first_use.check_packing(weight, packed_there)
        return packed_there
    packed = reference.pack(weight.view(torch.int16).numpy().view("u2"), fmt=fmt)
    starts = packed.row_start
    row_start = torch.from_numpy(starts.view("i2") if starts.dtype == "u2" else starts)
    escapes = torch.from_numpy(packed.escapes.view("i4"))
    return PackedTensor(
        packed.shape, weight.dtype, packed.low_bits, packed.window.base, packed.window.shift,
        torch.from_numpy(packed.words.view("i4")),
        torch.from_numpy(packed.far_index.view("i4")),
        torch.from_numpy(packed.far_words.view("i4")),
        row_start, escapes, *by_turn(escapes, row_start, packed.shape[1], packed.window),
    )  # fmt: skip


def decode(packed: PackedTensor, rows: slice | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weights that were packed, bit for bit: all rows, or those of a slice without a step, [rows, in].

    They go to `out` where that is given: contiguous, of that shape, dtype and device, else ValueError.
    """
    rows = rows or slice(None)
    start, stop = rows_of(rows.start, rows.stop, rows.step, packed.shape[0])
    if out is None:
        return torch.ops.neuzip.packed_decode(start, stop, *packed.arguments)  # type: ignore[no-any-return]
    require_room(out, stop - start, packed)
    torch.ops.neuzip.packed_decode_into(out, start, *packed.arguments)
    return out


def rows(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows that `ids`, int32 or int64 of any shape, name: [*ids.shape, in]. Only those are decoded.

    A row that there is not raises IndexError on a CPU, and is NaNs on a GPU, where nobody waits for ids.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids of rows are int32 or int64, not {ids.dtype}")
    return torch.ops.neuzip.packed_rows(ids, *packed.arguments)  # type: ignore[no-any-return]


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weights.T + bias, [..., in] to [..., out], with fp32 sums. Gradients flow to x and bias.

    All three have one dtype, else TypeError; under autocast x and bias are cast to that of the weights.
    Raises ValueError for shapes and devices that do not go together.
    """
    if is_usual(x, packed, bias):
        return product(x, packed, bias)
    x, bias = fitting(x, packed, bias)
    if needs_operator(x, packed.words, bias):
        return torch.ops.neuzip.packed_linear(x, bias, *packed.arguments)  # type: ignore[no-any-return]
    return product(x, packed.fetched(), bias)


def _as_numpy(packed: PackedTensor) -> Packed:
    """A packed tensor on the CPU as numpy arrays, for the reference."""
    starts = packed.row_start.numpy()
    return Packed(
        packed.shape, packed.low_bits, ExponentWindow(packed.base, packed.shift, format_of(packed.dtype)),
        packed.words.numpy().view("u4"), packed.far_index.numpy().view("u4"),
        packed.far_words.numpy().view("u4"), starts.view("u2") if starts.dtype == "i2" else starts,
        packed.escapes.numpy().view("u4"),
    )  # fmt: skip


def _decode_to(dense: torch.Tensor, packed: PackedTensor, start: int) -> None:
    """Write as many rows as `dense` has, from row `start` on."""
    stop = start + dense.shape[0]
    if on_gpu(packed.far_index):
        from neuzip.kernels.packed_linear.triton import pack as triton_pack

        triton_pack.decode(packed, start, stop, dense)
        first_use.check_decoding(dense, packed, start)
    else:
        bits = reference.decode(_as_numpy(packed), slice(start, stop))
        dense.view(torch.int16).copy_(torch.from_numpy(bits.view("i2")))


def _look_up(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows that ids [n] name, [n, in]."""
    if on_gpu(packed.far_index):
        from neuzip.kernels.packed_linear.triton import pack as triton_pack

        dense = torch.empty(ids.numel(), packed.shape[1], dtype=packed.dtype, device=packed.device)
        triton_pack.rows(packed, ids, dense)
        return dense
    bits = reference.decode(_as_numpy(packed), ids.numpy())
    return torch.from_numpy(bits.view("i2")).view(packed.dtype)


def product(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weights.T + bias where `is_usual`: from the packed form where that is faster, else decoded."""
    out, columns = packed.shape
    y = None
    if x.numel() and packed.words.numel() and on_gpu(packed.far_index):
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


def _multiply_packed(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x @ weights.T + bias for x [..., in] from the packed form; None where decoding first is to be done."""
    rows = x.numel() // packed.shape[1]
    if rows > 1 and is_hopper(x.device):
        many_rows = _gluon_linear()
        if many_rows.pays(rows, packed):
            return many_rows.linear(x, packed, bias)  # type: ignore[no-any-return]
    if rows > FEW_ROWS:
        return None
    return _triton_linear().linear(x.view(rows, -1), packed, bias)  # type: ignore[no-any-return]


@functools.cache
def _triton_linear() -> Any:
    """Products of a few rows, which only a machine with Triton can import."""
    from neuzip.kernels.packed_linear.triton import linear

    return linear


@functools.cache
def _gluon_linear() -> Any:
    """Products of many rows, which only a machine with Triton can import."""
    from neuzip.kernels.packed_linear.gluon import linear

    return linear


def compile_products(packed: PackedTensor, rows: int, bias: bool = False) -> None:
    """Compile what `linear` launches for some rows of x and weights like `packed`, for the current GPU.

    `packed` has no values: it is on the meta device.
    """
    from neuzip.kernels.packed_linear.triton import pack as triton_pack

    out, columns = packed.shape
    x = torch.empty(rows, columns, dtype=packed.dtype, device="meta")
    added = torch.empty(out, dtype=packed.dtype, device="meta") if bias else None
    if _multiply_packed(x, packed, added) is None:
        triton_pack.decode(packed, 0, out, torch.empty(out, columns, dtype=packed.dtype, device="meta"))


WeightOperators(
    "packed",
    ARRAYS,
    "SymInt columns, ScalarType dtype, SymInt low_bits, SymInt base, SymInt shift",
    PackedTensor.of_arguments,
    _decode_to,
    _look_up,
    lambda x, packed, bias: product(x, packed.fetched(), bias),
).register()
