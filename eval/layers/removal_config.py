"""The config of a model without some layers, and whether it describes the layers that are left."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuzip.errors import FormatError, NeuzipError, is_out_of_memory
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint
from neuzip.formats.config_section import SECTION, own_section, read_config
from neuzip.formats.safetensors_file import parse_json
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import skeleton_of
from neuzip.runtime.hf.messages import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NOTE = "dropped_layers"
"""Key of the dropped layers in our section of config.json."""

BY_LAYER = (
    "activation_sparsity_pattern", "block_types", "indexer_types", "intermediate_size", "kv_sharing_modes",
    "layer_rope_theta", "layer_types", "layers_block_type", "layers_num_experts", "mlp_layer_types",
    "no_rope_layers", "num_attention_heads", "num_key_value_heads", "per_layer_config", "swiglu_limits",
    "swiglu_limits_shared",
)  # fmt: skip
"""Entries of a config that, if they are lists, have an element per layer."""

NUMBERS = ("mlp_only_layers", "moe_layers", "rope_scaling_layers")
"""Entries that list numbers of layers."""

FIRST_FEW = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""Entries that say up to which layer something holds."""


def new_config(
    checkpoint: Checkpoint, config: PreTrainedConfig, remaining: Sequence[int], warnings: list[str]
) -> dict[str, Any]:
    """config.json with the layers that stay, and a note of those that do not."""
    path = checkpoint.root / "config.json"
    root = read_config(path)
    document = root
    if f"{ORIGINAL_FOLDER}/config.json" in checkpoint.others:
        document = read_config(checkpoint.root / ORIGINAL_FOLDER / "config.json")
    document = copy.deepcopy(document)
    text = config.get_text_config(decoder=True)
    _take_out_layers(_section_of(document, config, text), text, remaining)
    layers = text.num_hidden_layers
    own = {**own_section(document, path), **own_section(root, path)}
    attention = own.get("attention")
    if isinstance(attention, dict) and isinstance(attention.get("layers"), list):
        own["attention"] = attention | {"layers": [attention["layers"][n] for n in remaining]}
    if own.pop("activations", None) is not None:
        warnings.append(
            "config.json says how activations of ternary layers are quantised: this is not carried along"
        )
    earlier = own.get(NOTE)
    gone = [n for n in range(layers) if n not in remaining]
    own[NOTE] = [*(earlier if isinstance(earlier, list) else []), {"layers": gone, "of": layers}]
    return document | {SECTION: own}


def _section_of(document: dict[str, Any], config: PreTrainedConfig, text: PreTrainedConfig) -> dict[str, Any]:
    """The part of a config.json that the decoder's config is of. Raises NeuzipError if it is not found."""
    if text is config:
        return document
    for name, part in vars(config).items():
        if part is text:
            section = document.setdefault(name, {})
            if isinstance(section, dict):
                return section
    raise NeuzipError(f"{config.name_or_path}: config.json does not say where its decoder is described")


def _take_out_layers(section: dict[str, Any], config: PreTrainedConfig, remaining: Sequence[int]) -> None:
    """Write what a config says of the layers that stay. What it derives from their number is written too."""
    layers = config.num_hidden_layers
    section[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(remaining)
    for name in BY_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == layers:
            section[name] = [values[n] for n in remaining]
    for name in NUMBERS:
        numbers = getattr(config, name, None)
        if isinstance(numbers, list | tuple) and numbers:
            section[name] = [remaining.index(n) for n in numbers if n in remaining]
    for name in FIRST_FEW:
        bound = getattr(config, name, None)
        if isinstance(bound, int) and 0 < bound < layers:
            section[name] = sum(n < bound for n in remaining)
    if hasattr(config, "kept_layers") and hasattr(config, "trained_layers"):  # see runtime/norm_placement
        section["kept_layers"] = [(config.kept_layers or range(layers))[n] for n in remaining]
        section["trained_layers"] = config.trained_layers or layers


def refuse_named_layers(path: Path, document: dict[str, Any], prefix: str) -> None:
    """Raise NeuzipError where a config says by name which layers are quantised."""
    named = json.dumps(document.get("quantization_config"))
    if re.search(rf"{re.escape(prefix)}\d", named):
        raise NeuzipError(
            f"{path}: quantization_config of its config.json names single layers",
            "drop layers of the model that it was made of, and quantise what comes out",
        )


def laid_out(config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    """The model of a config, without values. Raises NeuzipError where transformers cannot make it."""
    try:
        with quiet_transformers():
            return skeleton_of(config)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NeuzipError(f"{path}: transformers cannot make a model of its config: {reason}") from error


def require_the_same(
    path: Path,
    old: PreTrainedModel,
    config: PreTrainedConfig,
    document: dict[str, Any],
    remaining: Sequence[int],
) -> None:
    """Raise NeuzipError unless the model of the new config is the old one without some layers."""
    try:
        with quiet_transformers():
            new_config = type(config).from_dict(copy.deepcopy(document))  # 4.57 adds entries to what it gets
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _not_without(path, f"transformers refuses its new config: {reason}") from error
    new = laid_out(new_config, path)
    before, after = decoder_layers(old), decoder_layers(new)
    if len(after) != len(remaining):
        raise _not_without(path, f"it would have {len(after)} layers in place of {len(remaining)}")
    for number, (at, layer) in enumerate(zip(remaining, after, strict=True)):
        difference = _difference(before[at], layer, at, number)
        if at != number and getattr(config, "scale_attn_by_inverse_layer_idx", False):
            difference = difference or "attn.scaling"  # 4.57 computes it in the forward pass
        if difference:
            raise _not_without(path, f"layer {at} would become another: {difference}")
    if _rest(old) != _rest(new):
        raise _not_without(path, "what is not in its layers would become another")
    types = [
        getattr(c.get_text_config(decoder=True), "layer_types", None) or [] for c in (config, new_config)
    ]
    if types[0] and [types[0][n] for n in remaining] != list(types[1]):
        raise _not_without(path, f"its layers would be {types[1]}")


def _not_without(path: Path, reason: str) -> NeuzipError:
    return NeuzipError(
        f"{path}: cannot do without these layers: {reason}", "choose others, with another `choice` or `drop`"
    )


def _difference(before: nn.Module, after: nn.Module, old: int, new: int) -> str | None:
    """The difference between a layer and the one with its new number, in words; None if there is none."""
    modules, others = dict(before.named_modules()), dict(after.named_modules())
    if modules.keys() != others.keys():
        return f"it has {sorted(modules.keys() ^ others.keys())[0]} or not"
    for name, module in modules.items():
        other = others[name]
        where = name or type(module).__name__
        if type(module) is not type(other):
            return f"{where} is a {type(other).__name__} in place of a {type(module).__name__}"
        shapes = [{n: p.shape for n, p in m.named_parameters(recurse=False)} for m in (module, other)]
        if shapes[0] != shapes[1]:
            return f"the parameters of {where} have other names or shapes"
        for key, value in _plain_attributes(module):
            now = getattr(other, key, None)
            is_number = type(value) is int and (value, now) == (old, new)
            if value != now and not is_number:
                return f"{where}.{key} is {now!r} in place of {value!r}"
    return None


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        values = value if isinstance(value, list | tuple) else [value]
        if not key.startswith("__") and all(isinstance(v, int | float | str | None) for v in values):
            yield key, value


def _rest(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Shapes of the parameters outside layers."""
    inside = {id(p) for p in decoder_layers(model).parameters()}
    return {name: p.shape for name, p in model.named_parameters() if id(p) not in inside}


def json_object(path: Path) -> dict[str, Any]:
    document = parse_json(path.read_bytes(), path)
    if not isinstance(document, dict):
        raise FormatError(path, "not a JSON object")
    return document
