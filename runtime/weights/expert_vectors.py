"""Mixtures of experts coded by rANS, of few tokens: experts are multiplied while they are decoded.

Most experts in use have one row, so that a weight is needed once: it is never stored. A pool would be written
and read for that. An expert of two rows is decoded twice. The launches are two products, of which each is
followed by one that puts its sums right and does what comes next: the gate, and the weighted sum over
experts. No host waits, and nothing is sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.expert_pool.ops import pays_while_decoded
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.kernels.rans.products import CodedMatrices, can_multiply, coded_matrices
from neuzip.runtime import buffers
from neuzip.runtime.buffers import PoolUnit
from neuzip.runtime.weights.ans import AnsWeight

_TABLES = "_expert_matrices"
"""The attribute of a weight that keeps its tables."""


@dataclass(frozen=True, eq=False)
class _Known:
    """Tables of a weight, None if it has none, and what they were made of: weights may be moved."""

    residents: tuple[ResidentTensor, ...]
    matrices: CodedMatrices | None
    unit: PoolUnit | None


def vector_experts(
    x: Tensor, index: Tensor, weights: Tensor, first: AnsWeight, second: AnsWeight, gate: Gate,
    first_bias: Tensor | None = None, second_bias: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """A mixture of experts: x [tokens, in] to [tokens, out]; None for what is not multiplied this way.

    index       int64 or int32 [tokens, k]: experts of each token; ids outside 0 to experts - 1 add nothing
    weights     [tokens, k], any float dtype: what the result of each expert is multiplied by
    first       gate and up, [experts, 2 * inner, in]
    second      [experts, out, inner]
    biases      [experts, 2 * inner] and [experts, out]

    The table of the card says for which numbers of pairs and weights this pays. The first call for a layer
    makes its tables, for which the host waits.
    """
    if not index.numel() or torch.is_grad_enabled() or first.flipped or second.flipped:
        return None
    expert_weights = math.prod(first.stored[1:]) + math.prod(second.stored[1:])
    if not pays_while_decoded(index.numel(), first.stored[0], expert_weights, x.device):
        return None
    one, other = _known(first), _known(second)
    if one.matrices is None or other.matrices is None or one.unit is None or other.unit is None:
        return None
    from neuzip.kernels.expert_pool.triton.vectors import gate_sums, sum_slots

    k = index.shape[1]
    chosen, x, weights = index.contiguous().view(-1), x.contiguous(), weights.contiguous()
    for unit in (one.unit, other.unit):
        buffers.stay(unit)
    sums = one.matrices.multiply(chosen, x, k)
    hidden = gate_sums(one.matrices, sums, chosen, x, k, gate, first_bias)
    sums = other.matrices.multiply(chosen, hidden, 1)
    return sum_slots(other.matrices, sums, chosen, hidden, weights, second_bias)


def _known(weight: AnsWeight) -> _Known:
    """The tables of a weight, which are made once."""
    known: _Known | None = weight.__dict__.get(_TABLES)
    if known is None or [*map(id, known.residents)] != [*map(id, weight.residents)]:
        _, rows, columns = weight.stored
        items, matrices, unit = weight.chunks_of_experts(), None, None
        if can_multiply(items, columns):
            matrices = coded_matrices(items, rows, columns)
            unit = PoolUnit(matrices.sources)
        known = weight.__dict__[_TABLES] = _Known(weight.residents, matrices, unit)
    return known
