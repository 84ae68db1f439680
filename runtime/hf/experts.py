"""Mixtures of experts with compressed weights: the experts implementation "neuzip" of transformers 5.

transformers calls it with the ids and the weights of the experts of each token where a config names it. The
class of a module's two parameters [experts, out, in] decides what runs:

    two PackedWeights               `kernels.experts`: experts in use are read, and the host waits for nothing
    two AnsWeights                  experts in use are decoded into a pool, and the host waits for nothing
    an AnsWeight and another, or    the module's own code, one by one: the host asks which are in use
    of odd sizes
    two dense ones                  `grouped_mm` of transformers
    a packed and a dense one, or    `grouped_mm`, for which the packed one is decoded as a whole
    an `exact` one

A parameter is dense that is too small to be packed, or would hardly become smaller.

Models whose experts are modules of their own, and not one parameter, have no such interface. Their linear
layers are compressed, and their own code chooses among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from neuzip.kernels.experts import ops
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.runtime.hf.quantization_config import EXPERTS as IMPLEMENTATION
from neuzip.runtime.residency import expert_modules, is_compressed
from neuzip.runtime.weights import AnsWeight, PackedWeight
from neuzip.runtime.weights.expert_pool import LIMIT, can_pool, has_aligned_parts, pooled_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CHOICE = "_experts_implementation"
"""The attribute of a config that names an implementation; None until somebody chooses, missing before 5."""

POOL = "_neuzip_pool_bytes"
"""The attribute of a module that says how many bytes its pool of decoded experts may have."""

LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
"""Attributes of modules that clamp gate and up, and scale the argument of the sigmoid."""

PROBE_ROWS, PROBE_INNER = 64, 16
"""Made-up rows of gate and up in which a module's own activation has to give the bits of a Gate."""

PROBE_LARGE = 1000.0
"""The scale of half of these rows: limits that are not among LIMITS show there."""

GATE = "_neuzip_gate"
"""The attribute of a module that holds the Gate which gives the bits of its activation; None if none does."""


def prefer_ours(config: PreTrainedConfig) -> None:
    """Have the experts of a model computed by neuzip, but where its config or a part of it names another way.

    Must come before the model is built, as transformers chooses then.
    """
    if getattr(config, CHOICE, IMPLEMENTATION) is None:
        setattr(config, CHOICE, {"": IMPLEMENTATION})  # a name alone would go to all parts
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            prefer_ours(part)


def release_others(model: nn.Module) -> None:
    """Let transformers choose the implementation for the parts of a model that have no compressed experts.

    A config that names ours, or a module that holds our Gate, would stop a process without neuzip to which it
    is sent.
    """
    for module in expert_modules(model):
        if not _compressed_parameters(module):
            vars(module).pop(GATE, None)
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or getattr(part.config, CHOICE, None) != IMPLEMENTATION:
            continue
        if not any(_compressed_parameters(module) for module in expert_modules(part)):
            setattr(part.config, CHOICE, {"": part.get_correct_experts_implementation(None)})


def has_single_experts(model: nn.Module, residency: str | None = None) -> bool:
    """Whether a model computes its experts one by one, and the host asks which of them are in use.

    With a `residency`: whether a model of dense weights would, with weights of that kind.
    """
    modules = [module for module in expert_modules(model) if hasattr(type(module), "_apply_gate")]
    if residency is not None:
        return residency == "ans" and not all(map(_would_pool, modules))
    return any(_is_single(module) for module in modules)


def choose_gates(model: nn.Module) -> None:
    """Find the Gate of each module with packed experts, before a compiler traces the module's products."""
    for module in expert_modules(model):
        weights = [weight for weight in _compressed_parameters(module) if isinstance(weight, PackedWeight)]
        if weights and _has_gate(module) and hasattr(module, "_apply_gate"):
            _gate_of(module, weights[0].stored_dtype)


def can_compile_experts(model: nn.Module) -> bool:
    """Whether torch.compile can trace the experts of a model: not those that are decoded into a pool."""
    return not has_single_experts(model) and not any(map(_is_pooled, expert_modules(model)))


def limit_expert_pool(model: nn.Module, nbytes: int) -> None:
    """Let the pool that experts coded by rANS are decoded to have at most so many bytes.

    All layers of a device share it. The smaller it is, the more rounds take turns in it. An expert that does
    not fit raises a NeuzipError when it is used.
    """
    for module in expert_modules(model):
        setattr(module, POOL, nbytes)


def _is_single(module: nn.Module) -> bool:
    implementation = getattr(getattr(module, "config", None), CHOICE, None)
    coded = any(isinstance(weight, AnsWeight) for weight in _compressed_parameters(module))
    return implementation == "eager" or (
        implementation == IMPLEMENTATION and coded and not _is_pooled(module)
    )


def _is_pooled(module: nn.Module) -> bool:
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return len(weights) == 2 and can_pool(*weights)


def _would_pool(module: nn.Module) -> bool:
    """Whether the experts of a module would be decoded into a pool if they were coded."""
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return len(weights) == 2 and all(has_aligned_parts(tuple(p.shape), p.dtype.itemsize) for p in weights)


def _compressed_parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters(recurse=False) if p.dim() == 3 and is_compressed(p)]


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a module of transformers: hidden_states [tokens, hidden] to [tokens, hidden].

    top_k_index    int64 or int32 [tokens, k]; ids that are no expert of this process add nothing
    top_k_weights  [tokens, k], or in early versions of transformers 5 [tokens, experts]
    """
    first = self.gate_up_proj if _has_gate(self) else self.up_proj
    second = self.down_proj
    if _is_grouped(first, self) and _is_grouped(second, self):
        return _packed_experts(self, hidden_states, top_k_index, top_k_weights, first, second)
    if can_pool(first, second):
        return _pooled_experts(self, hidden_states, top_k_index, top_k_weights, first, second)
    if isinstance(first, AnsWeight) or isinstance(second, AnsWeight):
        own: Callable[..., Tensor] = type(self).forward.__wrapped__
        return own(self, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    dense: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    return dense(self, hidden_states, top_k_index, top_k_weights)


def _packed_experts(
    module: Any, x: Tensor, index: Tensor, weights: Tensor, first: PackedWeight, second: PackedWeight
) -> Tensor:
    y = ops.packed_experts(
        x.to(first.stored_dtype), index, _weights_of(index, weights), first.packed, second.packed,
        first.stored[0], _activation(module, first.stored_dtype), *_biases(module), _norm(module),
    )  # fmt: skip
    return y.to(x.dtype)


def _pooled_experts(
    module: Any, x: Tensor, index: Tensor, weights: Tensor, first: AnsWeight, second: AnsWeight
) -> Tensor:
    one, other = _biases(module)
    y: Tensor = pooled_experts(
        x.to(first.stored_dtype), index, _weights_of(index, weights), first, second,
        transposed=getattr(module, "is_transposed", False),
        activation=_activation(module, first.stored_dtype), first_bias=one, second_bias=other,
        norm=_norm(module), limit=getattr(module, POOL, LIMIT),
    )  # fmt: skip
    return y.to(x.dtype)


def _weights_of(index: Tensor, weights: Tensor) -> Tensor:
    """The weights [tokens, k] of ids, of which weights [tokens, experts] may be given."""
    return weights if weights.shape == index.shape else weights.gather(1, index.long())


def _biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    if not getattr(module, "has_bias", False):
        return None, None
    name = "gate_up_proj_bias" if _has_gate(module) else "up_proj_bias"
    return getattr(module, name), module.down_proj_bias


def _norm(module: Any) -> Callable[[Tensor], Tensor] | None:
    return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None


def _is_grouped(weight: Tensor, module: nn.Module) -> TypeGuard[PackedWeight]:
    """Whether the kernels take a parameter: a whole packed matrix, stored as [experts, out, in]."""
    return (
        isinstance(weight, PackedWeight)
        and len(weight.stored) == 3
        and not weight.exact
        and weight.flipped == getattr(module, "is_transposed", False)
        and weight.stored[0] * weight.stored[1] == weight.packed.shape[0]
    )


def _has_gate(module: nn.Module) -> bool:
    """Whether the first product of an expert is of gate and up; transformers 5.0 knows no other."""
    return getattr(module, "has_gate", True)


def _activation(module: Any, dtype: torch.dtype) -> ops.Activation:
    """What is between the two products: a Gate that gives the bits of the module's own code, or that code."""
    if not _has_gate(module):
        return module.act_fn  # type: ignore[no-any-return]
    gate = _gate_of(module, dtype)
    return module._apply_gate if gate is None else gate


def _gate_of(module: Any, dtype: torch.dtype) -> Gate | None:
    """The Gate of a module, found once: None for an activation that is no Gate.

    A compiler cannot trace the search. It traces the activation itself where nobody has searched before.
    """
    if not hasattr(module, GATE):
        if torch.compiler.is_compiling():
            return None
        gates = (gate for gate in _candidates(module) if _gives_its_bits(module, gate, dtype))
        setattr(module, GATE, next(gates, None))
    return getattr(module, GATE)  # type: ignore[no-any-return]


def _candidates(module: nn.Module) -> Iterator[Gate]:
    limits = [limit for limit in _numbers(module, LIMITS) if 0 < limit < math.inf]  # models write 0 for none
    alphas = _numbers(module, ALPHAS)
    for interleaved in (False, True):
        for limit in (*limits, None):
            for alpha in (*alphas, None):
                yield Gate(interleaved, limit, alpha)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> list[float]:
    values = [getattr(module, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, float | int)]


def _gives_its_bits(module: Any, gate: Gate, dtype: torch.dtype) -> bool:
    """Whether a module's activation is a Gate, on made-up rows on the CPU, many of them beyond its limit."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBE_ROWS, 2 * PROBE_INNER, generator=generator, device="cpu")
    rows[::2] *= 4.0 if gate.limit is None else 2 * gate.limit
    rows[1::2] *= PROBE_LARGE
    rows = rows.to(dtype)
    with torch.no_grad():
        return torch.equal(module._apply_gate(rows), gated(rows, gate))
