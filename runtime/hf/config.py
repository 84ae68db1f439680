"""The config.json and generation_config.json of a checkpoint folder, as transformers reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig

from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, is_out_of_memory
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint, find_checkpoint
from neuzip.formats.config_section import read_config
from neuzip.runtime.hf.messages import quiet_transformers, reason_of, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ADAPTER = "adapter_config.json"
"""What makes transformers add an adapter of peft to a model, if it lies beside it."""

CREDIBLE_LAYERS = 256
"""Layers that a config.json may claim, whatever tensors there are: what is missing is found out quickly."""

CREDIBLE_LAYERS_A_TENSOR = 4
"""Layers a tensor that a config.json may claim: some models share the weights of all their layers."""

_COUNTS_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks|depth)\Z")
"""Names of fields that count layers: num_hidden_layers, n_layer, depth and the like."""

GENERATION_CONFIG = "generation_config.json"
MOVE_AWAY = "correct the file, or move it away: a model can do without"


def load_config(path: str | os.PathLike[str] | Checkpoint) -> PreTrainedConfig:
    """The configuration of a checkpoint folder, of a compressed one the original's.

    Raises NeuzipError, also where an adapter lies beside the model: nothing here would compute with it.
    """
    checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path)
    folder = checkpoint.root
    if checkpoint.is_file:
        raise NeuzipError(
            f"{checkpoint.path}: has no config.json: a file of weights alone is no model",
            "give a folder with config.json and model.safetensors",
        )
    if ADAPTER in checkpoint.others:
        raise _refusal_of_an_adapter(checkpoint)
    if f"{ORIGINAL_FOLDER}/config.json" in checkpoint.others:
        folder = folder / ORIGINAL_FOLDER
    elif "config.json" not in checkpoint.others:
        raise NeuzipError(
            f"{checkpoint.path}: has no config.json, so it is not known which model the weights belong to",
            "give a folder with config.json and model.safetensors",
        )
    document = read_config(folder / "config.json")
    _require_tensors_for(document, folder / "config.json", checkpoint)
    with quiet_transformers():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise refusal(checkpoint.path, "read its config.json", error) from error
    return config


def _refusal_of_an_adapter(checkpoint: Checkpoint) -> NeuzipError:
    """Why a folder with a LoRA adapter is no model here, where from_pretrained would add the adapter."""
    path = checkpoint.root / ADAPTER
    base = read_config(path).get("base_model_name_or_path")
    named = f", of the base model {base!r}" if isinstance(base, str) else ""
    if "config.json" in checkpoint.others:
        return NeuzipError(
            f"{path}: a LoRA adapter lies beside the model{named}: from_pretrained of transformers adds it,"
            " neuzip would measure and run the model without it",
            "merge it into the weights (merge_and_unload of peft, then save_pretrained), or move"
            f" {ADAPTER} away to have the model without it",
        )
    return NeuzipError(
        f"{path}: the folder holds a LoRA adapter alone{named}: its weights are no model",
        "merge it into its base model (merge_and_unload of peft, then save_pretrained), and give that",
    )


def _require_tensors_for(document: dict[str, Any], path: Path, checkpoint: Checkpoint) -> None:
    """Raise FormatError for a config.json with far more layers than tensors: it takes hours to build them."""
    for name, layers in _layers_claimed(document):
        if layers <= CREDIBLE_LAYERS:
            continue
        with FolderSource(checkpoint) as source:
            tensors = sum(1 for _ in source.tensors())
        if layers > CREDIBLE_LAYERS_A_TENSOR * tensors:
            raise FormatError(
                path, f"says {layers:,} layers, but the weights are {tensors:,} tensors", field=name,
                hint="compare config.json with `neuzip inspect`",
            )  # fmt: skip


def _layers_claimed(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The fields that count layers, of the parts of a model too, and what they say."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", layers) for inner, layers in _layers_claimed(value))
        elif type(value) is int and _COUNTS_LAYERS.search(name):
            yield name, value


def load_generation_config(folder: Path) -> GenerationConfig:
    """The generation_config.json of a folder. Raises FormatError where transformers does not take it."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise FormatError(
            folder / GENERATION_CONFIG, f"transformers does not take it: {reason_of(error)}", hint=MOVE_AWAY
        ) from error
