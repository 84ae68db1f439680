"""The step of `from_pretrained` that fills a model, with the tensors of compressed files."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch

from neuzip.errors import FormatError
from neuzip.runtime.hf.quantizer import CompressingQuantizer, DenseQuantizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from neuzip.formats.checkpoint import Checkpoint


def filled_by_us(step: Any) -> Any:
    """The step of `from_pretrained` that fills a model, for compressed files too.

    Version 5 has the quantizer and the device map in `load_config`, 4.57 among the arguments. Both take a
    `state_dict` in place of files.
    """
    signature = inspect.signature(step)

    @wraps(step)
    def fill(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        settings = call.arguments
        if "load_config" in settings:
            settings = settings | vars(settings["load_config"])
        files = settings.get("checkpoint_files")
        quantizer = settings.get("hf_quantizer")
        compressing = isinstance(quantizer, CompressingQuantizer)
        is_stored_compressed = getattr(quantizer, "is_stored_compressed", False)
        if isinstance(quantizer, DenseQuantizer) and "load_config" in call.arguments:
            # Or tensors that are renamed keep their dtype, and shapes are not compared, before version 5.23.
            call.arguments["load_config"] = replace(call.arguments["load_config"], hf_quantizer=None)
        expected = settings["model"].state_dict(keep_vars=True) if compressing else {}
        # A quantizer with another config does not say so.
        if not files or not (is_stored_compressed or _is_compressed(files[0])):
            if isinstance(quantizer, CompressingQuantizer):
                _take_ternary_mode(quantizer, settings.get("state_dict"))
            filled = step(*call.args, **call.kwargs)
        else:
            from neuzip.compress.sources.folder import FolderSource
            from neuzip.runtime.hf.stored_tensors import stored_tensors

            checkpoint = _checkpoint(files)
            place = None if compressing else _place(settings)
            with FolderSource(checkpoint) as source:
                tensors = [t for file in checkpoint.weights for t in source.tensors(file)]
                residency = quantizer.residency if isinstance(quantizer, CompressingQuantizer) else "dense"
                with stored_tensors(
                    source, tensors, place, in_groups=compressing, residency=residency
                ) as stored:
                    if isinstance(quantizer, CompressingQuantizer):
                        _take_ternary_mode(quantizer, stored)
                    # 4.57 has such a list beside a state_dict itself.
                    call.arguments |= {"state_dict": stored, "checkpoint_files": [""]}
                    if "sharded_metadata" in call.arguments:
                        call.arguments["sharded_metadata"] = None
                    filled = step(*call.args, **call.kwargs)
        if isinstance(quantizer, CompressingQuantizer):
            if quantizer.failure is not None:
                raise quantizer.failure
            info = filled[0] if isinstance(filled, tuple) else filled  # version 5.0
            info.mismatched_keys.update(_put_back_misfits(settings["model"], expected))
        return filled

    return fill


def _take_ternary_mode(quantizer: CompressingQuantizer, tensors: object) -> None:
    """Tell a quantizer what tensors of a checkpoint say of their activations; a caller's own say nothing."""
    from neuzip.runtime.hf.stored_tensors import StoredTensors

    if isinstance(tensors, StoredTensors):
        quantizer.ternary_mode = tensors.ternary_mode


def _put_back_misfits(
    model: PreTrainedModel, expected: dict[str, Any]
) -> Iterator[tuple[str, torch.Size, torch.Size]]:
    """Names and both shapes of tensors that took the place of others of another shape, which is undone.

    Before version 5.23 transformers compares no shapes if there is a quantizer.
    """
    for name, loaded in model.state_dict(keep_vars=True).items():
        tensor = expected.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.shape != loaded.shape:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, tensor)
            yield name, loaded.shape, tensor.shape


def _is_compressed(file: str) -> bool:
    if not file.endswith(".safetensors"):
        return False
    from neuzip.formats.container import is_container_metadata

    with safetensors.safe_open(file, framework="pt") as opened:
        return is_container_metadata(opened.metadata() or {})


def _checkpoint(paths: Sequence[str]) -> Checkpoint:
    """The weight files that transformers found, and those that it did not.

    The index of a compressed folder does not name shards whose tensors are all stored in others; that of the
    original does. It is not there if transformers fetched the files: it fetches only what it knows. Raises
    FormatError if such a shard is missing.
    """
    from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint, find_checkpoint
    from neuzip.runtime.hf.model_files import indexed_shards

    root = Path(os.path.abspath(os.path.dirname(paths[0])))
    files = {os.path.relpath(os.path.abspath(f), root).replace(os.sep, "/") for f in paths}
    if (root / ORIGINAL_FOLDER).is_dir():
        folder = find_checkpoint(root)
        for name in folder.others:
            if name.startswith(f"{ORIGINAL_FOLDER}/") and ".safetensors.index." in name:
                shards = set(indexed_shards(folder, name)) if name.count("/") == 2 else set()
                files |= shards if files & shards else set()
    elif (numbered := _NUMBERED.search(paths[0])) and int(numbered[1]) > len(files):
        raise FormatError(
            root, f"{len(files)} of {int(numbered[1])} shards were fetched, as the index names no others",
            hint="fetch the whole repository with `hf download`, and give that folder",
        )  # fmt: skip
    return Checkpoint(root, root, tuple(sorted(files)), ())


_NUMBERED = re.compile(r"-of-(\d+)\.safetensors\Z")


def _place(settings: dict[str, Any]) -> torch.device | None:
    """Where to decode: on the one device that takes the whole model, or None for several."""
    named = (settings.get("device_map") or {"": "cpu"}).values()
    places = {torch.device("cpu" if place == "disk" else place) for place in named}
    return places.pop() if len(places) == 1 else None
