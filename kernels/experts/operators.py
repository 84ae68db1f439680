"""The steps of a mixture of experts as operators `neuzip::experts_*`, for autograd and torch.compile.

On a GPU the arrays of weights have to be complete when one is called, see PackedTensor.wait. `clean` says
that rows that no pair fills are to be zeros, so that what is computed from them has gradients of zero.
"""

from __future__ import annotations

import torch

from neuzip.kernels.experts import steps
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.routing import Routing, cleaned, most_tiles, sums_by_expert
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor

_WEIGHTS = (
    f"{', '.join(f'Tensor {name}' for name in ARRAYS)}, "
    "SymInt columns, ScalarType dtype, SymInt low_bits, SymInt base, SymInt shift"
)
_ROUTING = "Tensor position, Tensor tiles, Tensor count"
_NUMBERS = len(ARRAYS) + 5
"""How many arguments `_WEIGHTS` are."""


@torch.library.custom_op(
    "neuzip::experts_route",
    mutates_args=(),
    schema="(Tensor index, Tensor x, SymInt experts, SymInt tile, bool clean)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def route(index, x, experts, tile, clean):  # type: ignore[no-untyped-def]
    routing, rows = steps.route(index, x, experts, tile)
    return routing.position, routing.tiles, routing.count, cleaned(rows, routing) if clean else rows


@route.register_fake
def _(index, x, experts, tile, clean):  # type: ignore[no-untyped-def]
    pairs = index.shape[0] * index.shape[1]
    most = most_tiles(pairs, experts, tile)
    position, tiles, count = (x.new_empty(shape, dtype=torch.int32) for shape in ((pairs,), (most, 4), (1,)))
    return position, tiles, count, x.new_empty(most * tile, x.shape[1])


def _keep_route(ctx, inputs, output):  # type: ignore[no-untyped-def]
    index, *_ = inputs
    ctx.save_for_backward(output[0])
    ctx.shape = index.shape


def _route_backward(ctx, *grads):  # type: ignore[no-untyped-def]
    (position,) = ctx.saved_tensors
    ones = torch.ones(ctx.shape, dtype=torch.float32, device=position.device)
    return None, torch.ops.neuzip.experts_sum(grads[-1], position, ones), None, None, None


route.register_autograd(_route_backward, setup_context=_keep_route)


@torch.library.custom_op(
    "neuzip::experts_linear",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, Tensor? bias, SymInt tile, SymInt experts, bool clean, {_WEIGHTS})"
    " -> Tensor",
)
def linear(rows, position, tiles, count, bias, tile, experts, clean, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    y = steps.grouped_linear(rows, PackedTensor.of_arguments(*weights), experts, routing, bias)
    return cleaned(y, routing) if clean else y


@linear.register_fake
def _(rows, position, tiles, count, bias, tile, experts, clean, *weights):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape[0], PackedTensor.of_arguments(*weights).shape[0] // experts)


def _keep_linear(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, position, tiles, count, _, tile, experts, _, *weights = inputs
    ctx.save_for_backward(position, tiles, count, *weights[: len(ARRAYS)])
    ctx.numbers, ctx.tile, ctx.experts = weights[len(ARRAYS) :], tile, experts


def _linear_backward(ctx, grad):  # type: ignore[no-untyped-def]
    position, tiles, count, *arrays = ctx.saved_tensors
    grad_rows = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.neuzip.experts_linear_backward(
            grad, position, tiles, count, ctx.tile, ctx.experts, *arrays, *ctx.numbers
        )
    if ctx.needs_input_grad[4]:
        grad_bias = sums_by_expert(grad, Routing(ctx.tile, position, tiles, count), ctx.experts)
    return grad_rows, None, None, None, grad_bias, *[None] * (3 + _NUMBERS)


linear.register_autograd(_linear_backward, setup_context=_keep_linear)


@torch.library.custom_op(
    "neuzip::experts_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ROUTING}, SymInt tile, SymInt experts, {_WEIGHTS}) -> Tensor",
)
def _linear_gradients(grad, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    grads = steps.gradients(grad, PackedTensor.of_arguments(*weights), experts, routing)
    return cleaned(grads, routing)


@_linear_gradients.register_fake
def _(grad, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[0], PackedTensor.of_arguments(*weights).shape[1])


@torch.library.custom_op(
    "neuzip::experts_gated_linear",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, SymInt tile, SymInt experts, {_WEIGHTS}) -> Tensor",
)
def gated_linear(rows, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    return steps.gated_linear(rows, PackedTensor.of_arguments(*weights), experts, routing)


@gated_linear.register_fake
def _(rows, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    out = PackedTensor.of_arguments(*weights).shape[0] // experts
    return rows.new_empty(rows.shape[0], out // 2)


@torch.library.custom_op(
    "neuzip::experts_gate",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, SymInt tile, bool interleaved, float? limit, float? alpha) -> Tensor",
)
def gate(rows, position, tiles, count, tile, *gate):  # type: ignore[no-untyped-def]
    return steps.apply_gate(rows, Routing(tile, position, tiles, count), Gate(*gate))


@gate.register_fake
def _(rows, position, tiles, count, tile, *gate):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


@torch.library.custom_op(
    "neuzip::experts_sum", mutates_args=(), schema="(Tensor rows, Tensor position, Tensor weights) -> Tensor"
)
def weighted_sum(rows, position, weights):  # type: ignore[no-untyped-def]
    return steps.weighted_sum(rows, position, weights)


@weighted_sum.register_fake
def _(rows, position, weights):  # type: ignore[no-untyped-def]
    return rows.new_empty(weights.shape[0], rows.shape[1])


def _keep_sum(ctx, inputs, output):  # type: ignore[no-untyped-def]
    rows, position, weights = inputs
    ctx.save_for_backward(rows if ctx.needs_input_grad[2] else rows[:0], position, weights)
    ctx.rows = rows.shape[0]


def _sum_backward(ctx, grad):  # type: ignore[no-untyped-def]
    rows, position, weights = ctx.saved_tensors
    at, there = position.long(), (position >= 0)[:, None]
    tokens, k = weights.shape
    grad_rows = grad_weights = None
    if ctx.needs_input_grad[0]:
        own = (grad[:, None] * weights[..., None]).to(grad.dtype).view(tokens * k, grad.shape[1])
        padded = grad.new_zeros(ctx.rows + 1, grad.shape[1])  # the last row takes what has none
        grad_rows = padded.index_copy(0, at.where(there[:, 0], ctx.rows), own)[: ctx.rows]
    if ctx.needs_input_grad[2]:
        own = rows[at.clamp(min=0)].masked_fill(~there, 0.0).view(tokens, k, grad.shape[1])
        grad_weights = (own.float() * grad[:, None].float()).sum(-1).to(weights.dtype)
    return grad_rows, None, grad_weights


weighted_sum.register_autograd(_sum_backward, setup_context=_keep_sum)
