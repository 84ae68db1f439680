"""Products of 1 to 64 rows with packed weights of a uniform grid, in Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuzip.kernels.device.launch import is_compiled
from neuzip.kernels.grid_linear.form import SLOTS
from neuzip.kernels.grid_linear.tensor import GridTensor
from neuzip.kernels.grid_linear.triton.one_row import GridRowLaunch, _one_row, multiply_one_row
from neuzip.kernels.grid_linear.triton.some_rows import GridRowsLaunch, multiply_some_rows


def linear(
    x: torch.Tensor,
    packed: GridTensor,
    bias: torch.Tensor | None = None,
    one_row: GridRowLaunch | None = None,
    some_rows: GridRowsLaunch | None = None,
) -> torch.Tensor:
    """x @ weights.T + bias with fp32 sums: x [rows, in], 1 to 64 rows, bias [out], to [rows, out].

    x, bias and the weights have one dtype and are contiguous. `one_row` and `some_rows` replace
    the launch of the table.
    """
    rows, columns = x.shape
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    dtype = x.dtype if is_compiled(_one_row) else torch.float32
    y = torch.empty(rows, packed.shape[0], dtype=dtype, device=x.device)
    slots = SLOTS * packed.words.shape[2]
    if columns != slots:
        x = F.pad(x, (0, slots - columns))
    elif x.data_ptr() % 16:
        x = x.clone()
    if rows == 1:
        multiply_one_row(y, x, packed, bias, one_row)
    else:
        multiply_some_rows(y, x, packed, bias, some_rows)
    return y.to(x.dtype)
