"""The weights of a head as gradients take them: in segments, in an order of their own, packed or dense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.linear_cross_entropy.triton.candidates import COLUMNS
from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor

SEGMENT = 16 << 20
"""Bytes of weights that are decoded, or put in another order, at a time: a quarter of the usual workspace."""


@dataclass(frozen=True)
class Vocabulary:
    """The weights of a head, some rows at a time, in an order of their own: row i is row `order[i]`.

    weight [V, D], dense or packed; bias [V] or None; order int64 [V], None for their own.
    """

    weight: Tensor | PackedTensor
    bias: Tensor | None = None
    order: Tensor | None = None

    @property
    def size(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def in_place(self) -> bool:
        """Whether the weights lie in memory as they are wanted."""
        return self.order is None and isinstance(self.weight, Tensor)

    @property
    def segment(self) -> int:
        """Rows that are at hand at once: all if in place, else a multiple of COLUMNS or all."""
        if self.in_place:
            return self.size
        tile = COLUMNS * self.weight.shape[1] * self.weight.dtype.itemsize
        return min(max(1, SEGMENT // max(1, tile)) * COLUMNS, self.size)

    def segments(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """First row, weights and bias of each segment, whose memory is used again for the next."""
        if self.order is None and isinstance(self.weight, Tensor):
            yield 0, self.weight, self.bias
            return
        shape = self.segment, self.weight.shape[1]
        buffer = torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device)
        for start in range(0, self.size, self.segment):
            rows = slice(start, min(start + self.segment, self.size))
            part = buffer[: rows.stop - start]
            chosen = rows if self.order is None else self.order[rows]
            if isinstance(self.weight, Tensor):
                torch.index_select(self.weight, 0, self.order[rows], out=part)  # type: ignore[index]
            elif self.order is None:
                packed_linear.decode(self.weight, rows, out=part)
            else:
                part.copy_(packed_linear.rows(self.weight, self.order[rows]))
            yield start, part, None if self.bias is None else self.bias[chosen]

    def positions(self, target: Tensor) -> Tensor:
        """Where targets are in this order, int32 of the same shape; what is none of the vocabulary stays."""
        if self.order is None:
            return target.int()
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(self.size, device=self.order.device)
        inside = (target >= 0) & (target < self.size)
        return torch.where(inside, inverse[target.clamp(0, self.size - 1).long()], target).int()


def mean_logit_order(hidden: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Tensor:
    """The vocabulary by falling mean logit (Wijmans et al. 2024, section 4.3), int64 [V].

    Columns that some token gives a probability then share few tiles.
    """
    mean = hidden.float().mean(0)
    if isinstance(weight, PackedTensor):
        parts = [part.float() @ mean for _, part, _ in Vocabulary(weight).segments()]
        logits = torch.cat(parts)
    else:
        logits = (weight @ mean.to(weight.dtype)).float()
    if bias is not None:
        logits = logits + bias.float()
    return logits.argsort(descending=True, stable=True)
