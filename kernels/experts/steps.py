"""The steps of a mixture of experts, on whatever device their tensors are: which implementation does each.

Nothing here knows of autograd or torch.compile. On a CPU plain torch decodes one expert in use at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.experts import routing as plain
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.experts.routing import Routing, runs
from neuzip.kernels.packed_linear.ops import decode
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for


def route(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    """The routing of ids [tokens, k], and x [tokens, in] copied to rows [most_tiles * tile, in]."""
    if _on_gpu(x):
        routed: tuple[Routing, Tensor] = _triton().route(index.contiguous(), x.contiguous(), experts, tile)
        return routed
    return plain.route(index, x, experts, tile)


def grouped_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """rows @ weights.T + bias of the expert of each tile: [most_tiles * tile, in] to [.., out]."""
    rows, bias = rows.contiguous(), None if bias is None else bias.contiguous()
    y: Tensor
    if len(rows) == 0:
        return rows.new_empty(0, packed.shape[0] // experts)
    if _on_gpu(rows) and packed.words.numel():
        mean = len(routing.position) / experts
        packed = _fetched(packed, experts, routing)
        if multiplies_on_hopper(packed, experts):
            y = _gluon().grouped_linear(rows, packed, experts, routing, bias)
        elif launch_for("experts.decoded", rows.device, mean=mean)["pays"]:
            y = _triton().grouped_dense(rows, packed, experts, routing, bias)
        else:
            y = _triton().grouped_linear(rows, packed, experts, routing, bias)
        return y
    out = packed.shape[0] // experts
    y = torch.empty(len(rows), out, dtype=rows.dtype, device=rows.device)
    for expert, own in runs(routing):
        weight = decode(packed, slice(expert * out, (expert + 1) * out))
        y[own] = F.linear(rows[own], weight, None if bias is None else bias[expert])
    return y


def gated_linear(rows: Tensor, packed: PackedTensor, experts: int, routing: Routing) -> Tensor:
    """silu(gate) * up of each tile in one launch, where `multiplies_on_hopper`: to [.., out / 2]."""
    if len(rows) == 0:
        return rows.new_empty(0, packed.shape[0] // experts // 2)
    packed = _fetched(packed, experts, routing)
    return _gluon().gated_linear(rows.contiguous(), packed, experts, routing)  # type: ignore[no-any-return]


def gradients(grad: Tensor, packed: PackedTensor, experts: int, routing: Routing) -> Tensor:
    """grad @ weights of the expert of each tile: [most_tiles * tile, out] to [.., in].

    Some experts are decoded at a time: on a GPU into 256 MiB at most, or into what one expert takes.
    """
    grad = grad.contiguous()
    if _on_gpu(grad):
        return _triton().gradients(grad, packed, experts, routing)  # type: ignore[no-any-return]
    out, columns = packed.shape[0] // experts, packed.shape[1]
    grads = torch.empty(len(grad), columns, dtype=grad.dtype)
    for expert, own in runs(routing):
        grads[own] = grad[own] @ decode(packed, slice(expert * out, (expert + 1) * out))
    return grads


def apply_gate(rows: Tensor, routing: Routing, gate: Gate) -> Tensor:
    """The activation of rows [most_tiles * tile, 2 * inner] to [.., inner]."""
    if _on_gpu(rows):
        return _triton().apply_gate(rows.contiguous(), routing, gate)  # type: ignore[no-any-return]
    return gated(rows, gate)


def weighted_sum(rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """The sum over the slots of each token of weight * row: weights [tokens, k] to [tokens, columns]."""
    if _on_gpu(rows):
        y: Tensor = _triton().weighted_sum(rows.contiguous(), position, weights.contiguous())
        return y
    tokens, k = weights.shape
    at = position.long().view(tokens, k)
    sums = torch.zeros(tokens, rows.shape[1], dtype=torch.float32)
    for slot in range(k):
        there = at[:, slot, None] >= 0
        product = rows[at[:, slot].clamp(min=0)] * weights[:, slot, None]
        sums += torch.where(there, product, 0.0)
    return sums.to(rows.dtype)


def multiplies_on_hopper(packed: PackedTensor, experts: int) -> bool:
    """Whether the kernels for Hopper multiply with the weights; for the meta device, on the current GPU."""
    if packed.device.type != "cpu" and is_hopper(packed.device):
        return bool(_gluon().can_multiply(packed, experts))
    return False


def _fetched(packed: PackedTensor, experts: int, routing: Routing) -> PackedTensor:
    """Weights whose words in host memory are copied to the GPU first, if a product would read many twice.

    Every tile of rows reads the words of its expert. So it depends on how full tiles are, by the mean. The
    copy takes all experts, in use or not, and the memory of their words until the product has ended.
    """
    if packed.words.is_cuda:
        return packed
    fill = len(routing.position) / (experts * routing.tile)
    copies = launch_for("experts.host_words", packed.device, fill=fill)["copied"]
    return packed.fetched() if copies else packed


def _on_gpu(tensor: Tensor) -> bool:
    """Whether Triton does the work; plain torch does it on a CPU. Raises ValueError for other devices.

    Of tensors on the meta device launches are compiled for the current GPU, and nothing runs.
    """
    if tensor.is_cuda or tensor.is_meta:
        return True
    if tensor.device.type != "cpu":
        raise ValueError(f"packed experts are on a CUDA device or on the CPU, not on {tensor.device}")
    return False


@functools.cache
def _triton() -> Any:
    """The Triton kernels, which only a machine with Triton can import."""
    from neuzip.kernels.experts.triton import launches

    return launches


@functools.cache
def _gluon() -> Any:
    """The products on Hopper, which only a machine with Triton can import."""
    from neuzip.kernels.experts.gluon import grouped

    return grouped
