"""Mixtures of experts with packed weights as torch knows them: the operators `neuzip::experts_*`.

`packed_experts` is a whole layer, the others are its steps. Gradients flow to x, to the weights of the sum
and to biases. A step is called directly where nothing but the kernels has a say, else as an operator, for
autograd and torch.compile. Where gradients are computed, rows that no pair fills are zeros, so that what is
computed from them in between has gradients of zero, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.experts import routing as plain
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.experts.routing import EXPERT, USED, Routing, most_tiles, runs
from neuzip.kernels.packed_linear.ops import decode, needs_operator
from neuzip.kernels.packed_linear.tensor import ARRAYS, PackedTensor
from neuzip.kernels.tuning import launch_for

Activation = Gate | Callable[[Tensor], Tensor]
"""What is between the two products: a Gate, or a function of rows [rows, out of the first] of its own."""


def tile_rows(pairs: int, experts: int, device: torch.device, general: bool = False) -> int:
    """Rows of a tile for so many pairs: by the mean of an expert, from the table of the card.

    `general`: for the kernels that any GPU runs, where Hopper's do not take the weights.
    """
    bounds: tuple[tuple[int, float], ...] = _tile_bounds(device, general)
    for rows, mean in bounds:
        if pairs <= mean * experts:
            return rows
    return bounds[-1][0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tile_bounds(device: torch.device, general: bool) -> tuple[tuple[int, float], ...]:
    """Rows of tiles, ascending, with the mean of pairs up to which each is best."""
    use = launch_for("experts.tile", device, hopper=is_hopper(device) and not general)
    return tuple((int(name.removeprefix("rows_")), mean) for name, mean in use.items())


def packed_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: PackedTensor, down: PackedTensor, experts: int,
    activation: Activation | None = None, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """A mixture of experts: x [tokens, in] to [tokens, out], in the dtype of the packed weights.

    index       int64 or int32 [tokens, k]: experts of each token; ids outside 0 to experts - 1 add nothing
    weights     [tokens, k], any float dtype: what the result of each expert is multiplied by
    gate_up     packed [experts * 2 * inner, in], or [experts * inner, in] where `activation` takes that
    down        packed [experts * out, inner]
    activation  a Gate, silu(gate) * up by default, or a function of rows [rows, 2 * inner] to [rows, inner]
    biases      gate_up_bias [experts, 2 * inner], down_bias [experts, out]
    norm        a function of rows [rows, out], before the weighted sum

    Functions see rows that no pair fills, which are undefined unless gradients are computed, and have to
    treat each row alone. Raises ValueError and TypeError for what does not go together.
    """
    _check(x, index, weights, gate_up, down, experts)
    device = x.device
    general = not (_multiplies_by_gluon(gate_up, experts) and _multiplies_by_gluon(down, experts))
    routing, rows = route(index, x, experts, tile_rows(index.numel(), experts, device, general))
    gate = Gate() if activation is None else activation
    if isinstance(gate, Gate):
        rows = gated_linear(rows, gate_up, experts, routing, gate, gate_up_bias)
    else:
        rows = gate(grouped_linear(rows, gate_up, experts, routing, gate_up_bias))
    rows = grouped_linear(rows, down, experts, routing, down_bias)
    return weighted_sum(rows if norm is None else norm(rows), routing, weights)


def route(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    """The routing of ids [tokens, k], and x [tokens, in] copied to rows [most_tiles * tile, in].

    Gradients flow to x.
    """
    if needs_operator(x, index, None):
        *arrays, rows = torch.ops.neuzip.experts_route(index, x, experts, tile, _needs_gradient(x))
        return Routing(tile, *arrays), rows
    return _route_rows(index, x, experts, tile)


def grouped_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None = None
) -> Tensor:
    """rows @ weights.T + bias of the expert of each tile: [most_tiles * tile, in] to [.., out], fp32 sums.

    packed [experts * out, in], bias [experts, out]. Gradients flow to rows and bias.
    """
    if needs_operator(rows, packed.words, bias):
        return torch.ops.neuzip.experts_linear(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, bias, routing.tile, experts,
            _needs_gradient(rows, bias), *packed.arguments,
        )  # fmt: skip
    return _multiply(rows, packed, experts, routing, bias)


def gated_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, gate: Gate | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The activation of gate and up of each tile: [most_tiles * tile, in] to [.., out / 2].

    packed [experts * out, in], the rows of an expert as `gate` says. Gate and up are rounded to the dtype of
    the rows before they are combined, and so is each step of that.
    """
    gate = gate or Gate()
    if not (gate.is_plain and bias is None and _multiplies_by_gluon(packed, experts)):
        return apply_gate(grouped_linear(rows, packed, experts, routing, bias), routing, gate)
    if _needs_gradient(rows):
        return gated(grouped_linear(rows, packed, experts, routing), gate)
    if needs_operator(rows, packed.words, None):
        return torch.ops.neuzip.experts_gated_linear(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, routing.tile, experts, *packed.arguments
        )
    return _gluon().gated_linear(rows, packed, experts, routing)  # type: ignore[no-any-return]


def apply_gate(rows: Tensor, routing: Routing, gate: Gate) -> Tensor:
    """The activation of rows [most_tiles * tile, 2 * inner] to [.., inner]: only of rows in use on a GPU."""
    if _needs_gradient(rows):
        return gated(rows, gate)
    if needs_operator(rows, routing.tiles, None):
        return torch.ops.neuzip.experts_gate(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, routing.tile, *gate
        )
    return _gate_rows(rows, routing, gate)


def weighted_sum(rows: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """The sum over the slots of each token of weight * row: weights [tokens, k] to [tokens, columns].

    Products are rounded to what torch promotes both dtypes to, sums are fp32, in the order of the slots, and
    the result has the dtype of the rows. Slots whose id names no expert add nothing. Gradients flow to both.
    """
    if needs_operator(rows, routing.position, weights):
        return torch.ops.neuzip.experts_sum(rows, routing.position, weights)  # type: ignore[no-any-return]
    return _sum_rows(rows, routing.position, weights)


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: PackedTensor, down: PackedTensor, experts: int
) -> None:
    """Raise ValueError or TypeError for what `packed_experts` does not take."""
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(x):
        raise ValueError(
            f"x [tokens, in], index and weights [tokens, k] have shapes {tuple(x.shape)}, "
            f"{tuple(index.shape)} and {tuple(weights.shape)}"
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`index`: ids of experts are int32 or int64, not {index.dtype}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"`weights` are of a float dtype, not {weights.dtype}")
    for name, packed in (("gate_up", gate_up), ("down", down)):
        if experts < 1 or packed.shape[0] % experts:
            raise ValueError(f"`{name}` has {packed.shape[0]} rows, which are not those of {experts} experts")
        if packed.dtype != x.dtype:
            raise TypeError(f"`{name}` is of {packed.dtype}, x of {x.dtype}; cast x first")
        if packed.device != x.device:
            raise ValueError(f"`{name}` is on {packed.device}, x is on {x.device}")
    if gate_up.shape[1] != x.shape[1]:
        raise ValueError(f"`x` has {x.shape[1]} columns, `gate_up` has {gate_up.shape[1]}")


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# The steps.


def _route_rows(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    return plain.route(index, x, experts, tile)


def _multiply(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None
) -> Tensor:
    if _multiplies_by_gluon(packed, experts):
        return _gluon().grouped_linear(rows, packed, experts, routing, bias)  # type: ignore[no-any-return]
    out = packed.shape[0] // experts
    y = torch.empty(len(rows), out, dtype=rows.dtype, device=rows.device)
    for expert, own in runs(routing):
        weight = decode(packed, slice(expert * out, (expert + 1) * out))
        y[own] = F.linear(rows[own], weight, None if bias is None else bias[expert])
    return y


def _multiply_gradients(grad: Tensor, packed: PackedTensor, experts: int, routing: Routing) -> Tensor:
    """Gradients of rows, zeros where no pair fills them: [most_tiles * tile, out] to [.., in]."""
    out, columns = packed.shape[0] // experts, packed.shape[1]
    grads = torch.zeros(len(grad), columns, dtype=grad.dtype, device=grad.device)
    for expert, own in runs(routing):
        grads[own] = grad[own] @ decode(packed, slice(expert * out, (expert + 1) * out))
    return grads


def _gate_rows(rows: Tensor, routing: Routing, gate: Gate) -> Tensor:
    return gated(rows, gate)


def _sum_rows(rows: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    tokens, k = weights.shape
    at = position.long().view(tokens, k)
    sums = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(k):
        there = at[:, slot, None] >= 0
        product = rows[at[:, slot].clamp(min=0)] * weights[:, slot, None]
        sums += torch.where(there, product, 0.0)
    return sums.to(rows.dtype)


def _multiplies_by_gluon(packed: PackedTensor, experts: int) -> bool:
    """Whether the kernels for Hopper take the weights."""
    if packed.words.is_cuda and is_hopper(packed.device):
        return bool(_gluon().can_multiply(packed, experts))
    return False


@functools.cache
def _gluon() -> Any:
    """The products on Hopper, which only a machine with Triton can import."""
    from neuzip.kernels.experts.gluon import grouped  # type: ignore[import-not-found]

    return grouped


# The operators. On a GPU the arrays of weights have to be complete when one is called: see PackedTensor.wait.

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
def _route(index, x, experts, tile, clean):  # type: ignore[no-untyped-def]
    routing, rows = _route_rows(index, x, experts, tile)
    return routing.position, routing.tiles, routing.count, _cleaned(rows, routing) if clean else rows


@_route.register_fake
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


_route.register_autograd(_route_backward, setup_context=_keep_route)


@torch.library.custom_op(
    "neuzip::experts_linear",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, Tensor? bias, SymInt tile, SymInt experts, bool clean, {_WEIGHTS})"
    " -> Tensor",
)
def _linear(rows, position, tiles, count, bias, tile, experts, clean, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    y = _multiply(rows, PackedTensor.of_arguments(*weights), experts, routing, bias)
    return _cleaned(y, routing) if clean else y


@_linear.register_fake
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
        there = _in_use(Routing(ctx.tile, position, tiles, count))
        own = tiles[:, EXPERT].repeat_interleave(ctx.tile).where(there, -1)
        chosen = own == torch.arange(ctx.experts, device=own.device)[:, None]
        grad_bias = chosen.to(grad.dtype) @ grad.masked_fill(~there[:, None], 0.0)
    return grad_rows, None, None, None, grad_bias, *[None] * (3 + _NUMBERS)


_linear.register_autograd(_linear_backward, setup_context=_keep_linear)


@torch.library.custom_op(
    "neuzip::experts_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ROUTING}, SymInt tile, SymInt experts, {_WEIGHTS}) -> Tensor",
)
def _linear_gradients(grad, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    return _multiply_gradients(grad.contiguous(), PackedTensor.of_arguments(*weights), experts, routing)


@_linear_gradients.register_fake
def _(grad, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    return grad.new_empty(grad.shape[0], PackedTensor.of_arguments(*weights).shape[1])


@torch.library.custom_op(
    "neuzip::experts_gated_linear",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, SymInt tile, SymInt experts, {_WEIGHTS}) -> Tensor",
)
def _gated_linear(rows, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    routing = Routing(tile, position, tiles, count)
    return _gluon().gated_linear(rows, PackedTensor.of_arguments(*weights), experts, routing)


@_gated_linear.register_fake
def _(rows, position, tiles, count, tile, experts, *weights):  # type: ignore[no-untyped-def]
    out = PackedTensor.of_arguments(*weights).shape[0] // experts
    return rows.new_empty(rows.shape[0], out // 2)


@torch.library.custom_op(
    "neuzip::experts_gate",
    mutates_args=(),
    schema=f"(Tensor rows, {_ROUTING}, SymInt tile, bool interleaved, float? limit, float? alpha) -> Tensor",
)
def _gate(rows, position, tiles, count, tile, *gate):  # type: ignore[no-untyped-def]
    return _gate_rows(rows, Routing(tile, position, tiles, count), Gate(*gate))


@_gate.register_fake
def _(rows, position, tiles, count, tile, *gate):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


@torch.library.custom_op(
    "neuzip::experts_sum", mutates_args=(), schema="(Tensor rows, Tensor position, Tensor weights) -> Tensor"
)
def _sum(rows, position, weights):  # type: ignore[no-untyped-def]
    return _sum_rows(rows.contiguous(), position, weights)


@_sum.register_fake
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


_sum.register_autograd(_sum_backward, setup_context=_keep_sum)


def _in_use(routing: Routing) -> Tensor:
    """Which rows a pair fills: bool [most_tiles * tile]."""
    tiles, device = routing.tiles, routing.tiles.device
    used = torch.where(torch.arange(len(tiles), device=device) < routing.count, tiles[:, USED], 0)
    return (torch.arange(routing.tile, device=device) < used[:, None]).flatten()


def _cleaned(rows: Tensor, routing: Routing) -> Tensor:
    """Rows of zeros where no pair fills them."""
    return rows.masked_fill_(~_in_use(routing)[:, None], 0.0)
