"""Tensors of one format that a GPU codes together, and what each launch has to know of them.

Whole programs of blocks are coded where they lie. What is left of a tensor, its *tail*, is coded from a copy
that is filled up to whole runs, so that no kernel reads beyond a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from neuzip.kernels.float_fields import FloatFormat, plane_widths
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUN
from neuzip.kernels.rans.triton.lists import Ints, on_device

INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Signed dtypes by their bits."""

ELEMENTS = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}
"""Dtypes of kernels by their bits."""

PLANE_WIDTHS = (32, 16, 8, 4, 2, 1)

# Columns of a batch: where the weights are, how many they are, blocks in whole programs, blocks of the
# tensors before, and where the planes are, by width. Places are bytes from the first tensor on: what is added
# to a pointer that a launch is given keeps its alignment for the compiler; an address as a number has none.
BITS_AT, NUMEL, WHOLE, INDEX, PLANES_AT = range(5)

Planes = dict[int, torch.Tensor]


def whole_runs(numel: Any) -> Any:
    """`numel`, a number or an array, rounded up to whole runs of all lanes."""
    return -(-numel // (LANES * RUN)) * LANES * RUN


class Batch:
    """Bit patterns of some tensors, one-dimensional, contiguous, at multiples of 16 bytes, none empty."""

    def __init__(self, bits: Sequence[torch.Tensor], fmt: FloatFormat, warps: int) -> None:
        self.bits, self.fmt, self.warps = bits, fmt, warps
        self.device = bits[0].device
        self.numels: Ints = np.array([one.numel() for one in bits], np.int64)
        self.blocks: Ints = -(-self.numels // BLOCK)
        self.whole: Ints = self.numels // (warps * BLOCK) * warps
        self.before: Ints = np.cumsum(self.blocks) - self.blocks
        self.tails = torch.empty(
            (len(bits), warps * BLOCK) if bool((self.blocks > self.whole).any()) else (1, 8),
            dtype=INTEGERS[fmt.bits],
            device=self.device,
        )

    @property
    def base(self) -> torch.Tensor:
        """What places count from: the bytes of the first tensor."""
        return self.bits[0].view(torch.uint8)

    def places(self, arrays: Sequence[torch.Tensor | None]) -> Ints:
        """Where arrays are; 0 for those that there are not."""
        base = self.bits[0].data_ptr()
        return np.array([0 if one is None else one.data_ptr() - base for one in arrays], np.int64)

    @cached_property
    def columns(self) -> torch.Tensor:
        """The columns that all launches read, but for those of planes."""
        return self.columns_with(None)

    def columns_with(self, planes: Sequence[Planes | None] | None) -> torch.Tensor:
        """The columns, with where the planes of each tensor are."""
        columns = [self.places(self.bits), self.numels, self.whole, self.before]
        if planes is not None:
            columns += [self.places([(own or {}).get(width) for own in planes]) for width in PLANE_WIDTHS]
        return on_device(columns, self.device)

    def empty_planes(self, row: int, mantissa_bits: int) -> Planes:
        """Planes for the fields of a tensor, with room for whole runs."""
        size = int(whole_runs(self.numels[row]))
        return {
            width: torch.empty(size * width // 8, dtype=torch.uint8, device=self.device)
            for width in plane_widths(1 + mantissa_bits)
        }


_C_BITS_AT, _C_NUMEL, _C_WHOLE = tl.constexpr(BITS_AT), tl.constexpr(NUMEL), tl.constexpr(WHOLE)


@triton.jit
def array_of(base_ptr, column_ptr, row, ELEMENT: tl.constexpr):
    """An array of a tensor, which begins at a multiple of 16 bytes, by the column of its places."""
    return (base_ptr + tl.multiple_of(tl.load(column_ptr + row), 16)).to(tl.pointer_type(ELEMENT))


@triton.jit
def weights_of(base_ptr, columns_ptr, row, ELEMENT: tl.constexpr, ENTRIES: tl.constexpr):
    """The weights of a tensor, seen as integers."""
    return array_of(base_ptr, columns_ptr + _C_BITS_AT * ENTRIES, row, ELEMENT)


@triton.jit
def numel_of(columns_ptr, row, ENTRIES: tl.constexpr):
    """The weights of a tensor."""
    return tl.load(columns_ptr + _C_NUMEL * ENTRIES + row)


@triton.jit
def whole_of(columns_ptr, row, ENTRIES: tl.constexpr):
    """The blocks of a tensor that are in whole programs."""
    return tl.load(columns_ptr + _C_WHOLE * ENTRIES + row)
