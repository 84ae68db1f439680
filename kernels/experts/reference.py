"""Mixtures of experts in fp64 from dense weights: obvious rather than fast, and without tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.experts.gate import Gate


def grouped_linear(x: Tensor, ids: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """weights[ids[p]] @ x[p] + bias[ids[p]] for every pair p: x [pairs, in], weights [experts, out, in].

    fp64 [pairs, out]; zeros where an id names no expert.
    """
    y = torch.zeros(len(x), weights.shape[1], dtype=torch.float64, device=x.device)
    for expert in range(len(weights)):
        own = ids == expert
        if own.any():
            y[own] = x[own].double() @ weights[expert].double().T
            if bias is not None:
                y[own] += bias[expert].double()
    return y


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """The activation of gate and up, fp64 [rows, 2 * inner] to [rows, inner]."""
    if gate.interleaved:
        a, b = gate_up[:, ::2], gate_up[:, 1::2]
    else:
        a, b = gate_up.chunk(2, 1)
    if gate.limit is not None:
        a, b = a.clamp(max=gate.limit), b.clamp(-gate.limit, gate.limit)
    if gate.alpha is not None:
        return a * torch.sigmoid(gate.alpha * a) * (b + 1)
    return a * torch.sigmoid(a) * b


def experts(
    x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, gate: Gate | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A mixture of experts: x [tokens, in], ids and shares [tokens, k], to fp64 [tokens, out].

    gate_up [experts, 2 * inner, in], down [experts, out, inner]; biases [experts, 2 * inner], [experts, out].
    """
    tokens, k = ids.shape
    flat = ids.reshape(-1)
    pairs = x.double().repeat_interleave(k, 0)
    inner = gated(grouped_linear(pairs, flat, gate_up, gate_up_bias), gate or Gate())
    y = grouped_linear(inner, flat, down, down_bias)
    return (y.view(tokens, k, y.shape[1]) * shares.double()[..., None]).sum(1)
