"""Weights in the packed form as torch's tensors: what the operators and kernels of packed_linear take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from neuzip.kernels.device.counters import reserve_counters
from neuzip.kernels.device.host_memory import pinned_copy
from neuzip.kernels.dtypes import dtype_of, torch_dtypes_for
from neuzip.kernels.float_fields import FORMATS, FloatFormat
from neuzip.kernels.packed_linear.form import (
    FEW_ESCAPES,
    TILE_ROWS,
    TURN,
    PackedLayout,
    index_shape,
    words_shape,
)

ARRAYS = ("words", "far_index", "far_words", "row_start", "escapes", "turn_index", "turn_escapes")
"""The tensors of a PackedTensor."""

TYPICAL = 6000
"""Weights of which one is an escape, in trained models."""

BASE = 15
"""A base that a window of any format may have."""

T = TypeVar("T")


def format_of(dtype: torch.dtype) -> FloatFormat:
    """The format of weights that can be packed. Raises TypeError for other dtypes."""
    if dtype not in torch_dtypes_for("packed"):
        raise TypeError(f"packed weights are bfloat16 or float16, not {dtype}")
    return FORMATS[dtype_of(dtype).name]


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Weights [out, in] in the packed form, as arrays of one device: `Packed` of the package, in torch.

    The words of weights on a GPU may be in pinned host memory, which kernels read over the link to the host:
    `in_host_memory`. Who fills arrays on a GPU calls `wait` before they are multiplied with.

    words     int32 [tiles, planes, lane_words, 8, 2]
    far_index int32 [tiles, pairs, 2]
    far_words int32 [far words]
    row_start int16 [out + 1], with the bits of uint16; int32 where there are 65,536 escapes or more
    escapes   int32 [escapes], with the bits of uint32
    turn_index    int32 [tiles, turns, 2], or [0, 0, 2] where products of many rows decode first
    turn_escapes  int32 [escapes], or [0]
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    low_bits: int
    base: int
    shift: int
    words: torch.Tensor
    far_index: torch.Tensor
    far_words: torch.Tensor
    row_start: torch.Tensor
    escapes: torch.Tensor
    turn_index: torch.Tensor
    turn_escapes: torch.Tensor
    _derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def without_values(cls, out: int, columns: int, dtype: torch.dtype, low_bits: int = 8) -> PackedTensor:
        """Arrays on the meta device, as weights of a shape and dtype have them that are packed well.

        How many far words and escapes there are only their values tell: the arrays for these have one each.
        """
        fmt = format_of(dtype)
        layout = PackedLayout(fmt, low_bits)
        few = out * columns // TYPICAL <= FEW_ESCAPES
        tiles, turns, whole = -(-out // TILE_ROWS), columns // TURN, columns % TURN == 0

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        return cls(
            (out, columns), dtype, low_bits, BASE, 0,
            numbers(*words_shape(out, columns, layout)), numbers(*index_shape(out, columns)), numbers(1),
            numbers(out + 1, dtype=torch.int16 if few else torch.int32), numbers(1),
            *((numbers(tiles, turns, 2), numbers(1)) if whole else (numbers(0, 0, 2), numbers(0))),
        )  # fmt: skip

    def once(self, name: str, make: Callable[[PackedTensor], T]) -> T:
        """`make(self)`, computed once and cached under a name: what launches of a kernel have in common."""
        if name not in self._derived:
            self._derived[name] = make(self)
        return self._derived[name]  # type: ignore[no-any-return]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """What is in memory, in the order of ARRAYS."""
        return tuple(getattr(self, name) for name in ARRAYS)

    @property
    def device(self) -> torch.device:
        """Where the arrays are, but for words in host memory, and where products take place."""
        return self.far_index.device

    @property
    def layout(self) -> PackedLayout:
        """What the words hold."""
        return PackedLayout(format_of(self.dtype), self.low_bits)

    def wait(self) -> None:
        """Wait until the arrays are there: products read them before the previous kernel has ended (PDL).

        It also makes what products keep on the device, so that they allocate nothing that stays.
        """
        if self.far_index.is_cuda:
            torch.cuda.current_stream(self.far_index.device).synchronize()
            reserve_counters(self.far_index.device)

    def in_host_memory(self) -> PackedTensor:
        """Weights on a GPU with a copy of the words in pinned host memory, and the other arrays as they are.

        The host waits for the copy. Raises ValueError for weights elsewhere, and NeuzipError where there is
        no such memory.
        """
        if not self.far_index.is_cuda:
            raise ValueError(f"words are kept in host memory for weights on a GPU, not on {self.device}")
        return replace(self, words=pinned_copy(self.words, self.device))

    def fetched(self) -> PackedTensor:
        """Words of host memory copied to the GPU, other weights as they are. The host does not wait.

        The copy is one of the current stream, in a CUDA graph as well.
        """
        if self.host_bytes == 0:
            return self
        return replace(self, words=self.words.to(self.device, non_blocking=True))

    @property
    def nbytes(self) -> int:
        """Bytes in memory, index, escapes and row starts included, of the device and of the host."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def host_bytes(self) -> int:
        """Bytes of `nbytes` that are in host memory though the weights are on a GPU."""
        return self.words.nbytes if self.words.device != self.device else 0

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight; 0 for a tensor without weights."""
        numel = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / numel if numel else 0.0

    @property
    def arguments(self) -> tuple[torch.Tensor | torch.dtype | int, ...]:
        """What the operators take in its place."""
        return *self.arrays, self.shape[1], self.dtype, self.low_bits, self.base, self.shift

    @classmethod
    def of_arguments(cls, *arguments: Any) -> PackedTensor:
        """The inverse of `arguments`."""
        *arrays, columns, dtype, low_bits, base, shift = arguments
        row_start = arrays[ARRAYS.index("row_start")]
        return cls((row_start.shape[0] - 1, columns), dtype, low_bits, base, shift, *arrays)
