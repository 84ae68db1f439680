"""Hooks by which SGLang reads a compressed folder as the folder that it was made of.

SGLang's hook registry applies them: `served_config` to what it makes of a config.json, `decoded_weights` to
its iterators over the tensors of .safetensors files. Everything after that is SGLang's own: which tensors are
fused, and which part of a tensor a rank keeps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from neuzip.runtime.serving import SECTION, EngineRefusal, require_readable, require_supported
from neuzip.runtime.sglang.options import ENTRY, sglang_options

METHOD = "neuzip"
"""The `quant_method` of a compressed folder's config.json."""

CONFIG = "sglang.srt.utils.hf_transformers.config.get_config"
"""The function of SGLang that reads a config.json."""

_FILES = "sglang.srt.model_loader.weight_utils"
_ITERATORS = (
    "safetensors_weights_iterator",
    "multi_thread_safetensors_weights_iterator",
    "buffered_multi_thread_safetensors_weights_iterator",
    "fastsafetensors_weights_iterator",
    "instanttensor_weights_iterator",
    "runai_safetensors_weights_iterator",
)
"""The functions of SGLang that take .safetensors files first. No version has all of them."""

logger = logging.getLogger("sglang.neuzip")


def weight_iterators() -> list[str]:
    """The functions of the SGLang that is installed, by their full names, to which `decoded_weights` goes."""
    files = import_module(_FILES)
    return [f"{_FILES}.{name}" for name in _ITERATORS if hasattr(files, name)]


def served_config(config: Any, *_: Any, **__: Any) -> None:
    """Make a config of a compressed folder that of the original, in place. Other configs stay as they are.

    SGLang so takes a dense model for an ordinary one, and weights that were quantized before neuzip
    compressed them for what they were. Only for the residency "packed" does the config ask for a quantization
    method. Raises EngineRefusal for options that do not exist, and for what cannot be served.
    """
    stored = getattr(config, "quantization_config", None)
    section = getattr(config, SECTION, None)
    if isinstance(stored, Mapping) and stored.get("quant_method") == METHOD and ENTRY not in stored:
        require_supported(ENTRY, metadata.version("sglang"))
        _require_hooks()
        require_readable(stored)
        original = stored.get("original")
        if original is None:
            del config.quantization_config
        else:
            config.quantization_config = original
    options = sglang_options(section)
    if options.residency != "packed" or hasattr(config, "quantization_config"):
        return
    config.quantization_config = {"quant_method": METHOD, ENTRY: {"exact": options.exact}}


def decoded_weights(
    original: Callable[..., Iterator[tuple[str, Any]]], files: Sequence[str], *args: Any, **options: Any
) -> Iterator[tuple[str, Any]]:
    """Name and values of each tensor of .safetensors files, plain or compressed.

    A rank on a GPU decodes there. Raises FormatError for damaged files, and EngineRefusal for compressed and
    plain files together.
    """
    from neuzip.runtime.weight_files import is_container_file

    paths = [os.fspath(file) for file in files]
    compressed = [path for path in paths if os.path.isfile(path) and is_container_file(path)]
    if not compressed:
        return original(files, *args, **options)
    if len(compressed) != len(paths):
        plain = next(path for path in paths if path not in compressed)
        raise EngineRefusal(
            f"{plain} is not compressed, and other weight files beside it are",
            "compress the folder again with `neuzip compress`",
        )
    return _decoded(compressed)


def _decoded(files: list[str]) -> Iterator[tuple[str, Any]]:
    import torch
    from tqdm import tqdm

    from neuzip.runtime.weight_files import decoded_tensors, opened, ternary_count

    place = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # a rank of SGLang on a GPU has set it
        place = torch.device("cuda", torch.cuda.current_device())
    distributed = torch.distributed
    is_quiet = distributed.is_initialized() and distributed.get_rank() != 0
    with (
        opened(files) as source,
        tqdm(
            desc="Decoding compressed weights",
            total=sum(tensor.info.nbytes for tensor in source.tensors()),
            unit="B",
            unit_scale=True,
            disable=is_quiet,
        ) as progress,
    ):
        if ternary := ternary_count(source):
            logger.info("neuzip: %d ternary tensors are decoded; inputs are not quantized", ternary)
        for name, tensor in decoded_tensors(source, place):
            progress.update(tensor.nbytes)
            yield name, tensor


def _require_hooks() -> None:
    """Raise EngineRefusal if an iterator of SGLang lacks its hook: it would load streams as weights."""
    for target in weight_iterators():
        module, _, name = target.rpartition(".")
        if getattr(import_module(module), name).__dict__.get("__wrapped__") is None:
            raise EngineRefusal(
                f"SGLang did not apply neuzip's hook to {target}, so it would misread the compressed weights",
                "look for the reason in SGLang's log, or restore the folder with `neuzip decompress`",
            )
