"""Packed weights that a graph names by a number in a tensor: for engines that store compiled graphs.

    weight_id = hold(weights)                                   int64 [1] on the CPU
    torch.ops.neuzip.held_linear(x, bias, weight_id, out)       x @ weights.T + bias
    torch.ops.neuzip.held_rows(ids, weight_id, columns, dtype)  the rows of the weights that ids name
    torch.ops.neuzip.held_decode(x, weight_id, out)             all weights, [out, in] for x [..., in]

The operators of `ops` take the arrays of packed weights. A compiled graph that calls those contains the
shapes of the arrays, which follow from the values of the weights: how many far words and escapes there are,
and how many low bits. The window is in the graph, too. An engine that stores the graph and runs it with
another checkpoint would compute with the window of the first one, and no two layers share a graph.

Here a graph contains only the shape of the matrix. The number in `weight_id` is read when an operator runs,
and names an entry of a table of this process. So a stored graph is right for every checkpoint of that shape,
and for each form of its weights: packed floats, packed codes of quantized weights, or a dense matrix.

The operators are for inference: no gradient flows. They call the implementations of `ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from neuzip.kernels.grid_linear import GridTensor
from neuzip.kernels.grid_linear import ops as grid_ops
from neuzip.kernels.packed_linear import ops
from neuzip.kernels.packed_linear.tensor import PackedTensor

T = TypeVar("T")

HeldWeights = PackedTensor | GridTensor | torch.Tensor
"""What a number names: a matrix [out, in] in one of three forms."""


class HeldTable(Generic[T]):
    """What this process has of a kind, by number, for as long as its owner keeps it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = itertools.count(1)

    def hold(self, entry: T) -> torch.Tensor:
        """A new number for `entry`, int64 [1] on the CPU. The caller has to keep `entry` alive."""
        number = next(self._numbers)
        self._entries[number] = entry
        return torch.tensor([number], dtype=torch.int64, device="cpu")

    def entry(self, number: torch.Tensor) -> T:
        """What has a number. Raises RuntimeError if this process holds nothing of that number."""
        entry = self._entries.get(int(number))
        if entry is None:
            raise RuntimeError(f"this process holds no {self._kind} of number {int(number)}")
        return entry


_WEIGHTS: HeldTable[HeldWeights] = HeldTable("packed weights")


def hold(weights: HeldWeights) -> torch.Tensor:
    """The number of weights, int64 [1] on the CPU. The caller has to keep `weights` alive."""
    return _WEIGHTS.hold(weights)


def held(weight_id: torch.Tensor) -> HeldWeights:
    """The weights of a number. Raises RuntimeError if this process has none of that number."""
    return _WEIGHTS.entry(weight_id)


def decoded(weights: HeldWeights) -> torch.Tensor:
    """The weights as a dense matrix [out, in]."""
    if isinstance(weights, GridTensor):
        return grid_ops.decode(weights)
    return ops.decode(weights) if isinstance(weights, PackedTensor) else weights


_library = torch.library.Library("neuzip", "FRAGMENT")  # type: ignore[no-untyped-call]


def _linear(x: torch.Tensor, bias: torch.Tensor | None, weight_id: torch.Tensor, out: int) -> torch.Tensor:
    weights = held(weight_id)
    if isinstance(weights, GridTensor):
        return grid_ops.product(x, weights, bias)
    if isinstance(weights, PackedTensor):
        return ops.product(x, weights.fetched(), bias)
    return F.linear(x, weights, bias)


def _linear_shape(
    x: torch.Tensor, bias: torch.Tensor | None, weight_id: torch.Tensor, out: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out))


def _rows(ids: torch.Tensor, weight_id: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    weights = held(weight_id)
    if isinstance(weights, GridTensor):
        return grid_ops.rows(weights, ids)
    return ops.rows(weights, ids) if isinstance(weights, PackedTensor) else F.embedding(ids, weights)


def _rows_shape(ids: torch.Tensor, weight_id: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty((*ids.shape, columns), dtype=dtype)


def _decode(x: torch.Tensor, weight_id: torch.Tensor, out: int) -> torch.Tensor:
    weights = decoded(held(weight_id))
    return weights.clone() if weights is held(weight_id) else weights  # an operator returns no view


def _decode_shape(x: torch.Tensor, weight_id: torch.Tensor, out: int) -> torch.Tensor:
    return x.new_empty((out, x.shape[-1]))


_SCHEMAS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "held_linear(Tensor x, Tensor? bias, Tensor weight_id, SymInt out) -> Tensor": (_linear, _linear_shape),
    "held_rows(Tensor ids, Tensor weight_id, SymInt columns, ScalarType dtype) -> Tensor": (
        _rows,
        _rows_shape,
    ),
    "held_decode(Tensor x, Tensor weight_id, SymInt out) -> Tensor": (_decode, _decode_shape),
}

for _schema, (_run, _shape) in _SCHEMAS.items():
    _name = _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"neuzip::{_name}", _shape, lib=_library)
