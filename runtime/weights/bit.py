"""Stored ternary matrices on their way into a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.kernels.ternary_linear.weight import MOST_COLUMNS
from neuzip.runtime.weights.base import CompressedWeight


class BitWeight(CompressedWeight):
    """A stored ternary matrix on its way into a model: a tensor without a dense form until one is asked for.

    What is done with it is done with `dense()`: scale * codes, rounded to its dtype.
    """

    ternary: TernaryWeight
    words: Tensor
    scale: Tensor
    parts = ()

    @staticmethod
    def can_be(shape: Sequence[int]) -> bool:
        """Whether a tensor of a shape can be one: a matrix, of not too many columns."""
        return len(shape) == 2 and shape[1] <= MOST_COLUMNS

    @classmethod
    def of(cls, ternary: TernaryWeight, dtype: torch.dtype) -> BitWeight:
        """Wrap a weight [out, in] as a tensor of `dtype`."""
        return cls._of(ternary, False, dtype)

    @classmethod
    def _of(cls, ternary: TernaryWeight, flipped: bool, dtype: torch.dtype) -> BitWeight:
        weight = cls._wrapper(tuple(ternary.shape), flipped, dtype, ternary.words.device)
        weight.ternary, weight.words, weight.scale = ternary, ternary.words, ternary.scale
        return weight

    @property
    def stored_bytes(self) -> int:
        """Bytes of words and scales on their device."""
        return self.ternary.nbytes

    @property
    def _storage(self) -> Tensor:
        return self.words

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> BitWeight:
        return self._of(self.ternary, flipped, self.dtype)

    def _elsewhere(self, move: Callable[[Tensor], Tensor]) -> BitWeight:
        old = self.ternary
        return self._of(
            TernaryWeight(move(old.words), move(old.scale), old.group, old.shape), self.flipped, self.dtype
        )

    def _decode_all(self) -> Tensor:
        return dense(self.ternary, self.dtype)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._decode_all(), bias)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["words", "scale"], (self.ternary.group, self.ternary.shape, self.flipped, self.dtype)

    @staticmethod
    def __tensor_unflatten__(arrays: dict[str, Any], context: Any, size: object, stride: object) -> BitWeight:
        group, shape, *rest = context
        return BitWeight._of(TernaryWeight(arrays["words"], arrays["scale"], group, shape), *rest)


def dense(weight: TernaryWeight, dtype: torch.dtype) -> Tensor:
    """scale * codes, [out, in]: a product in fp32, rounded to `dtype`."""
    return weight.ternary().dequantize(dtype)
