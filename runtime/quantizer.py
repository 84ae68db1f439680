"""`from_pretrained` of transformers for compressed folders, as the quantizer "neuzip".

`quantization_config` in a compressed config.json asks for it. The weights come out dense, as they were before
they were compressed, so the model is a plain one: nothing of this stays in it or in its config, and
`save_pretrained` writes a plain checkpoint.

transformers lets a quantizer change modules, but not how files are read. `register` therefore replaces two of
its names: what opens a safetensors file, where it asks for a dtype, and the step that fills a model.
"""

from __future__ import annotations

import inspect
import os
import re
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import transformers
from transformers import modeling_utils
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuzip.errors import FormatError, NeuzipError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from neuzip.formats.checkpoint import Checkpoint

METHOD = "neuzip"

_registering = Lock()


def register() -> None:
    """Teach transformers the compressed form. For any thread, any number of times."""
    with _registering:
        if METHOD in AUTO_QUANTIZER_MAPPING:
            return
        AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = DenseConfig
        modeling_utils.safe_open = _safe_open  # type: ignore[assignment, attr-defined]
        step = inspect.getattr_static(modeling_utils.PreTrainedModel, _STEP, None)
        if step is not None:  # where it is missing, `DenseConfig` says so: transformers must stay usable
            setattr(modeling_utils.PreTrainedModel, _STEP, type(step)(_with_our_tensors(step.__func__)))
        AUTO_QUANTIZER_MAPPING[METHOD] = DenseQuantizer  # the last: who sees it finds all in place


_STEP = "_load_pretrained_model"


class DenseConfig(QuantizationConfigMixin):
    """`quantization_config` of a compressed config.json. Raises NeuzipError for what cannot be loaded."""

    def __init__(self, version: object = None, original: object = None, **_: object) -> None:
        from neuzip.formats.manifest import VERSION

        self.quant_method = METHOD  # type: ignore[assignment]
        if not hasattr(modeling_utils.PreTrainedModel, _STEP):
            raise NeuzipError(
                f"neuzip does not know how transformers {transformers.__version__} fills a model",
                "load it with neuzip.load_model, or use another version of transformers",
            )
        if version != VERSION or type(version) is not int:
            raise FormatError(
                "config.json", f"format version {version!r}; this neuzip reads version {VERSION}",
                field="quantization_config", hint="update neuzip to read it",
            )  # fmt: skip
        if original is not None:
            raise NeuzipError(
                "transformers cannot load weights that were quantized before neuzip compressed them",
                "restore them with `neuzip decompress` first, or load them with neuzip.load_model",
            )


class DenseQuantizer(HfQuantizer):
    """Weights that are decoded while they are loaded; otherwise as if there were no quantizer."""

    requires_parameters_quantization = False

    def get_new_dtype(
        self, converter: object, param: object, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """The dtype that a parameter gets without a quantizer."""
        return dtype

    def get_special_dtypes_update(self, model: object, dtype: object) -> dict[str, torch.dtype]:
        """None, in 4.57."""
        return {}

    def get_accelerator_warm_up_factor(self) -> int:
        """As without a quantizer, in 4.57."""
        return 2

    def preprocess_model(self, model: PreTrainedModel, dtype: object = None, **_: object) -> None:
        """Nothing: its modules stay as they are."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        """Never called; 4.57 wants it defined, and the next."""

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        """Never called."""

    def postprocess_model(self, model: PreTrainedModel, **_: object) -> None:
        """Leave a plain model behind."""
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        del model.is_quantized

    def is_serializable(self, **_: object) -> bool:
        """Whether the model can be saved: as a plain one."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether it can be trained: as a plain one."""
        return True


def _safe_open(*arguments: Any, **options: Any) -> Any:
    from .load_file import safe_open

    return safe_open(*arguments, **options)


def _with_our_tensors(step: Any) -> Any:
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
        found = settings.get("checkpoint_files")
        asked = isinstance(settings.get("hf_quantizer"), DenseQuantizer)
        if not found or not (asked or _is_compressed(found[0])):  # not asked if it got another config
            return step(*arguments, **options)

        from neuzip.compress.source import TensorSource

        from .load import stored_tensors

        checkpoint = _checkpoint(found)
        with TensorSource(checkpoint) as source:
            tensors = [t for file in checkpoint.weights for t in source.tensors(file)]
            with stored_tensors(source, tensors, _place(settings)) as stored:
                call.arguments |= {"state_dict": stored, "checkpoint_files": [""]}  # as 4.57 has it itself
                if "sharded_metadata" in call.arguments:
                    call.arguments["sharded_metadata"] = None
                return step(*call.args, **call.kwargs)

    return fill


def _is_compressed(file: str) -> bool:
    from neuzip.formats.container import is_container_metadata

    if not file.endswith(".safetensors"):
        return False
    with safetensors.safe_open(file, framework="pt") as opened:
        return is_container_metadata(opened.metadata() or {})


def _checkpoint(found: Sequence[str]) -> Checkpoint:
    """The weight files that transformers found, and those that it did not.

    The index of a compressed folder does not name shards whose tensors are all stored in others; that of the
    original does. It is not there if transformers fetched the files: it fetches only what it knows. Raises
    FormatError if such a shard is missing.
    """
    from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint, find_checkpoint

    from .load import indexed_shards

    root = Path(os.path.abspath(os.path.dirname(found[0])))
    files = {os.path.relpath(os.path.abspath(f), root).replace(os.sep, "/") for f in found}
    if (root / ORIGINAL_FOLDER).is_dir():
        folder = find_checkpoint(root)
        for name in folder.others:
            if name.startswith(f"{ORIGINAL_FOLDER}/") and ".safetensors.index." in name:
                shards = set(indexed_shards(folder, name)) if name.count("/") == 2 else set()
                files |= shards if files & shards else set()
    elif (numbered := _NUMBERED.search(found[0])) and int(numbered[1]) > len(files):
        raise FormatError(
            root, f"{len(files)} of {int(numbered[1])} shards were fetched, as the index names no others",
            hint="fetch the whole repository with `hf download`, and give that folder",
        )  # fmt: skip
    return Checkpoint(root, root, tuple(sorted(files)), ())


_NUMBERED = re.compile(r"-of-(\d+)\.safetensors\Z")


def _place(settings: dict[str, Any]) -> torch.device:
    """Where to decode: on the one GPU that takes the whole model, and otherwise on the CPU."""
    named = (settings.get("device_map") or {"": "cpu"}).values()
    places = {torch.device("cpu" if place == "disk" else place) for place in named}
    return places.pop() if len(places) == 1 else torch.device("cpu")
