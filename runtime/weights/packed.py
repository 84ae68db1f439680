"""Weights in the packed form of `kernels.packed_linear`, which products read as it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from neuzip.kernels.device.host_memory import pinned_copy
from neuzip.kernels.packed_linear import ops as packed_ops
from neuzip.kernels.packed_linear.form import MAX_COLUMNS, TILE_ROWS
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor
from neuzip.runtime.buffers import DecodeUnit
from neuzip.runtime.weights.base import (
    SMALLEST,
    CompressedWeight,
    RowRange,
    WeightUse,
    matrices,
    parts_within,
    rows_at_a_time,
)


def can_be_packed(out: int, columns: int) -> bool:
    """Whether a matrix of this shape is packed: it is large enough to gain, and not too wide for the form."""
    return out * columns >= SMALLEST and columns <= MAX_COLUMNS


class PackedWeight(CompressedWeight):
    """Weights in the packed form, about 11.4 bits each in bf16, that products read as they lie.

    `exact` decodes for products instead, so that results are those of the dense weight bit for bit.
    """

    packed: PackedTensor
    first: int
    """The row of `packed` with which it begins."""

    exact: bool
    residency = "packed"
    looks_up_rows = True
    words: torch.Tensor
    far_index: torch.Tensor
    far_words: torch.Tensor
    row_start: torch.Tensor
    escapes: torch.Tensor
    turn_index: torch.Tensor
    turn_escapes: torch.Tensor

    @classmethod
    def for_use(cls, weight: torch.Tensor, use: WeightUse, exact: bool = False) -> PackedWeight | None:
        """A weight packed for a use; None if its matrices have more columns than the packed form takes."""
        if weight.shape[-2 if use.transposed else -1] > MAX_COLUMNS:
            return None
        return cls.of(weight, transposed=use.transposed, exact=exact)

    @classmethod
    def of(cls, dense: torch.Tensor, transposed: bool = False, exact: bool = False) -> PackedWeight:
        """Pack a bf16 or fp16 weight [out, in] or [experts, out, in] on its device.

        `transposed` is for weights [in, out] and [experts, in, out] that are used as x @ w, such as Conv1D's.
        Raises ValueError for other shapes and for more than 65,536 columns, TypeError for other dtypes.
        """
        dense = matrices(dense)
        stored = (dense.mT if transposed else dense).contiguous()
        packed = packed_ops.pack(stored.view(-1, stored.shape[-1]))
        return cls._of(packed, tuple(stored.shape), transposed, 0, exact)

    @classmethod
    def _of(
        cls, packed: PackedTensor, stored: tuple[int, ...], flipped: bool, first: int, exact: bool
    ) -> PackedWeight:
        weight = cls._wrapper(stored, flipped, packed.dtype, packed.device)
        weight.packed, weight.first, weight.exact = packed, first, exact
        for name in ARRAYS:  # for __tensor_flatten__
            setattr(weight, name, getattr(packed, name))
        weight.parts = _packed_parts(packed, stored, first) if exact else ()
        return weight

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed form on its device; of an expert, those of all experts."""
        return self.packed.nbytes - self.packed.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the packed form in pinned host memory, beside those on its GPU."""
        return self.packed.host_bytes

    def offloaded(self, device_bytes: int = 0) -> PackedWeight:
        """The weight with its words, about 96 % of it, in pinned host memory if it exceeds `device_bytes`.

        Results are the same bits. Products read the words over the link to the host, those of experts in use
        alone. Raises ValueError for weights on a CPU, NeuzipError where there is no such memory.
        """
        if self.stored_bytes <= device_bytes or self.host_bytes:
            return self
        return self._of(self.packed.in_host_memory(), self.stored, self.flipped, self.first, self.exact)

    @property
    def _storage(self) -> torch.Tensor:
        return self.words

    @property
    def _traced(self) -> bool:
        return type(self.words) is not torch.Tensor

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> PackedWeight:
        again = self._of(self.packed, stored, flipped, self.first + rows.start, False)
        again.exact = self.exact
        again.parts = parts_within(self.parts, rows)
        return again

    def _elsewhere(self, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        moved: dict[str, Any] = {name: move(getattr(self.packed, name)) for name in ARRAYS[1:]}
        device = moved["far_index"].device
        if self.host_bytes and device.type == "cuda":  # what did not fit into a GPU stays in host memory
            words = pinned_copy(self.words, device)
        else:
            words = move(self.words)
        packed = replace(self.packed, words=words, **moved)
        packed.wait()
        return self._of(packed, self.stored, self.flipped, self.first, self.exact)

    def _decode_all(self) -> torch.Tensor:
        return packed_ops.decode(self.packed, slice(self.first, self.first + self._rows))

    def _usual_linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        packed = self.packed
        if self.exact or self.stored[0] != packed.shape[0] or not packed_ops.is_usual(x, packed, bias):
            return None
        if torch.is_grad_enabled() and self.requires_grad:
            return None
        return packed_ops.product(x, packed, bias)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.exact:
            return super()._linear(x, bias)
        if self._rows == self.packed.shape[0]:
            return packed_ops.linear(x, self.packed, bias)
        if self.far_index.is_cuda and self.first % TILE_ROWS == 0:
            return packed_ops.linear(x, self._own(), bias)
        return F.linear(x, self._decode_all(), bias)

    def _own(self) -> PackedTensor:
        """An expert's own matrix, for kernels. Far words and escapes of all stay together.

        All products with an expert get one object, which has what its launches have in common.
        """
        if self._traced:
            return self._expert_of(self.packed)
        return self.packed.once(f"rows {self.first} to {self.first + self._rows}", self._expert_of)

    def _expert_of(self, packed: PackedTensor) -> PackedTensor:
        end = self.first + self._rows
        tiles = slice(self.first // TILE_ROWS, -(-end // TILE_ROWS))
        return replace(
            packed,
            shape=(self._rows, self.stored[-1]),
            words=packed.words[tiles],
            far_index=packed.far_index[tiles],
            row_start=packed.row_start[self.first : end + 1],
            turn_index=packed.turn_index[tiles],
        )

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if self._rows < self.packed.shape[0]:  # beyond an expert's rows are those of its neighbours
            ids = torch.where((ids >= 0) & (ids < self._rows), ids + self.first, -1)
        return packed_ops.rows(self.packed, ids)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        p = self.packed
        numbers = p.shape, p.dtype, p.low_bits, p.base, p.shift
        return [*ARRAYS], (numbers, self.stored, self.flipped, self.first, self.exact)

    @staticmethod
    def __tensor_unflatten__(
        arrays: dict[str, Any], context: Any, size: object, stride: object
    ) -> PackedWeight:
        numbers, *rest = context
        return PackedWeight._of(PackedTensor(*numbers, **arrays), *rest)


def _packed_parts(packed: PackedTensor, stored: tuple[int, ...], first: int) -> tuple[RowRange, ...]:
    size = stored[-1] * packed.dtype.itemsize
    words, *others = packed.arrays
    sources = *others, words  # the first says where weights are decoded
    return tuple(
        RowRange(
            start,
            stop,
            DecodeUnit((stop - start) * size, sources, (packed, slice(first + start, first + stop)), _unpack),
        )
        for start, stop in rows_at_a_time(stored, packed.dtype.itemsize)
    )


def _unpack(
    coded: Sequence[tuple[PackedTensor, slice]], memories: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    def decode(packed: PackedTensor, rows: slice, memory: torch.Tensor | None) -> torch.Tensor:
        out = None if memory is None else memory.view(packed.dtype).view(-1, packed.shape[1])
        return packed_ops.decode(packed, rows, out)

    return [decode(*rows, memory) for rows, memory in zip(coded, memories, strict=True)]
