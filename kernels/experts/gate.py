"""The activation between the two products of an expert: of gate and up."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Gate(NamedTuple):
    """How gate and up become one: silu(gate) * up, or as models do that clamp them."""

    interleaved: bool = False
    """Whether rows are gate, up, gate, up, ...; else all of gate come before all of up."""
    limit: float | None = None
    """gate is at most that, up at most that in size; None for no limit."""
    alpha: float | None = None
    """gate * sigmoid(alpha * gate) * (up + 1) in place of silu(gate) * up; None for the latter."""

    @property
    def is_plain(self) -> bool:
        """Whether it is silu(gate) * up of rows that are not interleaved."""
        return self == Gate()


def gated(rows: Tensor, gate: Gate) -> Tensor:
    """The activation in plain torch: [rows, 2 * inner] to [rows, inner], rounded after every operation."""
    if gate.interleaved:
        a, b = rows[..., ::2], rows[..., 1::2]
    else:
        a, b = rows.chunk(2, -1)
    if gate.limit is not None:
        a, b = a.clamp(max=gate.limit), b.clamp(-gate.limit, gate.limit)
    if gate.alpha is not None:
        return (b + 1) * (a * torch.sigmoid(a * gate.alpha))
    return F.silu(a) * b
