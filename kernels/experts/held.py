"""Packed experts that a graph names by a number in a tensor: for engines that store compiled graphs.

    experts_id = hold_experts(HeldExperts(gate_up, down, experts))   int64 [1] on the CPU
    torch.ops.neuzip.held_experts(x, index, weights, experts_id)     what `ops.packed_experts` computes

A graph contains nothing of the weights, not even the shapes of their arrays: `kernels.packed_linear.held`
says why. The operator is for inference: no gradient flows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuzip.kernels.experts import ops
from neuzip.kernels.packed_linear.held import HeldTable
from neuzip.kernels.packed_linear.tensor import PackedTensor


@dataclass(frozen=True, eq=False)
class HeldExperts:
    """The packed experts of a layer, whose results have as many columns as x. `ops` explains the fields."""

    gate_up: PackedTensor
    down: PackedTensor
    experts: int
    activation: ops.Activation | None = None


_HELD: HeldTable[HeldExperts] = HeldTable("packed experts")


def hold_experts(layer: HeldExperts) -> torch.Tensor:
    """The number of packed experts, int64 [1] on the CPU. The caller has to keep `layer` alive."""
    return _HELD.hold(layer)


def _experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts_id: torch.Tensor
) -> torch.Tensor:
    layer = _HELD.entry(experts_id)
    return ops.packed_experts(
        x.contiguous(), index, weights, layer.gate_up, layer.down, layer.experts, layer.activation
    )


def _experts_shape(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts_id: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.shape)


_library = torch.library.Library("neuzip", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("held_experts(Tensor x, Tensor index, Tensor weights, Tensor experts_id) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("held_experts", _experts, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("neuzip::held_experts", _experts_shape, lib=_library)
