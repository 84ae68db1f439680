"""Mixtures of experts coded by rANS: those in use are decoded into a pool, chosen on the device.

    route         which rows go to which expert, in tiles; nothing of it is known to the host
    decode        the experts in use, into slots of the pool: the first ones first
    multiply      the rows of these experts with them

A pool is memory that all layers share, of at most `limit` bytes. It has a slot for each expert that may be in
use, or as many as fit. If fewer fit, experts have their turn in rounds, whose number depends on sizes alone.
So all this can be captured in a CUDA graph. Both matrices of an expert are decoded by one launch where all
experts fit, as few blocks do not fill a GPU. For few tokens `expert_vectors` needs no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuzip.errors import NeuzipError
from neuzip.kernels.expert_pool.lists import ExpertsInUse
from neuzip.kernels.expert_pool.ops import experts_in_use, pool_linear, tile_rows
from neuzip.kernels.experts import ops as experts_ops
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.ops import Activation
from neuzip.kernels.experts.routing import sums_by_expert
from neuzip.kernels.rans.chosen import CodedItems, can_choose, coded_items
from neuzip.kernels.rans.coded import ALIGNMENT
from neuzip.kernels.rans.ops import ResidentTensor
from neuzip.runtime import buffers
from neuzip.runtime.buffers import PoolUnit
from neuzip.runtime.weights.ans import AnsWeight, require_decoder
from neuzip.runtime.weights.base import rows_at_a_time
from neuzip.runtime.weights.expert_vectors import vector_experts

LIMIT = 1 << 30
"""Bytes of a pool, at most, unless another limit is given."""

_TABLES = "_expert_pools"
"""The attribute of a layer's first weight that keeps its pools, by the number of parameters."""


@dataclass(frozen=True)
class _Form:
    """How the weights of a parameter lie in a slot."""

    out: int
    columns: int
    flipped: bool
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ExpertPool:
    """Parameters of one layer [experts, out, in], of which memory that is lent holds some experts."""

    forms: tuple[_Form, ...]
    items: CodedItems
    unit: PoolUnit

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert."""
        return self.items.slot_bytes

    def decode(self, used: ExpertsInUse, first: int, memory: Tensor) -> list[Tensor]:
        """Decode the experts `used.chosen[first:]` to memory, uint8: of each parameter [slots, out, in].

        There are as many slots as fit. The matrices are [in, out] where the parameter is flipped.
        """
        self.items.decode(used.chosen, first, memory)
        slots = memory.numel() // self.slot_bytes
        pools = []
        for form, region in zip(self.forms, self.items.regions, strict=True):
            flat = memory[region.start :].view(form.dtype)
            slot = self.slot_bytes // form.dtype.itemsize
            pool = flat.as_strided((slots, form.out, form.columns), (slot, form.columns, 1))
            pools.append(pool.mT if form.flipped else pool)
        return pools


@dataclass(frozen=True, eq=False)
class _KnownPool:
    """A pool, None for parameters that have none, and what it was made of: weights may be moved."""

    residents: tuple[tuple[ResidentTensor, ...], ...]
    pool: ExpertPool | None


def can_pool(*weights: Tensor) -> bool:
    """Whether these parameters are experts coded by rANS of which a device can decode those in a list."""
    coded = [weight for weight in weights if isinstance(weight, AnsWeight)]
    if len(coded) < len(weights) or any(len(weight.stored) != 3 for weight in coded):
        return False
    places = {(w.stored[0], w.stored_dtype, w.residents[0].memory.device) for w in coded}
    dtype = coded[0].stored_dtype
    return len(places) == 1 and dtype in (torch.bfloat16, torch.float16) and _known_pool(coded) is not None


def has_aligned_parts(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether experts [experts, out, in] of elements of so many bytes would be such, once they are coded."""
    edges = {edge for rows in rows_at_a_time(shape, itemsize) for edge in rows}
    return all(edge * shape[-1] * itemsize % ALIGNMENT == 0 for edge in edges)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pooled_experts(
    x: Tensor, index: Tensor, weights: Tensor, first: AnsWeight, second: AnsWeight, *,
    transposed: bool = False, activation: Activation | None = None, first_bias: Tensor | None = None,
    second_bias: Tensor | None = None, norm: Callable[[Tensor], Tensor] | None = None, limit: int = LIMIT,
) -> Tensor:  # fmt: skip
    """A mixture of experts: x [tokens, in] to [tokens, out], in the dtype of the experts.

    index       int64 or int32 [tokens, k]: experts of each token; ids outside 0 to experts - 1 add nothing
    weights     [tokens, k], any float dtype: what the result of each expert is multiplied by
    first       gate and up, [experts, 2 * inner, in], or [experts, inner, in] where `activation` takes that
    second      [experts, out, inner]
    transposed  first and second have their last two dimensions the other way round
    activation  a Gate, silu(gate) * up by default, or a function of rows [rows, 2 * inner] to [rows, inner]
    biases      [experts, 2 * inner] and [experts, out]
    norm        a function of rows [rows, out], before the weighted sum
    limit       bytes of the pool, at most

    Gradients flow to x, weights and biases. Functions see rows that no pair fills, which are undefined unless
    gradients are computed, and have to treat each row alone. Takes what `can_pool` takes. Raises NeuzipError
    where an expert needs more than `limit`.
    """
    experts = first.stored[0]
    require_decoder(x.device)
    if not index.numel():
        return x.new_zeros(len(x), second.shape[2 if transposed else 1])
    gate = Gate() if activation is None else activation
    if isinstance(gate, Gate) and norm is None and not transposed:
        y = vector_experts(x, index, weights, first, second, gate, first_bias, second_bias)
        if y is not None:
            return y
    routing, rows = experts_ops.route(index, x, experts, tile_rows(index.numel(), experts, x.device))
    used = experts_in_use(routing, experts)

    def activate(rows: Tensor) -> Tensor:
        return experts_ops.apply_gate(rows, routing, gate) if isinstance(gate, Gate) else gate(rows)

    matrices = _Matrix(first, transposed, first_bias), _Matrix(second, transposed, second_bias)
    rows = _both_products(rows, *matrices, used, activate, limit)
    return experts_ops.weighted_sum(rows if norm is None else norm(rows), routing, weights)


@dataclass(frozen=True)
class _Matrix:
    """A parameter, whether a product takes it as [in, out], and its bias."""

    weight: AnsWeight
    transposed: bool
    bias: Tensor | None

    def as_linear(self, pool: Tensor) -> Tensor:
        """Its experts in a pool, as [slots, out, in]."""
        return pool.mT if self.transposed else pool


def _both_products(
    rows: Tensor, first: _Matrix, second: _Matrix, used: ExpertsInUse,
    activate: Callable[[Tensor], Tensor], limit: int,
) -> Tensor:  # fmt: skip
    pool = _pool([first.weight, second.weight])
    nbytes = used.chosen.numel() * pool.slot_bytes
    if nbytes > limit or torch.is_grad_enabled():
        hidden = activate(_linear(rows, first, used, limit))
        return _linear(hidden, second, used, limit)

    def product(memory: Tensor) -> Tensor:
        one, other = pool.decode(used, 0, memory)
        hidden = activate(pool_linear(rows, first.as_linear(one), used, 0, first.bias))
        return pool_linear(hidden, second.as_linear(other), used, 0, second.bias)

    return buffers.lend(pool.unit, nbytes, product)


def _linear(rows: Tensor, matrix: _Matrix, used: ExpertsInUse, limit: int) -> Tensor:
    """One product: [rows, in] to [rows, out]. With gradients rows that no pair fills are zeros.

    So are they where what follows may have gradients of its own.
    """
    clean = torch.is_grad_enabled()
    y: Tensor = _PooledLinear.apply(rows, matrix.bias, matrix, used, limit, clean)  # type: ignore[no-untyped-call]
    return y


class _PooledLinear(torch.autograd.Function):
    """Decodes experts for the product, and once more for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor | None, matrix: _Matrix, used: ExpertsInUse, limit: int,
        clean: bool,
    ) -> Tensor:  # fmt: skip
        ctx.arguments = matrix, used, limit
        return _in_rounds(rows, matrix, used, limit, lambda pool: pool, bias, clean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matrix, used, limit = ctx.arguments
        rows = bias = None
        if ctx.needs_input_grad[0]:
            rows = _in_rounds(grad.contiguous(), matrix, used, limit, lambda pool: pool.mT, None, True)
        if ctx.needs_input_grad[1]:
            bias = sums_by_expert(grad, used.routing, matrix.weight.stored[0])
        return rows, bias, None, None, None, None


def _in_rounds(
    rows: Tensor, matrix: _Matrix, used: ExpertsInUse, limit: int,
    turn: Callable[[Tensor], Tensor], bias: Tensor | None, clean: bool,
) -> Tensor:  # fmt: skip
    """The product with as many experts at a time as fit; `clean`: zeros in rows that no pair fills."""
    pool = _pool([matrix.weight])
    slots = min(limit // pool.slot_bytes, used.chosen.numel())
    if not slots:
        raise NeuzipError(
            f"a decoded expert takes {pool.slot_bytes:,} bytes, and the pool of experts may have {limit:,}",
            "allow the pool more bytes",
        )

    def product(memory: Tensor) -> Tensor:
        y = None
        for first in range(0, used.chosen.numel(), slots):
            (dense,) = pool.decode(used, first, memory)
            weights = turn(matrix.as_linear(dense))
            if y is None:
                shape = rows.shape[0], weights.shape[1]
                y = rows.new_zeros(shape) if clean else rows.new_empty(shape)
            pool_linear(rows, weights, used, first, bias, y)
        assert y is not None
        return y

    return buffers.lend(pool.unit, slots * pool.slot_bytes, product)


def _pool(weights: Sequence[AnsWeight]) -> ExpertPool:
    pool = _known_pool(weights)
    if pool is None:
        raise ValueError("parts of these experts do not begin at multiples of 16 bytes")
    return pool


def _known_pool(weights: Sequence[AnsWeight]) -> ExpertPool | None:
    """The pool of some parameters, whose tables are made once; None if their parts are not aligned."""
    residents = tuple(weight.residents for weight in weights)
    known: dict[int, _KnownPool] = weights[0].__dict__.setdefault(_TABLES, {})
    entry = known.get(len(weights))
    if entry is None or not _same(entry.residents, residents):
        entry = known[len(weights)] = _KnownPool(residents, _new_pool(weights))
    return entry.pool


def _new_pool(weights: Sequence[AnsWeight]) -> ExpertPool | None:
    matrices = [weight.chunks_of_experts() for weight in weights]
    if not can_choose(matrices):
        return None
    items = coded_items(matrices)
    forms = tuple(_Form(w.stored[1], w.stored[2], w.flipped, w.stored_dtype) for w in weights)
    return ExpertPool(forms, items, PoolUnit(items.sources))


def _same(some: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> bool:
    return [[id(one) for one in row] for row in some] == [[id(one) for one in row] for row in others]
