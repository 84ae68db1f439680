"""Weights of a uniform grid, packed in a fixed width, as torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from neuzip.kernels.device.counters import reserve_counters
from neuzip.kernels.grid_linear.escapes import turn_count
from neuzip.kernels.grid_linear.form import TILE_ROWS, TURN, CodeFields, word_count

ARRAYS = ("words", "row_steps", "row_terms", "column_factors", "unit_start", "escapes")
"""The tensors of a GridTensor."""

T = TypeVar("T")


def can_have_terms(dtype: torch.dtype, width: int, has_columns: bool) -> bool:
    """Whether bf16 arithmetic may make the weights: up to 7 bits a code, and no factors of columns."""
    return dtype == torch.bfloat16 and width <= 7 and not has_columns


@dataclass(frozen=True, eq=False)
class GridTensor:
    """Weights [out, in] of a uniform grid, as arrays of one device. The package describes the form.

    words           int32 [tiles, width, groups, 8, 2]
    row_steps       fp32 [16 tiles]: the step times the factor of each row, 0 for rows that only fill a tile
    row_terms       int32 [16 tiles, 2]: these as two bf16 numbers each, in pairs; [0, 2] if they are not used
    column_factors  fp32 [128 turns]: by slot; [0] where all are 1
    unit_start      int32 [tiles * turns + 1]: where the escapes of each tile and turn begin
    escapes         int32 [escapes], with the bits of uint32: see `escapes`
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    width: int
    words: Tensor
    row_steps: Tensor
    row_terms: Tensor
    column_factors: Tensor
    unit_start: Tensor
    escapes: Tensor
    _derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def without_values(
        cls, out: int, columns: int, dtype: torch.dtype, width: int, has_columns: bool
    ) -> GridTensor:
        """Arrays on the meta device for a shape; there is one escape, as only values tell how many."""
        tiles, groups = -(-out // TILE_ROWS), word_count(columns)

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        factors = turn_count(columns) * TURN if has_columns else 0
        terms = tiles * TILE_ROWS if can_have_terms(dtype, width, has_columns) else 0
        return cls(
            (out, columns), dtype, width, numbers(tiles, width, groups, 8, 2),
            numbers(tiles * TILE_ROWS, dtype=torch.float32), numbers(terms, 2),
            numbers(factors, dtype=torch.float32), numbers(tiles * turn_count(columns) + 1), numbers(1),
        )  # fmt: skip

    def once(self, name: str, make: Callable[[GridTensor], T]) -> T:
        """`make(self)`, computed once and cached under a name: what launches of a kernel have in common."""
        if name not in self._derived:
            self._derived[name] = make(self)
        return self._derived[name]  # type: ignore[no-any-return]

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """What is in memory, in the order of ARRAYS."""
        return tuple(getattr(self, name) for name in ARRAYS)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.words.device

    @property
    def fields(self) -> CodeFields:
        """What the words hold."""
        return CodeFields(self.width)

    @property
    def has_columns(self) -> bool:
        """Whether columns have factors."""
        return self.column_factors.numel() > 0

    @property
    def has_terms(self) -> bool:
        """Whether weights are made by bf16 arithmetic."""
        return self.row_terms.numel() > 0

    def wait(self) -> None:
        """Wait until the arrays are there: products read them before the previous kernel has ended (PDL).

        It also makes what products keep on the device, so that they allocate nothing that stays.
        """
        if self.words.is_cuda:
            torch.cuda.current_stream(self.words.device).synchronize()
            reserve_counters(self.words.device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, factors, escapes and their starts included."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight; 0 for a tensor without weights."""
        numel = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / numel if numel else 0.0

    @property
    def arguments(self) -> tuple[Tensor | torch.dtype | int, ...]:
        """What the operators take in its place."""
        return *self.arrays, *self.shape, self.dtype, self.width

    @classmethod
    def of_arguments(cls, *arguments: Any) -> GridTensor:
        """The inverse of `arguments`."""
        *arrays, out, columns, dtype, width = arguments
        return cls((out, columns), dtype, width, *arrays)
