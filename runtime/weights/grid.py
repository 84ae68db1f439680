"""Weights of a uniform grid in the packed form of `kernels.grid_linear`, which products read as it lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuzip.kernels.grid import Grid
from neuzip.kernels.grid_linear import GridTensor, ops, pack, pack_rows
from neuzip.kernels.grid_linear.tensor import ARRAYS
from neuzip.runtime.weights.base import CompressedWeight, WeightUse

WORTH = 0.65
"""The share of its dense bytes that a weight may take at most: the packed form of any weights takes 0.71."""


class GridWeight(CompressedWeight):
    """A matrix whose weights have codes of 4 to 8 bits, the container's or others on a uniform grid.

    Products read the codes; results have the rounding of other fp32 sums than those of the dense weight.
    """

    packed: GridTensor
    residency = "packed"
    looks_up_rows = True
    exact = False
    parts = ()
    words: Tensor
    row_steps: Tensor
    row_terms: Tensor
    column_factors: Tensor
    unit_start: Tensor
    escapes: Tensor

    @classmethod
    def of(cls, dense: Tensor, grid: Grid) -> GridWeight:
        """Pack a bf16 or fp16 weight [out, in], values of a grid, on its device.

        Raises ValueError for other shapes and for more than 65,536 columns, TypeError for other dtypes.
        """
        return cls._of(pack(dense.contiguous(), grid), False)

    @classmethod
    def if_worthwhile(cls, dense: Tensor, grid: Grid) -> GridWeight | None:
        """Pack a weight; None if its codes are so large that it would not be small."""
        weight = cls.of(dense, grid)
        return weight if weight.stored_bytes <= WORTH * dense.nbytes else None

    @classmethod
    def of_rows(cls, dense: Tensor, steps: Tensor) -> GridWeight | None:
        """Pack a weight whose rows have the steps `steps`, fp32 [out]; None if it would not be small."""
        weight = cls._of(pack_rows(dense.contiguous(), steps), False)
        return weight if weight.stored_bytes <= WORTH * dense.nbytes else None

    @classmethod
    def _of(cls, packed: GridTensor, flipped: bool) -> GridWeight:
        weight = cls._wrapper(tuple(packed.shape), flipped, packed.dtype, packed.device)
        weight.packed = packed
        for name in ARRAYS:  # for __tensor_flatten__
            setattr(weight, name, getattr(packed, name))
        return weight

    def suits(self, use: WeightUse) -> bool:
        """Whether it is read as it lies in a use: not where a product takes it [in, out]."""
        return not use.transposed

    @property
    def stored_bytes(self) -> int:
        """Bytes of words, steps, factors and escapes on their device."""
        return self.packed.nbytes

    @property
    def _storage(self) -> Tensor:
        return self.words

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> GridWeight:
        return self._of(self.packed, flipped)

    def _elsewhere(self, move: Callable[[Tensor], Tensor]) -> GridWeight:
        moved: dict[str, Any] = {name: move(getattr(self.packed, name)) for name in ARRAYS}
        packed = replace(self.packed, **moved)
        packed.wait()
        return self._of(packed, self.flipped)

    def _decode_all(self) -> Tensor:
        return ops.decode(self.packed)

    def _usual_linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        packed = self.packed
        if not ops.is_usual(x, packed, bias) or (torch.is_grad_enabled() and self.requires_grad):
            return None
        return ops.product(x, packed, bias)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, self.packed, bias)

    def _look_up(self, ids: Tensor) -> Tensor:
        return ops.rows(self.packed, ids)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        packed = self.packed
        return [*ARRAYS], ((packed.shape, packed.dtype, packed.width), self.flipped)

    @staticmethod
    def __tensor_unflatten__(
        arrays: dict[str, Any], context: Any, size: object, stride: object
    ) -> GridWeight:
        numbers, flipped = context
        return GridWeight._of(GridTensor(*numbers, **arrays), flipped)
