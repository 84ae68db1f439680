"""The weight files of a checkpoint folder that a model is made of."""

from __future__ import annotations

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint
from neuzip.formats.safetensors_file import parse_json

INDEX = "model.safetensors.index.json"


def model_tensors(source: FolderSource) -> list[SourceTensor]:
    """The tensors that `from_pretrained` would take; some repositories hold the weights in a second form."""
    return [tensor for file in _model_files(source.checkpoint) for tensor in source.tensors(file)]


def _model_files(checkpoint: Checkpoint) -> list[str]:
    if "model.safetensors" in checkpoint.weights:
        return ["model.safetensors"]
    for index in (f"{ORIGINAL_FOLDER}/{INDEX}", INDEX):
        if index in checkpoint.others:
            return indexed_shards(checkpoint, index)
    raise NeuzipError(f"{checkpoint.path}: has neither model.safetensors nor {INDEX}")


def indexed_shards(checkpoint: Checkpoint, index: str) -> list[str]:
    """The weight files that an index of tensors at the root names. Raises FormatError if one is missing."""
    path = checkpoint.root / index
    document = parse_json(path.read_bytes(), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError(path, "not an object of strings", field="weight_map")
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in checkpoint.weights:
            raise FormatError(path, f"the shard {file!r} is missing", field="weight_map")
    return files
