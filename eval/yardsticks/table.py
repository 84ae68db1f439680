"""The table of yardsticks: name, definition, bits, and the function from weights to restored weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import floats, ggml, integers
from .blocks import Layout
from .names import NAMES

PIECE = 1 << 22
"""Weights restored at a time, where rows do not depend on each other: most formats need several copies."""


@dataclass(frozen=True)
class Yardstick:
    """A published format: what it stores, and what it leaves of an fp32 matrix [rows, width], as fp32."""

    name: str
    layout: Layout
    restore: Callable[[Tensor], Tensor]

    def restored(self, weight: Tensor) -> Tensor:
        """What is left of a tensor of two or more dimensions: fp32, with the last dimension as rows.

        Raises ValueError for fewer dimensions.
        """
        if weight.dim() < 2:
            raise ValueError(f"a yardstick takes matrices, and this tensor has {weight.dim()} dimensions")
        if weight.numel() == 0:
            return weight.float()
        matrix = weight.reshape(-1, weight.shape[-1])
        rows = len(matrix) if self._is_of_the_whole else max(1, PIECE // matrix.shape[1])
        return torch.cat([self.restore(piece.float()) for piece in torch.split(matrix, rows)]).reshape(
            weight.shape
        )

    @property
    def _is_of_the_whole(self) -> bool:
        """Whether what becomes of a row depends on other rows."""
        return self.layout.across_rows or self.layout.tensor > 0

    def bits(self, shape: tuple[int, ...]) -> int:
        """Exact bits of a tensor of two or more dimensions."""
        return self.layout.bits(math.prod(shape[:-1]), shape[-1])


YARDSTICKS = {
    one.name: one
    for one in (
        Yardstick("int8", Layout(8, ((0, 16),)), integers.int8_rows),
        Yardstick("fp8", Layout(8, tensor=32), integers.fp8),
        Yardstick("int4g32", Layout(4, ((32, 16 + 4),)), partial(integers.int4_groups, group=32)),
        Yardstick("int4g128", Layout(4, ((128, 16 + 4),)), partial(integers.int4_groups, group=128)),
        Yardstick("nf4", Layout(4, ((64, 8), (64 * 256, 32)), across_rows=True, tensor=32), floats.nf4),
        Yardstick("mxfp4", Layout(4, ((32, 8),)), floats.mxfp4),
        Yardstick("nvfp4", Layout(4, ((16, 8),), tensor=32), floats.nvfp4),
        Yardstick("q4_0", Layout(4, ((32, 16),)), ggml.q4_0),
        Yardstick("q5_0", Layout(5, ((32, 16),)), ggml.q5_0),
        Yardstick("q6_k", Layout(6, ((16, 8), (256, 16))), ggml.q6_k),
        Yardstick("q8_0", Layout(8, ((32, 16),)), ggml.q8_0),
    )
}
"""Every yardstick by its name, in the order of `NAMES`."""

assert tuple(YARDSTICKS) == tuple(NAMES)
