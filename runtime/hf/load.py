"""A checkpoint, plain or compressed, as a live model, its weights dense or compressed in memory.

transformers builds the module, renames, merges and ties tensors, and computes what is not stored, as in every
`from_pretrained`. It is handed tensors that are decoded when it asks for their values, a few at a time: the
weights exist once, in the model. Those that are to stay compressed are so before it asks for the next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from neuzip.compress.device import AnyDevice
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.hub.download import resolve_source
from neuzip.formats.hub.notes import log
from neuzip.runtime.devices import DEVICE_MAPS, place_of
from neuzip.runtime.hf.attention import use_recorded
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY
from neuzip.runtime.hf.config import GENERATION_CONFIG, load_config, load_generation_config
from neuzip.runtime.hf.experts import prefer_ours
from neuzip.runtime.hf.messages import OTHER_VERSION, quiet_transformers, refusal
from neuzip.runtime.hf.model_files import model_tensors
from neuzip.runtime.hf.quantization_config import NeuzipConfig, PlacedConfig
from neuzip.runtime.hf.stored_tensors import record_activations, stored_tensors
from neuzip.runtime.kernel_prefetch import prefetch_kernels
from neuzip.runtime.requirements import require_expert_memory, require_expert_pool
from neuzip.runtime.residency import require_expert_places, require_places

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PREDICT_TEXT: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
"""The kinds of models that predict text, in transformers' terms; of the second the text alone is fed here."""

SHOWN_NAMES = 5


def load_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: AnyDevice | dict[str, Any] = "cpu",
    *,
    residency: str = "dense",
    expert_memory: int | None = None,
    activations: str | Mapping[str, Any] | None = None,
    attention: bool = True,
    verify: bool = True,
    expert_pool_bytes: int | None = None,
) -> PreTrainedModel:
    """Load the causal language model of a checkpoint, plain or compressed, in evaluation mode.

    `path` is a folder, or a Hub id `owner/name` or `owner/name@revision`, which is downloaded. `dtype` None
    keeps the dtype of the checkpoint, like `dtype="auto"` in transformers.

    `device` is "cpu", "cuda", "cuda:1", the number of a GPU, or a torch.device; None is "cpu". A GPU decodes
    the weights itself, so the host never holds all of them (with transformers 4.57, they pass through the
    host once). "auto", or another device map of transformers, spreads the weights over several devices, which
    needs accelerate.

    `residency` is the in-memory weight format: "dense" as in transformers, or compressed as "packed" or
    "ans". Compressed weights are never dense in memory as a whole. `expert_memory` is the number of bytes of
    experts that stay on a GPU; it reads the others from pinned host memory when they are used, with the same
    results. None keeps all on the GPU. `activations` is how the inputs of ternary
    layers are quantised: "b1.58", "a4.8", "a4.8-fp4", "none", or {"mode": ..., "sites": {...}}. None follows
    config.json. If config.json says nothing, None means "b1.58" for weights that compression made ternary,
    and "none" for weights that were ternary before. With residency "dense", neuzip does not quantise
    activations. Ternary layers take 2 bits per weight. With the mode "none", neuzip treats a ternary layer
    like any other layer, and usually keeps it dense.

    If config.json records quantised attention, `attention` applies it and warns; False leaves attention
    unquantised. `verify` compares tensors with their checksums. neuzip never runs code from the folder.

    Experts of the residency "ans" are decoded when they are used. `expert_pool_bytes` limits the memory for
    decoded experts, which all layers share; None is 1 GiB.

    Raises FormatError for damaged files; UsageError for a device that does not exist, a residency that the
    device does not support, unknown activations, and `expert_memory` without compressed experts on a GPU;
    NeuzipError for a checkpoint without a causal language model, for tensors that are missing, left over or
    of the wrong shape, and if pinned host memory runs out.
    """
    if not isinstance(attention, bool):
        raise UsageError(
            f"`attention={attention!r}`: is neither True nor False", "False leaves attention unquantised"
        )
    is_map = isinstance(device, dict) or device in DEVICE_MAPS
    place = None if is_map else place_of(device)
    require_expert_memory(expert_memory, residency, device=None if place is None else place.type)
    require_expert_pool(expert_pool_bytes, residency)
    folder = resolve_source(path, parameter="path", note=log)
    if is_map and find_spec("accelerate") is None:
        raise NeuzipError(
            f"the device map {device!r} needs the package accelerate", "install it, or name one device"
        )
    options: dict[str, Any] = {"device_map": device} if is_map else {}
    if residency != "dense" or activations is not None:
        kind = NeuzipConfig if place is None else PlacedConfig
        options["quantization_config"] = kind(
            residency, activations, expert_memory=expert_memory, expert_pool_bytes=expert_pool_bytes
        )
        if place is not None:
            require_places(residency, [place])
            require_expert_places(expert_memory, [place])
    with FolderSource(folder) as source, quiet_transformers():
        config = load_config(source.checkpoint)
        layers = LAYERS_ENTRY.read(source.checkpoint.root)
        if layers is not None:
            LAYERS_ENTRY.set(config, layers)
        tensors = model_tensors(source)
        if place is not None:
            prefetch_kernels(source, tensors, place, residency, note=log)
        if residency != "dense":
            record_activations(config, source, tensors)
        try:
            with stored_tensors(
                source, tensors, place, verify=verify, in_groups=residency != "dense", residency=residency
            ) as stored:
                if residency != "dense":
                    prefer_ours(config)
                skeleton = skeleton_of(config)
                cls: Any = type(skeleton)  # whose answer has two parts here, which its types do not say
                model, report = cls.from_pretrained(
                    None,
                    config=skeleton.config,
                    state_dict=stored,
                    dtype="auto" if dtype is None else dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are reported below, by name
                    **options,
                )
                if (folder / GENERATION_CONFIG).is_file():
                    model.generation_config = load_generation_config(folder)
        except NeuzipError:
            raise
        except Exception as error:
            hint = OTHER_VERSION
            if not any(type(config) in auto._model_mapping for auto in PREDICT_TEXT):
                hint = "models that do not predict text can be compressed and restored, but not run here"
            raise refusal(folder, "make a model of it", error, hint) from error
        _require_a_perfect_fit(folder, model, report)
    model.config.name_or_path = os.fspath(path)
    if attention and layers is not None:
        use_recorded(model, layers)
    placed: PreTrainedModel = model if place is None else model.to(place)
    return placed


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without values that predicts text, of a config; a vision-language model with all its parts."""
    known = [auto for auto in PREDICT_TEXT if type(config) in auto._model_mapping]
    auto = known[0] if known else PREDICT_TEXT[0]  # which says what it does not know
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, trust_remote_code=False)
    return model


def _require_a_perfect_fit(folder: Path, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise NeuzipError unless every tensor of the checkpoint found its place, and every place its tensor."""
    kind = type(model).__name__
    # Version 5 has (name, shape, expected shape) here, 4.57 names.
    mismatched = {m if isinstance(m, str) else m[0] for m in report["mismatched_keys"]}
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            (f"tensors that {kind} needs are missing", set(report["missing_keys"]) - mismatched),
            (f"{kind} has no place for", set(report["unexpected_keys"])),
            ("tensors have another shape than the config says", mismatched),
            ("transformers reports", set(report["error_msgs"])),
        )
        if names
    ]
    if problems:
        raise NeuzipError(
            f"{folder}: the weights do not fit the config: " + "; ".join(problems),
            "compare config.json with `neuzip inspect`",
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more"
