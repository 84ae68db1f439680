"""A step of decoding with fewer kernels, and the same bits: norms, rotary embeddings, gated units.

    fused = FusedStep(model.modules())
    with fused.recording():     one step, to see what is asked for
        ...
    fused.choose()              compares kernels with the model's own code, on made-up numbers
    with fused.in_place():      steps
        ...

What is a norm, and of which kind, is not known by names of models: modules with one vector and an epsilon are
tried, and functions `apply_rotary_pos_emb` beside the modules of a model. What gives other bits for the
shapes of a step, as torch may add up in another order one day, stays as it is.

Modules that have nothing of their own and turn out to be SiLU only take notes in a step, until somebody asks
for what they should have computed. If it is multiplied by a tensor, both are one kernel.

A mask of yes and no becomes numbers once in a step; torch does so in every layer.

Ternary layers that get the same input one after the other, as those of queries, keys and values do, are one
launch for one token.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from neuzip.kernels.step import Norm, can_gate, can_rotate
from neuzip.kernels.ternary_linear import ternary_linears
from neuzip.runtime.activations import CLAMPED
from neuzip.runtime.bitlinear import BitLinear
from neuzip.runtime.hf.probes import is_silu, norm_like, same_rotation
from neuzip.runtime.hf.registry import registered

ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function that turns queries and keys."""

EPSILONS = ("variance_epsilon", "eps")


@dataclass
class _NormSite:
    """An RMS norm of a model, as far as one can see from outside."""

    module: nn.Module
    weight: Tensor
    eps: float
    calls: set[tuple[torch.Size, torch.dtype]] = field(default_factory=set)
    chosen: dict[tuple[torch.Size, torch.dtype], Norm] = field(default_factory=dict)

    def record(self, *arguments: Any, **options: Any) -> Any:
        if (x := _alone(arguments, options)) is not None:
            self.calls.add((x.shape, x.dtype))
        return type(self.module).forward(self.module, *arguments, **options)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        x = None if torch.is_grad_enabled() else _alone(arguments, options)
        norm = None if x is None else self.chosen.get((x.shape, x.dtype))
        if x is None or norm is None or not x.is_contiguous():
            return type(self.module).forward(self.module, *arguments, **options)
        from neuzip.kernels.step.triton import step as triton_step

        return triton_step.rms_norm(x, self.weight, self.eps, norm)


@dataclass
class _RotarySite:
    """The function of a Python module that turns queries and keys."""

    module: ModuleType
    original: Callable[..., Any]
    calls: set[tuple[Any, ...]] = field(default_factory=set)
    chosen: set[tuple[Any, ...]] = field(default_factory=set)

    def record(self, *arguments: Any, **options: Any) -> Any:
        if (key := _rotary_key(arguments, options)) is not None:
            self.calls.add(key)
        return self.original(*arguments, **options)

    def call(self, *arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled() and _rotary_key(arguments, options) in self.chosen:
            from neuzip.kernels.step.triton import step as triton_step

            return triton_step.rotated(*arguments)
        return self.original(*arguments, **options)


@dataclass
class _GateSite:
    """A module that may be SiLU: it has no parameters, and is called with one tensor."""

    module: nn.Module
    calls: set[tuple[torch.dtype, torch.device]] = field(default_factory=set)
    chosen: set[tuple[torch.dtype, torch.device]] = field(default_factory=set)

    def record(self, *arguments: Any, **options: Any) -> Any:
        output = type(self.module).forward(self.module, *arguments, **options)
        x = _alone(arguments, options)
        if x is not None and type(output) is Tensor and can_gate(x, output):
            self.calls.add((x.dtype, x.device))
        return output

    def forward(self, *arguments: Any, **options: Any) -> Any:
        x = None if torch.is_grad_enabled() else _alone(arguments, options)
        if x is not None and (x.dtype, x.device) in self.chosen:
            return _DeferredGate.of(x, self.module)
        return type(self.module).forward(self.module, *arguments, **options)


class _DeferredGate(Tensor):
    """What a module makes of `gate`: computed when it is used, unless it is multiplied by its like."""

    gate: Tensor
    module: nn.Module
    _output: Tensor | None

    @classmethod
    def of(cls, gate: Tensor, module: nn.Module) -> _DeferredGate:
        deferred = gate.as_subclass(cls)
        deferred.gate, deferred.module, deferred._output = gate, module, None
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and not kwargs and len(args) == 2:
            deferred, other = args if type(args[0]) is cls else reversed(args)
            if type(other) is Tensor and can_gate(deferred.gate, other):
                from neuzip.kernels.step.triton import step as triton_step

                return triton_step.gated(deferred.gate, other)
        args, kwargs = tree_map_only(cls, cls._computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _computed(self) -> Tensor:
        if self._output is None:
            self._output = type(self.module).forward(self.module, self.gate)
        return self._output


_PRODUCTS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}


@dataclass
class _SharedInput:
    """Ternary layers that are called one after the other with the same input."""

    layers: tuple[BitLinear, ...]
    _input: Tensor | None = None
    _products: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, number: int, x: Tensor) -> Tensor:
        if number and x is self._input and number in self._products:
            y = self._products.pop(number)
            if not self._products:
                self._input = None
            return y
        layer = self.layers[number]
        self._input, self._products = None, {}
        if number or x.numel() != layer.in_features or torch.is_grad_enabled():
            return BitLinear.forward(layer, x)
        weights = [layer.ternary for layer in self.layers]
        first, *others = ternary_linears(x, weights, activation=layer._activation, clamped=CLAMPED)  # type: ignore[arg-type]
        self._input, self._products = x, dict(enumerate(others, 1))
        return first


class FusedStep:
    """What can be fused in a step of modules on one GPU, whose weights stay where they are: see above."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._norms = [site for module in modules if (site := _norm_site(module)) is not None]
        beside = {sys.modules.get(type(module).__module__) for module in modules}
        self._rotary = [
            _RotarySite(place, vars(place)[ROTARY])
            for place in beside
            if place is not None and callable(vars(place).get(ROTARY))
        ]
        self._gates = [_GateSite(module) for module in modules if _may_be_a_gate(module)]
        self._ternary = [m for m in modules if type(m) is BitLinear and "forward" not in vars(m)]
        self._calls: list[tuple[BitLinear, Tensor]] = []
        self._shared: list[_SharedInput] = []
        self._masks = bool(modules)

    @property
    def norms(self) -> int:
        """How many norms are one kernel."""
        return sum(bool(site.chosen) for site in self._norms)

    @property
    def rotary(self) -> bool:
        """Whether rotary embeddings are."""
        return any(site.chosen for site in self._rotary)

    @property
    def gates(self) -> int:
        """How many gated units are one kernel, if what SiLU makes is multiplied by something."""
        return sum(bool(site.chosen) for site in self._gates)

    @property
    def products(self) -> int:
        """How many products of ternary layers go along with others."""
        return sum(len(shared.layers) - 1 for shared in self._shared)

    def __str__(self) -> str:
        parts = [f"{self.norms} norms"] * bool(self.norms) + ["rotary embeddings"] * self.rotary
        parts += [f"{self.gates} gated units"] * bool(self.gates)
        parts += [f"{self.products} products with others"] * bool(self.products)
        *most, last = parts or ["nothing"]
        return f"{', '.join(most)} and {last}" if most else last

    def recording(self) -> AbstractContextManager[None]:
        """Within which steps run as ever, and what they call is recorded."""
        self._calls.clear()
        return self._with("record", "record", masks=False)

    def in_place(self) -> AbstractContextManager[None]:
        """While steps run: with what was chosen."""
        return self._with("forward", "call", masks=self._masks)

    def choose(self) -> None:
        """Compare, for all that was asked for."""
        known: dict[Any, Norm | None] = {}
        with torch.no_grad():
            for site in self._norms:
                for shape, dtype in site.calls:
                    key = type(site.module), site.weight.dtype, shape, dtype, _flags(site.module)
                    if key not in known:
                        known[key] = norm_like(site.module, site.weight, site.eps, shape, dtype)
                    if (norm := known[key]) is not None:
                        site.chosen[shape, dtype] = norm
            for rotary in self._rotary:
                rotary.chosen = {key for key in rotary.calls if same_rotation(rotary.original, *key)}
            self._choose_gates()
        self._shared = list(_sharing(self._calls))
        self._calls.clear()

    def _choose_gates(self) -> None:
        known: dict[Any, bool] = {}
        for site in self._gates:
            for call in site.calls:
                kind = type(site.module), call, _flags(site.module)
                if kind not in known:
                    known[kind] = is_silu(site.module, *call)
                if known[kind]:
                    site.chosen.add(call)

    @contextmanager
    def _with(self, of_norms: str, of_rotary: str, *, masks: bool) -> Iterator[None]:
        with ExitStack() as stack:
            sites: list[_NormSite | _GateSite] = [*self._norms, *self._gates]
            for site in sites:
                vars(site.module)["forward"] = getattr(site, of_norms)
                stack.callback(vars(site.module).pop, "forward")
            for rotary in self._rotary:
                setattr(rotary.module, ROTARY, getattr(rotary, of_rotary))
                stack.callback(setattr, rotary.module, ROTARY, rotary.original)
            for module, forward in self._ternary_forwards(of_norms):
                vars(module)["forward"] = forward
                stack.callback(vars(module).pop, "forward")
            if masks:
                stack.enter_context(_additive_masks())
            yield

    def _ternary_forwards(self, what: str) -> Iterator[tuple[BitLinear, Callable[[Tensor], Tensor]]]:
        """What is called in place of ternary layers."""
        if what == "record":
            yield from ((layer, partial(self._record, layer)) for layer in self._ternary)
        for shared in self._shared if what == "forward" else ():
            yield from ((layer, partial(shared.forward, i)) for i, layer in enumerate(shared.layers))

    def _record(self, layer: BitLinear, x: Tensor) -> Tensor:
        self._calls.append((layer, x))
        return BitLinear.forward(layer, x)


def _sharing(calls: Iterable[tuple[BitLinear, Tensor]]) -> Iterator[_SharedInput]:
    """Layers called one after the other with one token, the same, and that a launch takes together."""

    def key(call: tuple[BitLinear, Tensor]) -> tuple[Any, ...]:
        layer, x = call
        alone = x.numel() != layer.in_features or layer.bias is not None or layer.ternary.grouped
        return id(x), layer._activation, layer.scale.dim(), id(layer) if alone else 0

    seen: set[BitLinear] = set()  # blocks may share layers
    for _, group in groupby(calls, key):
        layers = tuple(layer for layer, _ in group)
        alone = len(layers) == 1 or len(layers) > len(set(layers)) or not seen.isdisjoint(layers)
        if not alone and layers[0]._activation != "none":
            seen.update(layers)
            yield _SharedInput(layers)


@contextmanager
def _additive_masks() -> Iterator[None]:
    """Have transformers make masks for SDPA of numbers, for this thread: 0 and minus infinity, as torch does.

    Of the dtype of what is attended to.
    """
    make, here = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], threading.get_ident()

    def additive(*arguments: Any, **options: Any) -> Any:
        mask = make(*arguments, **options)
        yes_or_no = isinstance(mask, Tensor) and mask.dtype == torch.bool and "dtype" in options
        if not yes_or_no or threading.get_ident() != here:
            return mask
        return torch.zeros_like(mask, dtype=options["dtype"]).masked_fill_(~mask, float("-inf"))

    with registered(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", additive):
        yield


def _norm_site(module: nn.Module) -> _NormSite | None:
    """A module that may be an RMS norm: one vector, an epsilon, and a forward method of its class."""
    parts = *module.children(), *module.buffers()
    if parts or "forward" in vars(module):
        return None
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    if len(parameters) != 1 or weight is None or type(weight.data) is not Tensor:
        return None
    if weight.dim() != 1 or not weight.is_contiguous() or not isinstance(eps, float):
        return None
    return _NormSite(module, weight, eps)


def _alone(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """The tensor with which a module is called, if that is all."""
    return arguments[0] if len(arguments) == 1 and not options and type(arguments[0]) is Tensor else None


def _may_be_a_gate(module: nn.Module) -> bool:
    """Whether a module has nothing but a forward method of its class."""
    parts = *module.children(), *module.buffers(), *module.parameters()
    return not parts and "forward" not in vars(module)


def _flags(module: nn.Module) -> frozenset[tuple[str, Any]]:
    """What may make a module of a class another than the next one: its attributes, functions among them."""
    plain = (bool, int, float, str, tuple)
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return frozenset((name, v if isinstance(v, plain) else id(v)) for name, v in own.items())


def _rotary_key(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a rotation depends on, for queries, keys, cos and sin without more; None for other calls."""
    if options or len(arguments) != 4 or any(type(tensor) is not Tensor for tensor in arguments):
        return None
    q, k, cos, _ = arguments
    return (q.shape, k.shape, cos.shape, q.dtype, q.device) if can_rotate(*arguments) else None
