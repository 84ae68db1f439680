"""Sums of squares of rows and columns, compiled by numba, added in the order of the weights."""

from __future__ import annotations

from neuzip.kernels.device.compiled import compiled


@compiled
def add_squares(values, start, rows, columns):  # type: ignore[no-untyped-def]
    """Add the squares of fp64 values, those of weights `start` and following, to sums of rows and columns."""
    width = columns.size
    row = start // width
    column = start - row * width
    for i in range(values.size):
        square = values[i] * values[i]
        rows[row] += square
        columns[column] += square
        column += 1
        if column == width:
            column = 0
            row += 1
