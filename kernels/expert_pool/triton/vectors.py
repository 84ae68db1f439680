"""What follows products with vectors in Triton: sums of rows put right, the gate, the sum over experts.

`neuzip.kernels.rans.products` says what sums and corrections are. Results are rounded where a model's own
code rounds, as in `neuzip.kernels.experts.triton.rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.triton.rows import activated
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.kernels.rans.products import CodedMatrices

GATED_COLUMNS, SUMMED_COLUMNS = 64, 32
"""Columns of the result that a program has."""

_BLOCK = tl.constexpr(BLOCK)


def gate_sums(
    first: CodedMatrices, sums: Tensor, chosen: Tensor, x: Tensor, together: int, gate: Gate,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The activation of gate and up, [slots, inner], of their sums for x[slot // together]."""
    slots, inner = chosen.numel(), first.rows // 2
    y = torch.empty(slots, inner, dtype=x.dtype, device=x.device)
    launch(
        gate_sums_kernel, (slots, triton.cdiv(inner, GATED_COLUMNS)),
        y, sums, *_tables(first), bias, chosen, x, together, _items(first), first.rows, first.columns, inner,
        0.0 if gate.limit is None else float(gate.limit), 0.0 if gate.alpha is None else float(gate.alpha),
        HAS_BIAS=bias is not None, LIMITED=gate.limit is not None, ALPHA=gate.alpha is not None,
        INTERLEAVED=gate.interleaved, COLUMNS=GATED_COLUMNS, COMPILED=is_compiled(gate_sums_kernel),
        num_warps=2, pdl=True, enable_fp_fusion=False, device=x.device,
    )  # fmt: skip
    return y


def sum_slots(
    second: CodedMatrices, sums: Tensor, chosen: Tensor, x: Tensor, weights: Tensor, bias: Tensor | None
) -> Tensor:
    """The sum over the slots of each token of weight * row: weights [tokens, k] to [tokens, out].

    x: what the matrices were multiplied with, [tokens * k, inner].
    """
    tokens, k = weights.shape
    y = torch.empty(tokens, second.rows, dtype=x.dtype, device=x.device)
    launch(
        sum_slots_kernel, (tokens, triton.cdiv(second.rows, SUMMED_COLUMNS)),
        y, sums, *_tables(second), bias, chosen, x, weights, k, _items(second), second.rows, second.columns,
        HAS_BIAS=bias is not None, ROUNDED=weights.dtype == x.dtype, SLOTS=triton.next_power_of_2(k),
        COLUMNS=SUMMED_COLUMNS, COMPILED=is_compiled(sum_slots_kernel),
        num_warps=4, pdl=True, enable_fp_fusion=False, device=x.device,
    )  # fmt: skip
    return y


def _tables(matrices: CodedMatrices) -> tuple[Tensor, Tensor, Tensor]:
    wrong = matrices.corrections
    return wrong.row_start, wrong.columns, wrong.values


def _items(matrices: CodedMatrices) -> int:
    return int(matrices.launch.rows.shape[0])


@triton.jit
def _row_sums(
    sums, row_start, wrong_columns, wrong_values, bias, slot, item, row, there, x, n_rows, width,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Products of rows of an item with x, fp32, where they are `there`."""
    at = sums + (slot * n_rows + row) * 2
    begin = row.to(tl.int64) * width
    is_split = begin // _BLOCK != (begin + width - 1) // _BLOCK
    total = tl.load(at, mask=there, other=0.0) + tl.load(at + 1, mask=there & is_split, other=0.0)
    of_row = item.to(tl.int64) * n_rows + row
    start = tl.load(row_start + of_row, mask=there, other=0)
    stop = tl.load(row_start + of_row + 1, mask=there, other=0)
    for i in range(tl.max(stop - start)):
        is_wrong = start + i < stop
        column = tl.load(wrong_columns + start + i, mask=is_wrong, other=0)
        both = tl.load(wrong_values + start + i, mask=is_wrong, other=0).to(tl.uint32, bitcast=True)
        number = widened(tl.load(x + column, mask=is_wrong, other=0.0))
        weight = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        other = (both << 16).to(tl.float32, bitcast=True)
        total += tl.where(is_wrong, weight * number - other * number, 0.0)
    if HAS_BIAS:
        total += widened(tl.load(bias + of_row, mask=there, other=0.0))
    return total


@triton.jit(do_not_specialize=["together", "limit", "alpha"])
def gate_sums_kernel(
    y, sums, row_start, wrong_columns, wrong_values, bias, chosen, x, together, items, n_rows, width, inner,
    limit, alpha,
    HAS_BIAS: tl.constexpr, LIMITED: tl.constexpr, ALPHA: tl.constexpr, INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the activation of a slot. Slots without an item get zeros."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slot = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.load(chosen + slot)
    there = (c < inner) & (item >= 0) & (item < items)
    own = x + slot // together * width
    first = 2 * c if INTERLEAVED else c
    second = first + 1 if INTERLEAVED else c + inner
    gate = _row_sums(
        sums, row_start, wrong_columns, wrong_values, bias, slot, item, first, there, own, n_rows, width,
        HAS_BIAS,
    )  # fmt: skip
    up = _row_sums(
        sums, row_start, wrong_columns, wrong_values, bias, slot, item, second, there, own, n_rows, width,
        HAS_BIAS,
    )  # fmt: skip
    gate, up = widened(rounded(gate, DTYPE, COMPILED)), widened(rounded(up, DTYPE, COMPILED))
    tl.store(
        y + slot * inner + c,
        activated(gate, up, limit, alpha, LIMITED, ALPHA, DTYPE, COMPILED),
        mask=c < inner,
    )


@triton.jit
def sum_slots_kernel(
    y, sums, row_start, wrong_columns, wrong_values, bias, chosen, x, weights, k, items, n_rows, width,
    HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the result of a token, with all its slots at once."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    number = tl.arange(0, SLOTS)[:, None]
    slot = token * k + number
    item = tl.load(chosen + slot, mask=number < k, other=-1)
    there = (item >= 0) & (item < items) & (c < n_rows)
    rows = _row_sums(
        sums, row_start, wrong_columns, wrong_values, bias, slot, item, c, there, x + slot * width, n_rows,
        width, HAS_BIAS,
    )  # fmt: skip
    weight = widened(tl.load(weights + slot, mask=number < k, other=0.0))
    product = weight * widened(rounded(rows, DTYPE, COMPILED))
    if ROUNDED:
        product = widened(rounded(product, DTYPE, COMPILED))
    total = tl.sum(tl.where(there, product, 0.0), 0, keep_dims=True)
    tl.store(y + token * n_rows + c, rounded(total, DTYPE, COMPILED), mask=c < n_rows)
