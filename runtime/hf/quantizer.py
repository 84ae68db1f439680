"""`from_pretrained` of transformers for compressed folders, as the quantizer "neuzip".

`quantization_config` in a compressed config.json asks for it. The weights come out dense, as they were before
they were compressed, so the model is a plain one: nothing of this stays in it or in its config, and
`save_pretrained` writes a plain checkpoint.

`quantization_config=NeuzipConfig("packed")`, or another residency, keeps them compressed in memory, of plain
folders too: each weight is compressed when it arrives. `save_pretrained` then writes a compressed folder.

transformers lets a quantizer change parameters, but not how files are read and written. `register` therefore
replaces some of its names: what opens a safetensors file, where it asks for a dtype, and what writes one; the
step that fills a model, and the one that saves it; and how a given config is joined with the checkpoint's.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from dataclasses import replace
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
    AutoHfQuantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuzip.errors import FormatError, NeuzipError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from neuzip.formats.checkpoint import Checkpoint
    from neuzip.runtime.bitlinear import Activations
    from neuzip.runtime.hf.residency import Use

METHOD = "neuzip"

_registering = Lock()


def register() -> None:
    """Teach transformers the compressed form. For any thread, any number of times."""
    with _registering:
        if METHOD in AUTO_QUANTIZER_MAPPING:
            return
        AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = NeuzipConfig
        modeling_utils.safe_open = _safe_open  # type: ignore[assignment, attr-defined]
        _replace(modeling_utils, "safe_save_file", _with_values)
        _replace(modeling_utils.PreTrainedModel, _STEP, _with_our_tensors)
        _replace(modeling_utils.PreTrainedModel, "save_pretrained", _as_container)
        _replace(AutoHfQuantizer, "merge_quantization_configs", _with_our_config)
        AUTO_QUANTIZER_MAPPING[METHOD] = make_quantizer  # type: ignore[assignment]  # last: who sees it finds all


_STEP = "_load_pretrained_model"


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put a changed function in the place of one; a static or class method stays one.

    Where it is missing, `NeuzipConfig` says so: transformers must stay usable.
    """
    function = inspect.getattr_static(owner, name, None)
    if isinstance(function, staticmethod | classmethod):
        setattr(owner, name, type(function)(change(function.__func__)))
    elif function is not None:
        setattr(owner, name, change(function))


class NeuzipConfig(QuantizationConfigMixin):
    """The `quantization_config` for `from_pretrained`: weights stay compressed in memory.

    It works for any folder, plain or compressed by neuzip, and is not written to a checkpoint. `residency` is
    the in-memory weight format, "dense", "packed" or "ans", and `activations` how the inputs of ternary
    layers are quantised: both as in `load_model`.

    Raises UsageError for values that do not exist, and NeuzipError for a version of transformers that cannot
    do it.
    """

    def __init__(self, residency: str = "dense", activations: str | Mapping[str, Any] | None = None) -> None:
        if residency != "dense":
            from neuzip.runtime.bitlinear import Activations
            from neuzip.runtime.hf.residency import require_residency

            require_residency(residency)
            activations = None if activations is None else Activations.of(activations).to_json()
        elif activations is not None:
            raise UsageError(
                f"activations {activations!r}: the inputs of a dense model are not quantised",
                "give the residency 'packed', which keeps ternary weights in 2 bits",
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.residency = residency
        self.activations = activations
        self.fallback = "none"  # the mode of ternary layers of which neither this nor a config.json says one
        self.weights_file: str | None = None  # `transformers_weights` of the original's config.json
        self.is_placed = False  # `load_model` hands tensors out where they shall stay, with no device map
        if not hasattr(modeling_utils.PreTrainedModel, _STEP):
            raise NeuzipError(
                f"neuzip does not know how transformers {transformers.__version__} fills a model",
                "load it with neuzip.load_model, or use another version of transformers",
            )
        if residency != "dense" and not hasattr(HfQuantizer, "get_quantize_ops"):
            raise NeuzipError(
                f"the residency {residency!r} needs transformers 5, not {transformers.__version__}",
                "install a newer one, or use the residency 'dense'",
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """What a compressed config.json holds. Raises NeuzipError for what cannot be loaded."""
        from neuzip.formats.manifest import VERSION

        version, original = config_dict.get("version"), config_dict.get("original")
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
        config = cls()
        config.weights_file = config_dict.get("transformers_weights")
        return (config, kwargs) if return_unused_kwargs else config

    def __repr__(self) -> str:
        more = "" if self.activations is None else f", activations={self.activations!r}"
        return f"{type(self).__name__}(residency={self.residency!r}{more})"


def make_quantizer(config: NeuzipConfig, **options: Any) -> HfQuantizer:
    """The quantizer for a residency."""
    kind = DenseQuantizer if config.residency == "dense" else CompressingQuantizer
    return kind(config, **options)


class DenseQuantizer(HfQuantizer):
    """Weights that are decoded while they are loaded; otherwise as if there were no quantizer."""

    requires_parameters_quantization = False

    def __init__(self, config: NeuzipConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.is_stored_compressed: bool = self.pre_quantized
        self.weights_file = config.weights_file
        self.attention: str | None = None  # what the caller asked for

    def update_attn_implementation(self, config: Any) -> Any:
        """The config as the original's: it says whether attention was asked for by name."""
        self.attention = config._attn_implementation
        _name_original_weights(self, config)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """The same: what transformers asks before version 5.18, and some later ones ask as well."""
        return self.update_attn_implementation(config)

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
        """Leave a plain model behind, with attention as its config records."""
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        del model.is_quantized
        _attend_as_recorded(model, self.attention)

    def is_serializable(self, **_: object) -> bool:
        """Whether the model can be saved: as a plain one."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether it can be trained: as a plain one."""
        return True


class CompressingQuantizer(HfQuantizer):
    """Weights that are compressed in memory, each of them when it arrives."""

    def __init__(self, config: NeuzipConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.asked = config
        self.residency = config.residency
        self._is_placed = config.is_placed
        self.failure: Exception | None = None
        self.is_stored_compressed: bool = self.pre_quantized
        self.weights_file = config.weights_file
        self.attention: str | None = None
        # What arrives is dense, as for quantization on the fly: transformers then loads one by one.
        self.pre_quantized = False
        self._uses: dict[str, Use] = {}
        self._has_experts = False

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Raise UsageError for places where weights of this residency cannot lie."""
        from neuzip.runtime.hf.residency import expanded, require_places

        is_open = isinstance(device_map, str)  # asked again when it has become places
        if not (is_open or self._is_placed):
            require_places(self.residency, expanded(device_map or {"": "cpu"}))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The same. Raises UsageError for a dtype whose weights are not compressed in memory."""
        from neuzip.runtime.hf.residency import DTYPES

        if dtype not in DTYPES:
            raise UsageError(
                f"the residency {self.residency!r} is for bf16 and fp16 weights, not {dtype}",
                "give dtype=torch.bfloat16, or the residency 'dense'",
            )
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        """The config, with experts one by one: transformers asks before it builds the model."""
        from neuzip.runtime.hf.load import prefer_single_experts

        self.attention = config._attn_implementation
        _name_original_weights(self, config)
        prefer_single_experts(config)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """The same: what transformers asks before version 5.18, and some later ones ask as well."""
        return self.update_attn_implementation(config)

    @property
    def quantized_element_size(self) -> float:
        """Bytes a weight, about: what accelerate plans with."""
        return _BYTES_A_WEIGHT[self.residency]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether a parameter is to be compressed."""
        return param_name in self._uses

    def get_quantize_ops(self) -> Any:
        """What compresses."""
        return _compression(self)

    def preprocess_model(self, model: PreTrainedModel, dtype: object = None, **_: object) -> None:
        """See which parameters can be compressed; modules stay as they are."""
        from neuzip.runtime.hf.residency import compressible, has_experts

        self._uses = compressible(model)
        self._has_experts = has_experts(model)
        model.is_quantized = True  # type: ignore[assignment]
        model.quantization_method = METHOD  # type: ignore[assignment]

    def compress(self, model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A parameter that has arrived, compressed if it fits and that pays."""
        from neuzip.runtime.bitlinear import BitWeight
        from neuzip.runtime.hf.residency import compress

        expected = model.get_parameter(name)
        if hasattr(expected, "_local_tensor"):  # a DTensor
            raise NeuzipError(
                f"the residency {self.residency!r} does not split weights among processes",
                "leave tp_plan and distributed_config out, or use the residency 'dense'",
            )
        if name not in self._uses or weight.shape != expected.shape:  # which is said when all have arrived
            return weight
        use = self._uses[name]
        if isinstance(weight, BitWeight):
            if not use.looked_up and self.activations(model).at(name.rpartition(".")[0]) != "none":
                return weight
            weight = weight.dense()
        return compress(weight, use, self.residency)

    def activations(self, model: PreTrainedModel) -> Activations:
        """What the inputs of ternary layers are quantised to: as asked for, as recorded, or the fall-back."""
        from neuzip.runtime.bitlinear import Activations, noted

        if self.asked.activations is not None:
            return Activations.of(self.asked.activations)
        return noted(model) or Activations(self.asked.fallback)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        """Never called."""

    def postprocess_model(self, model: PreTrainedModel, **_: object) -> None:
        """Make the ternary layers. Leave the config as it was: the residency is no part of a checkpoint."""
        from neuzip.runtime.bitlinear import bit_linears, install_arrived, note

        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        activations = self.activations(model)
        install_arrived(model, activations)
        if bit_linears(model):
            note(model, activations)
        _attend_as_recorded(model, self.attention)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """The model with all weights dense, cast to `dtype`; None leaves each its own.

        Raises UsageError for a dtype that is none of floating point.
        """
        from neuzip.runtime.hf.residency import decompress_parameters

        # Not the base's: it would fill in the config's dtype, and cast what was never compressed.
        decompress_parameters(model, None if dtype is None else _floating(dtype))
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` lays out, without values."""
        from neuzip.runtime.hf.save import stand_ins

        return stand_ins(model.state_dict()), {}

    def is_serializable(self, **_: object) -> bool:
        """Whether the model can be saved: as a compressed folder."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on top of it can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile it: not where experts are computed one by one."""
        return not self._has_experts


def _name_original_weights(quantizer: DenseQuantizer | CompressingQuantizer, config: Any) -> None:
    """Put the original's `transformers_weights` back, where a sentence stops transformers without neuzip."""
    if not quantizer.is_stored_compressed:
        return
    if quantizer.weights_file is not None:
        config.transformers_weights = quantizer.weights_file
    elif hasattr(config, "transformers_weights"):
        del config.transformers_weights


def _attend_as_recorded(model: PreTrainedModel, asked: str | None) -> None:
    """Patch attention as the config records, unless the caller asked for one by name."""
    from neuzip.runtime.hf.attention import noted, use_recorded

    layers = noted(model.config) if asked is None else None
    if layers is not None:
        use_recorded(model, layers)


def _floating(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or the one of a name such as "bfloat16"."""
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise UsageError(f"dtype={dtype!r}: is no floating-point dtype", "give one such as torch.bfloat16")
    return named


_BYTES_A_WEIGHT = {"packed": 11.4 / 8, "ans": 10.9 / 8}
"""Of bf16 weights of trained models."""


def _compression(quantizer: CompressingQuantizer) -> Any:
    """The step of transformers 5 that turns dense parameters into compressed ones."""
    from transformers.core_model_loading import ConversionOps

    class Compress(ConversionOps):
        def convert(
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],
            **context: Any,
        ) -> dict[str, Any]:
            try:
                return {
                    name: quantizer.compress(
                        context["model"], name, value[0] if isinstance(value, list) else value
                    )
                    for name, value in input_dict.items()
                }
            except Exception as failure:  # transformers makes a line in a report of it
                quantizer.failure = failure
                raise

    return Compress()


def _safe_open(*arguments: Any, **options: Any) -> Any:
    from neuzip.runtime.load_file import safe_open

    return safe_open(*arguments, **options)


def _with_values(save: Any) -> Any:
    """What writes a safetensors file, for tensors that have no values yet too."""

    @wraps(save)
    def save_file(tensors: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        from neuzip.runtime.hf.lazy_tensor import with_values

        return save(with_values(tensors), *arguments, **options)

    return save_file


def _as_container(save: Any) -> Any:
    """`save_pretrained`, which of a model that is compressed in memory makes a compressed folder."""
    signature = inspect.signature(save)

    @wraps(save)
    def save_pretrained(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        model, settings = arguments[0], call.arguments
        is_ours = isinstance(getattr(model, "hf_quantizer", None), CompressingQuantizer)
        if not is_ours or getattr(
            model, "_hf_peft_config_loaded", False
        ):  # of adapters it saves nothing else
            return save(*arguments, **options)
        if settings.get("push_to_hub") or settings.get("distributed_checkpoint"):
            raise NeuzipError(
                f"a model of the residency {model.hf_quantizer.residency!r} is saved to a folder only",
                "save it there; `neuzip push` brings a compressed folder to the Hub",
            )
        from neuzip.runtime.bitlinear import bit_linears

        if bit_linears(model):
            raise NeuzipError(
                "a model with ternary layers is not saved, as their scales would be rounded to its dtype",
                "copy the folder it came from, or make it dense first: model.dequantize()",
            )
        if not settings.get("is_main_process", True):
            return None

        from neuzip.runtime.hf.save import save_container

        def save_plain(folder: Path) -> None:
            settings["save_directory"] = folder
            save(*call.args, **call.kwargs)

        return save_container(save_plain, settings["save_directory"])

    return save_pretrained


def _with_our_config(merge: Any) -> Any:
    """How transformers joins a config it was given with the checkpoint's: the residency is the given one."""

    @wraps(merge)
    def merged(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        stored, asked = quantization_config, quantization_config_from_args
        if not isinstance(asked, NeuzipConfig):
            return merge(cls, stored, asked)
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        if method != METHOD:
            raise NeuzipError(
                f"the weights are quantized already ({method}), so there is no residency for them",
                "leave quantization_config out, or load a checkpoint that is not quantized",
            )
        found = NeuzipConfig.from_dict(stored) if isinstance(stored, dict) else stored
        chosen = copy.copy(asked)
        chosen.weights_file = found.weights_file
        return chosen

    return merged


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
        quantizer = settings.get("hf_quantizer")
        compressing = isinstance(quantizer, CompressingQuantizer)
        asked = getattr(quantizer, "is_stored_compressed", False)
        if isinstance(quantizer, DenseQuantizer) and "load_config" in call.arguments:
            # Or tensors that are renamed keep their dtype, and shapes are not compared, before version 5.23.
            call.arguments["load_config"] = replace(call.arguments["load_config"], hf_quantizer=None)
        expected = settings["model"].state_dict(keep_vars=True) if compressing else {}
        if not found or not (asked or _is_compressed(found[0])):  # not asked if it got another config
            filled = step(*call.args, **call.kwargs)
        else:
            from neuzip.compress.source import TensorSource
            from neuzip.runtime.hf.load import prepare_ternary, stored_tensors

            checkpoint = _checkpoint(found)
            place = None if compressing else _place(settings)
            with TensorSource(checkpoint) as source:
                tensors = [t for file in checkpoint.weights for t in source.tensors(file)]
                if isinstance(quantizer, CompressingQuantizer):
                    prepare_ternary(quantizer.asked, None, source, tensors)
                with stored_tensors(source, tensors, place, in_groups=compressing) as stored:
                    call.arguments |= {
                        "state_dict": stored,
                        "checkpoint_files": [""],
                    }  # as 4.57 has it itself
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


def _put_back_misfits(
    model: PreTrainedModel, expected: dict[str, Any]
) -> Iterator[tuple[str, torch.Size, torch.Size]]:
    """Names and both shapes of tensors that took the place of others of another shape, which is undone.

    Before version 5.23 transformers compares no shapes if there is a quantizer.
    """
    for name, found in model.state_dict(keep_vars=True).items():
        tensor = expected.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.shape != found.shape:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, tensor)
            yield name, found.shape, tensor.shape


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
    from neuzip.runtime.hf.load import indexed_shards

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


register()  # here, as importing transformers' models imports this, and the other way round
