"""The step of every weight of a tensor, codes of weights, and values of codes, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.kernels.float_fields.values import normal_fp32

MIN_CODE, MAX_CODE = -(1 << 15), (1 << 15) - 1
"""The least and the largest code."""

ONE = 0x80
"""The factor byte of 1."""

AT_A_TIME = 1 << 18
"""Weights of a rectangle on a CPU: as fp32 they fit into a cache of the second level."""


class OutOfRange(NeuzipError):
    """A step that is too small for the weights of a tensor, or too large for its dtype."""


def factors(factor_bytes: Tensor) -> Tensor:
    """The numbers (fp32) that factor bytes (uint8) stand for: (16 + (b & 15)) * 2^((b >> 4) - 12), exactly.

    >>> factors(torch.tensor([0, 0x7F, 0x80, 0x81, 255], dtype=torch.uint8)).tolist()
    [0.00390625, 0.96875, 1.0, 1.0625, 248.0]
    """
    wide = factor_bytes.to(torch.int32)
    # The fields of fp32: 1 + (b & 15) / 16 and the exponent (b >> 4) - 8.
    return ((wide & 15) << 19 | (wide >> 4) + 119 << 23).view(torch.float32)


def factor_bytes(numbers: Tensor) -> Tensor:
    """The factor bytes (uint8) that are nearest in their logarithm to positive numbers.

    Numbers beyond the ends, 0 among them, get the byte of the end. Between two factors the border is their
    geometric mean, which belongs to the lower one.

    >>> factor_bytes(torch.tensor([0.0, 0.5, 1.0, 1.03, 1e6])).tolist()
    [0, 112, 128, 128, 255]
    """
    known = factors(torch.arange(256, dtype=torch.uint8, device=numbers.device)).double()
    squares = known[:-1] * known[1:]  # exact, so that all devices agree
    wide = numbers.double().clamp(0, 1e6)
    return torch.searchsorted(squares, wide * wide).to(torch.uint8)


@dataclass(frozen=True, eq=False)
class Grid:
    """The step of a tensor, and factor bytes (uint8) of its rows [R] and columns [C], None for factors of 1.

    C is the tensor's last dimension, R the number of its weights divided by C; a tensor without dimensions
    is one row of one column. The step of a weight is fl32(fl32(step * row factor) * column factor), its value
    fl32(code * step of the weight), rounded to the tensor's dtype; all roundings are to nearest even.
    A code of 0 is +0. `step` is rounded to fp32 here.

    Raises NeuzipError for a step that is no positive, normal number of fp32.

    >>> grid = Grid(0.25, rows=torch.tensor([0x80, 0x90], dtype=torch.uint8))
    >>> codes = grid.codes(torch.tensor([[0.3, -0.9], [0.3, -0.9]]))
    >>> codes.tolist(), grid.values(codes, torch.float32).tolist()
    ([[1, -4], [1, -2]], [[0.25, -1.0], [0.5, -1.0]])
    """

    step: float
    rows: Tensor | None = None
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        step = normal_fp32(self.step)
        if step is None:
            raise NeuzipError(
                f"the step {self.step!r} is no positive, normal number of fp32",
                "give a step from 1.2e-38 to 3.4e38",
            )
        object.__setattr__(self, "step", step)

    def to(self, device: torch.device | str) -> Grid:
        """The grid with its factor bytes on a device."""
        rows, columns = (None if t is None else t.to(device) for t in (self.rows, self.columns))
        return replace(self, rows=rows, columns=columns)

    @property
    def largest_step(self) -> float:
        """The step of a weight with the largest factors."""
        step = torch.tensor(self.step, dtype=torch.float32)
        for of in (self.rows, self.columns):
            if of is not None and of.numel():
                step = step * factors(of.max()).cpu()
        return float(step)

    def steps(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        """The steps (fp32) of all weights of a tensor of this shape: [R, C].

        They are on `device`, or where the factors are. Steps that are the same share memory.
        """
        rows, columns = self.rows_and_columns(shape)
        if device is None:
            device = next((t.device for t in (self.rows, self.columns) if t is not None), "cpu")
        device = torch.device(device)
        return self.to(device)._product(slice(None), slice(None), device).expand(rows, columns)

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of a dtype that the codes (whole numbers) of a tensor stand for."""
        return self.values_between(codes.flatten(), 0, codes.shape, dtype).view(codes.shape)

    def codes(self, weight: Tensor) -> Tensor:
        """The codes (int16) of a tensor: weights divided by their steps in fp32, rounded to nearest even.

        Raises OutOfRange where a code would not fit into 16 bits, so for infinities and NaNs as well.
        """
        return self.codes_between(weight.flatten(), 0, weight.shape).view(weight.shape)

    def values_between(self, codes: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weights that codes [n] stand for: weights `start` to `start + n` of a tensor of a shape."""
        out = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
        for part, size, steps in self._parts(start, start + codes.numel(), shape, codes.device):
            out[part].view(size).copy_(codes[part].view(size).to(torch.float32) * steps)
        return out

    def codes_between(self, weights: Tensor, start: int, shape: Sequence[int]) -> Tensor:
        """The codes (int16) of weights [n], which are weights `start` to `start + n` of a tensor of a shape.

        Raises OutOfRange as `codes` does.
        """
        out = torch.empty(weights.numel(), dtype=torch.int16, device=weights.device)
        for part, size, steps in self._parts(start, start + weights.numel(), shape, weights.device):
            codes = (weights[part].view(size).to(torch.float32) / steps).round_()
            least, most = codes.aminmax()
            if not bool((least >= MIN_CODE) & (most <= MAX_CODE)):  # NaN is neither
                raise OutOfRange(
                    f"weights need codes beyond {MIN_CODE} to {MAX_CODE} with the step {self.step:.6g}",
                    "give a larger step",
                )
            out[part].view(size).copy_(codes)
        return out

    def rows_and_columns(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rows and columns of a tensor of a shape. Raises ValueError if the factors are not as many."""
        columns = shape[-1] if len(shape) else 1
        rows = math.prod(shape[:-1])
        for name, factors_of, count in (("row", self.rows, rows), ("column", self.columns, columns)):
            if factors_of is not None and (factors_of.dtype, factors_of.shape) != (torch.uint8, (count,)):
                raise ValueError(
                    f"a tensor of shape {list(shape)} takes {count} {name} factors (uint8), not "
                    f"{list(factors_of.shape)} of {factors_of.dtype}"
                )
        return rows, columns

    def _product(self, rows: slice, columns: slice, device: torch.device | None) -> Tensor:
        """Steps of some rows and columns: [rows or 1, columns or 1]."""
        steps = torch.full((1, 1), self.step, dtype=torch.float32, device=device)
        if self.rows is not None:
            steps = steps * factors(self.rows[rows])[:, None]
        return steps if self.columns is None else steps * factors(self.columns[columns])

    def _parts(
        self, start: int, stop: int, shape: Sequence[int], device: torch.device
    ) -> Iterator[tuple[slice, tuple[int, int], Tensor]]:
        """Weights `start` to `stop` in rectangles.

        Yields for each the slice of them that it is, its rows and columns, and its steps [rows or 1, columns
        or 1].
        """
        _, columns = self.rows_and_columns(shape)
        if self.rows is None and self.columns is None:
            columns = max(1, stop)  # no need to look where rows end
        most = AT_A_TIME if device.type == "cpu" else max(1, stop - start)
        at = 0
        for a, b, c, d in _rectangles(start, stop, columns, most):
            size = (b - a, d - c)
            yield slice(at, at + math.prod(size)), size, self._product(slice(a, b), slice(c, d), device)
            at += math.prod(size)


def _rectangles(start: int, stop: int, columns: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Weights `start` to `stop` in order, as rows a to b of columns c to d, of at most `most` weights each.

    A rectangle is a part of one row, or some whole rows.
    """
    while start < stop:
        row, column = divmod(start, columns)
        rows = min(stop - start, most) // columns
        if column or not rows:
            end = min(columns, column + stop - start, column + most)
            yield row, row + 1, column, end
            start += end - column
        else:
            yield row, row + rows, 0, columns
            start += rows * columns
