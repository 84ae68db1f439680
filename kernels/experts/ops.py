"""Mixtures of experts with packed weights as torch knows them: the operators `neuzip::experts_*`.

`packed_experts` is a whole layer, the others are its steps. Gradients flow to x, to the weights of the sum
and to biases. A step is called directly where nothing but the kernels has a say, else as an operator, for
autograd and torch.compile. Where gradients are computed, rows that no pair fills are zeros, so that what is
computed from them in between has gradients of zero, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.experts import operators, steps
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.kernels.experts.routing import Routing, cleaned, fitting_tile, tile_bounds
from neuzip.kernels.packed_linear.ops import needs_operator
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

Activation = Gate | Callable[[Tensor], Tensor]
"""What is between the two products: a Gate, or a function of rows [rows, out of the first] of its own."""


def tile_rows(pairs: int, experts: int, device: torch.device, general: bool = False) -> int:
    """Rows of a tile for so many pairs: by the mean of an expert, from the table of the card.

    `general`: for the kernels that any GPU runs, where Hopper's do not take the weights.
    """
    return fitting_tile(_tile_bounds(device, general), pairs, experts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tile_bounds(device: torch.device, general: bool) -> tuple[tuple[int, float], ...]:
    """Rows of tiles, ascending, with the mean of pairs up to which each is best."""
    return tile_bounds(launch_for("experts.tile", device, hopper=is_hopper(device) and not general))


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
    biases = {"gate_up": gate_up_bias, "down": down_bias}
    _check(x, index, weights, gate_up, down, experts, biases)
    device = x.device
    general = not all(steps.multiplies_on_hopper(packed, experts) for packed in (gate_up, down))
    routing, rows = route(index, x, experts, tile_rows(index.numel(), experts, device, general))
    gate = Gate() if activation is None else activation
    if isinstance(gate, Gate):
        rows = gated_linear(rows, gate_up, experts, routing, gate, gate_up_bias)
    else:
        rows = _applied(gate, grouped_linear(rows, gate_up, experts, routing, gate_up_bias), routing)
    rows = grouped_linear(rows, down, experts, routing, down_bias)
    return weighted_sum(rows if norm is None else _applied(norm, rows, routing), routing, weights)


def _applied(function: Callable[[Tensor], Tensor], rows: Tensor, routing: Routing) -> Tensor:
    """A function of rows. Where it may have gradients of its own, rows that no pair fills are zeros."""
    if torch.is_grad_enabled() and not rows.requires_grad:  # else the operator has written them
        cleaned(rows, routing)
    return function(rows)


def compile_layer(
    gate_up: PackedTensor, down: PackedTensor, experts: int, tokens: int, k: int, has_bias: bool = False
) -> None:
    """Compile what a layer of so many tokens launches, silu(gate) * up included, for the current GPU.

    The weights have no values: they are on the meta device.
    """
    meta, dtype = torch.device("meta"), gate_up.dtype
    general = not all(steps.multiplies_on_hopper(packed, experts) for packed in (gate_up, down))
    x = torch.empty(tokens, gate_up.shape[1], dtype=dtype, device=meta)
    index = torch.empty(tokens, k, dtype=torch.int64, device=meta)
    first, second = (
        torch.empty(experts, one.shape[0] // experts, dtype=dtype, device=meta) if has_bias else None
        for one in (gate_up, down)
    )
    routing, rows = steps.route(index, x, experts, tile_rows(tokens * k, experts, meta, general))
    if has_bias or not steps.multiplies_on_hopper(gate_up, experts):
        rows = steps.grouped_linear(rows, gate_up, experts, routing, first)
        rows = steps.apply_gate(rows, routing, Gate())
    else:
        rows = steps.gated_linear(rows, gate_up, experts, routing)
    rows = steps.grouped_linear(rows, down, experts, routing, second)
    for shares in (torch.float32, dtype):
        steps.weighted_sum(rows, routing.position, torch.empty(tokens, k, dtype=shares, device=meta))


def route(index: Tensor, x: Tensor, experts: int, tile: int) -> tuple[Routing, Tensor]:
    """The routing of ids [tokens, k], and x [tokens, in] copied to rows [most_tiles * tile, in].

    Gradients flow to x.
    """
    if needs_operator(x, index, None):
        *arrays, rows = operators.route(index, x, experts, tile, _needs_gradient(x))
        return Routing(tile, *arrays), rows
    return steps.route(index, x, experts, tile)


def grouped_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows @ weights.T + bias of the expert of each tile: [most_tiles * tile, in] to [.., out], fp32 sums.

    packed  [experts * out, in]
    bias    [experts, out]

    Gradients flow to rows and bias. Raises ValueError and TypeError for rows that the weights do not take.
    """
    _check_rows(rows, packed)
    if needs_operator(rows, packed.words, bias):
        return operators.linear(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, bias, routing.tile, experts,
            _needs_gradient(rows, bias), *packed.arguments,
        )  # fmt: skip
    return steps.grouped_linear(rows, packed, experts, routing, bias)


def gated_linear(
    rows: Tensor, packed: PackedTensor, experts: int, routing: Routing, gate: Gate | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The activation of gate and up of each tile: [most_tiles * tile, in] to [.., out / 2].

    packed [experts * out, in], the rows of an expert as `gate` says. Gate and up are rounded to the dtype of
    the rows before they are combined, and so is each step of that.
    """
    gate = gate or Gate()
    if not (gate.is_plain and bias is None and steps.multiplies_on_hopper(packed, experts)):
        return apply_gate(grouped_linear(rows, packed, experts, routing, bias), routing, gate)
    if _needs_gradient(rows):
        return gated(grouped_linear(rows, packed, experts, routing), gate)
    _check_rows(rows, packed)
    if needs_operator(rows, packed.words, None):
        return operators.gated_linear(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, routing.tile, experts, *packed.arguments
        )
    return steps.gated_linear(rows, packed, experts, routing)


def apply_gate(rows: Tensor, routing: Routing, gate: Gate) -> Tensor:
    """The activation of rows [most_tiles * tile, 2 * inner] to [.., inner]: only of rows in use on a GPU."""
    if _needs_gradient(rows):
        return gated(rows, gate)
    if needs_operator(rows, routing.tiles, None):
        return operators.gate(  # type: ignore[no-any-return]
            rows, routing.position, routing.tiles, routing.count, routing.tile, *gate
        )
    return steps.apply_gate(rows, routing, gate)


def weighted_sum(rows: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """The sum over the slots of each token of weight * row: weights [tokens, k] to [tokens, columns].

    Products are rounded to what torch promotes both dtypes to, sums are fp32, in the order of the slots, and
    the result has the dtype of the rows. Slots whose id names no expert add nothing. Gradients flow to both.
    """
    if needs_operator(rows, routing.position, weights):
        return operators.weighted_sum(rows, routing.position, weights)  # type: ignore[no-any-return]
    return steps.weighted_sum(rows, routing.position, weights)


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: PackedTensor, down: PackedTensor, experts: int,
    biases: dict[str, Tensor | None],
) -> None:  # fmt: skip
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
        bias, shape = biases[name], (experts, packed.shape[0] // experts)
        if bias is not None and (bias.shape, bias.dtype, bias.device) != (shape, x.dtype, x.device):
            raise ValueError(
                f"`{name}_bias` is {bias.dtype} {tuple(bias.shape)} on {bias.device}; "
                f"it has to be {x.dtype} {shape} on {x.device}"
            )
    if gate_up.shape[1] != x.shape[1]:
        raise ValueError(f"`x` has {x.shape[1]} columns, `gate_up` has {gate_up.shape[1]}")


def _check_rows(rows: Tensor, packed: PackedTensor) -> None:
    """Raise ValueError or TypeError for rows, such as an activation's, that packed weights do not take."""
    if rows.shape[1] != packed.shape[1]:
        raise ValueError(f"rows have {rows.shape[1]} columns, the packed weights {packed.shape[1]}")
    if rows.dtype != packed.dtype:
        raise TypeError(f"rows are of {rows.dtype}, the packed weights of {packed.dtype}")


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
