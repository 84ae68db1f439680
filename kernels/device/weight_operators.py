"""The operators of a packed form of weights, as torch.compile, CUDA graphs and autograd know them.

    neuzip::NAME_decode        some rows, [rows, in]
    neuzip::NAME_decode_into   some rows into a tensor that is there
    neuzip::NAME_rows          rows by their numbers
    neuzip::NAME_linear        x @ weights.T + bias, with gradients of x and bias

Weights are passed as their arrays and numbers. On a GPU the arrays have to be complete when an operator is
called, not made by a kernel just launched: see `wait` of the form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor


class PackedForm(Protocol):
    """Weights [out, in] in a packed form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def arguments(self) -> tuple[Any, ...]: ...


FormT = TypeVar("FormT", bound=PackedForm)


@dataclass(frozen=True)
class WeightOperators(Generic[FormT]):
    """What the operators of a form call; `register` makes them.

    name          of the form, in the names of its operators
    arrays        names of its tensors, which stand first among the arguments
    numbers       the schema of its other arguments, such as "SymInt columns, ScalarType dtype"
    of_arguments  the weights of these arguments
    decode_to     decode_to(dense, weights, start) fills `dense` with rows from `start` on
    look_up       look_up(weights, ids) for ids [n], int32 or int64: [n, in]
    product       product(x, weights, bias): x @ weights.T + bias for x [..., in]
    """

    name: str
    arrays: tuple[str, ...]
    numbers: str
    of_arguments: Callable[..., FormT]
    decode_to: Callable[[Tensor, FormT, int], None]
    look_up: Callable[[FormT, Tensor], Tensor]
    product: Callable[[Tensor, FormT, Tensor | None], Tensor]

    @property
    def _weights(self) -> str:
        """The schema of weights. It is written out: that of `*weights` cannot be inferred."""
        return f"{', '.join(f'Tensor {name}' for name in self.arrays)}, {self.numbers}"

    def register(self) -> None:
        """Make the operators known to torch, once in a process."""
        self._register_decode()
        self._register_rows()
        self._register_linear()

    def _operator(self, what: str, arguments: str, result: str, changes: tuple[str, ...] = ()) -> Any:
        schema = f"({arguments}, {self._weights}) -> {result}"
        return torch.library.custom_op(f"neuzip::{self.name}_{what}", mutates_args=changes, schema=schema)

    def _empty(self, weights: FormT, *rows: int) -> Tensor:
        return torch.empty(*rows, weights.shape[1], dtype=weights.dtype, device=weights.device)

    def _register_decode(self) -> None:
        @self._operator("decode", "SymInt start, SymInt stop", "Tensor")
        def decode(start, stop, *weights):  # type: ignore[no-untyped-def]
            packed = self.of_arguments(*weights)
            dense = self._empty(packed, stop - start)
            self.decode_to(dense, packed, start)
            return dense

        @decode.register_fake
        def _(start, stop, *weights):  # type: ignore[no-untyped-def]
            return self._empty(self.of_arguments(*weights), stop - start)

        @self._operator("decode_into", "Tensor(a!) out, SymInt start", "()", ("out",))
        def decode_into(out, start, *weights):  # type: ignore[no-untyped-def]
            self.decode_to(out, self.of_arguments(*weights), start)

        @decode_into.register_fake
        def _(out, start, *weights):  # type: ignore[no-untyped-def]
            return None

    def _register_rows(self) -> None:
        @self._operator("rows", "Tensor ids", "Tensor")
        def rows(ids, *weights):  # type: ignore[no-untyped-def]
            packed = self.of_arguments(*weights)
            flat = ids.contiguous().view(-1)
            if packed.device.type != "cuda":
                _require_rows(flat, packed.shape[0])
            return self.look_up(packed, flat).view(*ids.shape, packed.shape[1])

        @rows.register_fake
        def _(ids, *weights):  # type: ignore[no-untyped-def]
            return self._empty(self.of_arguments(*weights), *ids.shape)

    def _register_linear(self) -> None:
        @self._operator("linear", "Tensor x, Tensor? bias", "Tensor")
        def linear(x, bias, *weights):  # type: ignore[no-untyped-def]
            return self.product(x, self.of_arguments(*weights), bias)

        @linear.register_fake
        def _(x, bias, *weights):  # type: ignore[no-untyped-def]
            return x.new_empty((*x.shape[:-1], self.of_arguments(*weights).shape[0]))

        linear.register_autograd(self._backward, setup_context=self._keep_for_backward)

    def _keep_for_backward(self, ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, bias, *weights = inputs
        count = len(self.arrays)
        ctx.save_for_backward(*weights[:count])
        ctx.numbers, ctx.has_bias = weights[count:], bias is not None

    def _backward(self, ctx, grad):  # type: ignore[no-untyped-def]
        packed = self.of_arguments(*ctx.saved_tensors, *ctx.numbers)
        out = packed.shape[0]
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            decode = getattr(torch.ops.neuzip, f"{self.name}_decode")
            grad_x = grad @ decode(0, out, *packed.arguments)
        if ctx.has_bias and ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, out).sum(0)
        return grad_x, grad_bias, *[None] * len(packed.arguments)


def _require_rows(ids: Tensor, count: int) -> None:
    """Raise IndexError for numbers of rows that there are not; only on a CPU, where nobody waits for them."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} of packed weights that have {count}")
