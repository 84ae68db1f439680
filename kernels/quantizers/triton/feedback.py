"""A block of columns rounded with error feedback, on a GPU: its columns in turn, in one launch.

Rows of a matrix do not depend on each other. A program holds some rows of the block in registers and walks
along their columns. feedback.py and grid_feedback.py say in torch what is computed, with the same roundings:
each operation rounds to nearest, and no product is contracted with a difference. So codes have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.grid import MAX_CODE, MIN_CODE
from neuzip.kernels.tuning import launch_for

VALUES = {
    torch.float64: tl.float32,  # holds every product of fp32
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
"""How values of a dtype are rounded."""

INTEGERS = tl.constexpr(1.5 * 2.0**23)
"""A number of fp32 below 2^22 plus this, less this, is the nearest whole number, ties to even."""


def round_block(
    w: Tensor, steps: Tensor, spread: Tensor, codes: Tensor, errors: Tensor, dtype: torch.dtype
) -> None:
    """Round the columns of a block in order, each with the errors of those before it in the block.

    w       fp32 [n, out], the weights, a column a row
    steps   fp32 [n, out], with any strides
    spread  fp32 [n, n], how errors are spread within the block; rows may be further apart
    codes   int16 [n, out], overwritten with the codes
    errors  fp32 [n, out], overwritten with the errors, each divided by its pivot
    dtype   that of the values, whose rounding is part of the errors

    All are on one device; w, codes and errors are contiguous, and so are the rows of `spread`. Raises
    KeyError for a dtype that has no codes.
    """
    columns, rows = w.shape
    use = launch_for("quantizers.feedback", w.device)
    launch(
        _round_block_kernel, (triton.cdiv(rows, use["rows"]),),
        w, steps, spread, codes, errors, rows, columns, *steps.stride(), spread.stride(0),
        VALUE=VALUES[dtype], LEAST=MIN_CODE, MOST=MAX_CODE, COLUMNS=triton.next_power_of_2(columns),
        ROWS=use["rows"], COMPILED=is_compiled(_round_block_kernel), num_warps=use["num_warps"],
        enable_fp_fusion=False, device=w.device,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "step_column", "step_row", "spread_row"])
def _round_block_kernel(
    w, steps, spread, codes, errors, rows, columns, step_column, step_row, spread_row,
    VALUE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[:, None]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    block = (column < columns) & inside[None, :]
    # [COLUMNS, ROWS]
    tile = tl.load(w + column * rows.to(tl.int64) + row[None, :], mask=block, other=0.0)
    for j in range(columns):
        weight = tl.sum(tl.where(column == j, tile, 0.0), axis=0)
        # [ROWS]
        step = tl.load(steps + j * step_column.to(tl.int64) + row * step_row, mask=inside, other=1.0)
        code = tl.minimum(tl.maximum(tl.div_rn(weight, step), LEAST), MOST)
        code = (code + INTEGERS) - INTEGERS
        value = widened(rounded(code * step, VALUE, COMPILED))
        pivot = tl.load(spread + j * spread_row + j)
        error = tl.div_rn(weight - value, pivot + tl.zeros_like(weight))
        # [COLUMNS, 1]
        share = tl.load(spread + j * spread_row + column, mask=column < columns, other=0.0)
        tile -= share * error[None, :]
        at = j * rows.to(tl.int64) + row
        tl.store(codes + at, code.to(tl.int16), mask=inside)
        tl.store(errors + at, error, mask=inside)
