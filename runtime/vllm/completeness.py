"""Whether all weights of a model came: a missing tensor is an error, and never memory that nobody wrote.

vLLM checks little of a quantized model. What is checked here:

* a packed layer, experts too, has as many values as its shape says (vLLM counts them while they come);
* every other parameter is one of those that the model's `load_weights` returned;
* of a parameter that several tensors make up, such as qkv_proj, all tensors came;
* all experts of a layer have the same tensors, and of dense experts both parameters are filled or none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from neuzip.runtime.serving import EngineRefusal
from neuzip.runtime.vllm.experts import WEIGHTS, PackedExpertsMethod
from neuzip.runtime.vllm.methods import PackedWeightMethod

logger = init_logger("vllm.neuzip")

_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<number>\d+)(?P<after>\..*)")

SHOWN = 5
"""Names of missing tensors in an error, at most."""


def require_all_loaded(model: nn.Module, loaded: set[str] | None, names: set[str]) -> None:
    """Raise EngineRefusal if a weight of `model` has not come.

    `loaded` are the parameters that `load_weights` filled, None if the model does not say; `names` are the
    tensors of the checkpoint that it was given.
    """
    missing = sorted({*_incomplete_layers(model), *_missing_parts(model, names), *missing_experts(names)})
    if loaded is not None:
        missing += sorted(set(_unfilled(model, loaded)) - set(missing))
    else:
        logger.warning(
            "neuzip: %s does not tell what it loaded: missing tensors may go unnoticed", type(model)
        )
    if missing:
        raise EngineRefusal(
            f"the checkpoint lacks {_listed(missing)}, which {type(model).__name__} needs",
            "check the folder with `neuzip verify`, or compare its tensors with the model's config.json",
        )


def require_tensors(needed: Iterable[str], names: set[str], folder: str) -> None:
    """Raise EngineRefusal if a checkpoint lacks tensors that the model was filled with at its start."""
    missing = sorted(set(needed) - names)
    if missing:
        raise EngineRefusal(
            f"{folder} lacks {_listed(missing)}, which the running model has",
            "the engine keeps its weights; give a folder of the same tensors, or start vLLM again",
        )


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _incomplete_layers(model: nn.Module) -> Iterator[str]:
    """The packed layers that wait for values."""
    for prefix, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, PackedWeightMethod) and not method.is_complete(layer):
            yield f"{prefix}.weight"
        if isinstance(method, PackedExpertsMethod):
            yield from (f"{prefix}.{name}" for name in method.incomplete(layer))


def _unfilled(model: nn.Module, loaded: set[str]) -> Iterator[str]:
    """The parameters that vLLM has to be given and was not."""
    filled = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in loaded}
    for prefix, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, PackedWeightMethod | BaseKVCacheMethod):
            continue
        if isinstance(layer, RoutedExperts) and not isinstance(method, PackedExpertsMethod):
            weights = {f"{prefix}.{name}": getattr(layer, name, None) for name in WEIGHTS}
            lacking = [name for name, weight in weights.items() if id(weight) not in filled]
            yield from lacking if len(lacking) < len(weights) else ()  # else they may have come in other ways
            continue
        # vLLM makes parameters of its own in other layers with a method.
        if method is not None and not isinstance(layer, LinearBase | VocabParallelEmbedding):
            continue
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if id(parameter) not in filled and parameter.numel():  # which may be tied to one of another name
                yield name


def _missing_parts(model: nn.Module, names: set[str]) -> Iterator[str]:
    """The tensors of fused parameters that did not come though others of the same parameter came."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    known = names | set(mapper.apply_list(list(names)) if mapper is not None else ())
    copied = values_of_keys(getattr(model, "config", None))
    for prefix, _ in model.named_modules():
        before, _, last = prefix.rpartition(".")
        parts = [f"{before}.{part}.weight" for part in fused.get(last, ())]
        if any(part in known for part in parts):
            yield from (part for part in parts if part not in known and not part.endswith(copied))


def values_of_keys(config: Any) -> tuple[str, ...]:
    """The endings of tensors that a checkpoint lacks because vLLM loads the keys' weight for them, too.

    So it is in the layers of Gemma 4 with full attention.

    >>> from types import SimpleNamespace as Config
    >>> values_of_keys(Config(attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"]))
    ('.layers.1.self_attn.v_proj.weight',)
    """
    config = getattr(config, "text_config", config)
    if not getattr(config, "attention_k_eq_v", False):
        return ()
    kinds = enumerate(config.layer_types)
    return tuple(f".layers.{i}.self_attn.v_proj.weight" for i, kind in kinds if kind == "full_attention")


def missing_experts(names: Iterable[str]) -> list[str]:
    """The tensors that some experts of a layer lack, and others have.

    >>> missing_experts(["0.experts.0.up", "0.experts.1.up", "0.experts.1.down", "norm"])
    ['0.experts.0.down']
    """
    experts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        experts[match["before"]][match["number"]].add(match["after"])
    return [
        f"{before}{number}{after}"
        for before, numbers in experts.items()
        for after in sorted(set().union(*numbers.values()))
        for number, endings in numbers.items()
        if after not in endings
    ]
