"""Tensors without values that know how to get them: what a checkpoint is laid out with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from neuzip.runtime.residency import is_compressed

Memo = dict[int, Any]
"""Results of calls, by the ids of the calls."""


class LazyTensor(torch.Tensor):
    """A tensor on the meta device that knows how its values are made; what is made of it knows so as well.

    `sources` tells those apart that are made of other weights.
    """

    make: Callable[[Memo], torch.Tensor]
    sources: tuple[int, ...]

    @staticmethod
    def of(weight: torch.Tensor) -> LazyTensor:
        """A lazy tensor of a compressed weight; its values are made on the CPU."""
        like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        call = _Call(lambda: weight.dense().cpu(), (), {})  # type: ignore[attr-defined]
        return LazyTensor._of(like, call.result, (id(call),))

    @staticmethod
    def _of(like: torch.Tensor, make: Callable[[Memo], torch.Tensor], sources: tuple[int, ...]) -> LazyTensor:
        tensor = like.as_subclass(LazyTensor)
        tensor.make, tensor.sources = make, sources
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        call = _Call(func, args, kwargs)
        sources = {s for t in tree_leaves((args, kwargs)) if isinstance(t, LazyTensor) for s in t.sources}
        if isinstance(result, torch.Tensor):
            return cls._of(result, call.result, tuple(sorted(sources)))
        if isinstance(result, tuple | list):
            return type(result)(
                cls._of(part, _part(call, i), tuple(sorted(sources)))
                if isinstance(part, torch.Tensor)
                else part
                for i, part in enumerate(result)
            )
        return result  # a shape, a dtype, ...


class _Call:
    """A function that was called with lazy tensors, to be called with values."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs

    def result(self, memo: Memo) -> Any:
        """The function's result, on the CPU."""

        def value(x: Any) -> Any:
            if isinstance(x, LazyTensor):
                return x.make(memo)
            return x.cpu() if isinstance(x, torch.Tensor) else x

        if id(self) not in memo:
            memo[id(self)] = self._func(*tree_map(value, self._args), **tree_map(value, self._kwargs))
        return memo[id(self)]


def _part(call: _Call, i: int) -> Callable[[Memo], torch.Tensor]:
    return lambda memo: call.result(memo)[i]


def _on_meta(x: Any) -> Any:
    if isinstance(x, LazyTensor):
        return x.as_subclass(torch.Tensor)
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def lazy_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with a LazyTensor for each compressed weight."""
    return {
        name: LazyTensor.of(value) if is_compressed(value) else value for name, value in state_dict.items()
    }


def with_values(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors with the values of lazy ones, in the same order; what these are made of is soon let go."""
    values: dict[str, torch.Tensor] = {}
    waiting = [(t.sources, name) for name, t in tensors.items() if isinstance(t, LazyTensor)]
    for _, group in groupby(sorted(waiting), key=lambda item: item[0]):
        memo: Memo = {}
        values |= {name: tensors[name].make(memo) for _, name in group}
    return tensors | values
