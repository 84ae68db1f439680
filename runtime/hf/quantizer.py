"""`from_pretrained` of transformers for compressed folders, as the quantizer "neuzip".

`quantization_config` in a compressed config.json asks for it. The weights come out dense, as they were before
they were compressed, so the model is a plain one: nothing of this stays in it or in its config, and
`save_pretrained` writes a plain checkpoint.

`quantization_config=NeuzipConfig("packed")`, or another residency, keeps them compressed in memory, of plain
folders too: each weight is compressed when it arrives. `save_pretrained` then writes a compressed folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer

from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.hf.quantization_config import METHOD, NeuzipConfig, PlacedConfig
from neuzip.runtime.residencies import RESIDENCIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from neuzip.runtime.activations import Activations
    from neuzip.runtime.expert_memory import ExpertMemory
    from neuzip.runtime.weights import WeightUse


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
        """The config as the original's, for versions before 5.18, and some later ones that ask as well."""
        return self.update_attn_implementation(config)

    def get_special_dtypes_update(self, model: object, dtype: object) -> dict[str, torch.dtype]:
        """No parameters of other dtypes: 4.57 asks for them."""
        return {}

    def get_accelerator_warm_up_factor(self) -> int:
        """The factor without a quantizer: 4.57 asks for it."""
        return 2

    def preprocess_model(self, model: PreTrainedModel, dtype: object = None, **_: object) -> None:
        """Leave the modules of a model as they are."""

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
        self.residency = config.residency
        self.ternary_mode = "none"  # of ternary layers of which neither the config nor a config.json says one
        self._activations = config.activations
        self._expert_memory = config.expert_memory
        self._experts: ExpertMemory | None = None
        self._is_placed = isinstance(config, PlacedConfig)
        self.failure: Exception | None = None
        self.is_stored_compressed: bool = self.pre_quantized
        self.weights_file = config.weights_file
        self.attention: str | None = None
        # What arrives is dense, as for quantization on the fly: transformers then loads one by one.
        self.pre_quantized = False
        self._uses: dict[str, WeightUse] = {}
        self._can_compile_experts = True
        self._pool_bytes = config.expert_pool_bytes

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Raise UsageError for places where weights of this residency cannot lie."""
        from neuzip.runtime.residency import expanded, require_expert_places, require_places

        is_open = isinstance(device_map, str)  # asked again when it has become places
        if not (is_open or self._is_placed):
            places = list(expanded(device_map or {"": "cpu"}))
            require_places(self.residency, places)
            require_expert_places(self._expert_memory, places)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the model. Raises UsageError for one whose weights are not compressed in memory."""
        from neuzip.runtime.residency import DTYPES

        if dtype not in DTYPES:
            raise UsageError(
                f"the residency {self.residency!r} is for bf16 and fp16 weights, not {dtype}",
                "give dtype=torch.bfloat16, or the residency 'dense'",
            )
        return dtype

    def update_attn_implementation(self, config: Any) -> Any:
        """The config, with experts computed by neuzip: transformers asks before it builds the model."""
        from neuzip.runtime.hf.experts import prefer_ours

        self.attention = config._attn_implementation
        _name_original_weights(self, config)
        prefer_ours(config)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """The config with our experts, for versions before 5.18, and some later ones that ask as well."""
        return self.update_attn_implementation(config)

    @property
    def quantized_element_size(self) -> float:
        """Bytes a weight, about: what accelerate plans with."""
        return RESIDENCIES[self.residency].bytes_per_weight

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether a parameter is to be compressed."""
        return param_name in self._uses

    def get_quantize_ops(self) -> Any:
        """What compresses."""
        return _compression(self)

    def preprocess_model(self, model: PreTrainedModel, dtype: object = None, **_: object) -> None:
        """Find the parameters that can be compressed; modules stay as they are.

        Raises UsageError for a limit on the memory of experts where there are none.
        """
        from neuzip.runtime.expert_memory import ExpertMemory
        from neuzip.runtime.residency import compressible, require_experts

        self._uses = compressible(model)
        require_experts(model, self._uses, self._expert_memory)
        self._experts = None if self._expert_memory is None else ExpertMemory(self._expert_memory)
        model.is_quantized = True  # type: ignore[assignment]
        model.quantization_method = METHOD  # type: ignore[assignment]

    def compress(self, model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A parameter that has arrived, compressed if it fits and that pays."""
        from neuzip.runtime.residency import compress, keep_arrived
        from neuzip.runtime.weights import AnsWeight, BitWeight, GridWeight

        expected = model.get_parameter(name)
        if hasattr(expected, "_local_tensor"):  # a DTensor
            raise NeuzipError(
                f"the residency {self.residency!r} does not split weights among processes",
                "leave tp_plan and distributed_config out, or use the residency 'dense'",
            )
        if name not in self._uses or weight.shape != expected.shape:  # which is said when all have arrived
            return weight
        use = self._uses[name]
        if isinstance(weight, GridWeight | AnsWeight):
            if weight.suits(use):
                return keep_arrived(weight, self._experts, name)
            weight = weight.dense()
        if isinstance(weight, BitWeight):
            if not use.looked_up and self.activations(model).at(name.rpartition(".")[0]) != "none":
                return weight
            weight = weight.dense()
        return compress(weight, use, self.residency, self._experts, name)

    def activations(self, model: PreTrainedModel) -> Activations:
        """How inputs of ternary layers are quantised: by the config, config.json or `ternary_mode`."""
        from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations

        if self._activations is not None:
            return Activations.of(self._activations)
        return ACTIVATIONS_ENTRY.get(model.config) or Activations(self.ternary_mode)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: object) -> None:
        """Never called."""

    def postprocess_model(self, model: PreTrainedModel, **_: object) -> None:
        """Make the ternary layers. Leave the config as it was: the residency is no part of a checkpoint."""
        from neuzip.runtime.activations import ACTIVATIONS_ENTRY
        from neuzip.runtime.bitlinear import bit_linears
        from neuzip.runtime.hf.experts import (
            can_compile_experts,
            choose_gates,
            limit_expert_pool,
            release_others,
        )
        from neuzip.runtime.hf.ternary_layers import install_arrived
        from neuzip.runtime.residency import settle_arrived

        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        activations = self.activations(model)
        install_arrived(model, activations)
        settle_arrived(model, set(self._uses))
        if bit_linears(model):
            ACTIVATIONS_ENTRY.set(model.config, activations)
        release_others(model)
        choose_gates(model)
        self._can_compile_experts = can_compile_experts(model)
        if self._pool_bytes is not None:
            limit_expert_pool(model, self._pool_bytes)
        _attend_as_recorded(model, self.attention)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        """The model with all weights dense, cast to `dtype`; None leaves each its own.

        Raises UsageError for a dtype that is none of floating point.
        """
        from neuzip.runtime.hf.experts import release_others
        from neuzip.runtime.residency import decompress_parameters

        # Not the base's: it would fill in the config's dtype, and cast what was never compressed.
        decompress_parameters(model, None if dtype is None else _floating(dtype))
        release_others(model)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` lays out, without values."""
        from neuzip.runtime.hf.lazy_tensor import lazy_tensors

        return lazy_tensors(model.state_dict()), {}

    def is_serializable(self, **_: object) -> bool:
        """Whether the model can be saved: as a compressed folder."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on top of it can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile it: not experts computed one by one or decoded to a pool."""
        return self._can_compile_experts


def _name_original_weights(quantizer: DenseQuantizer | CompressingQuantizer, config: Any) -> None:
    """Put the original's `transformers_weights` back, where a sentence stops transformers without neuzip."""
    if not quantizer.is_stored_compressed:
        return
    if quantizer.weights_file is not None:
        config.transformers_weights = quantizer.weights_file
    elif hasattr(config, "transformers_weights"):
        del config.transformers_weights


def _attend_as_recorded(model: PreTrainedModel, attention: str | None) -> None:
    """Patch attention as the config records, unless the caller named an `attention`."""
    from neuzip.runtime.hf.attention import use_recorded
    from neuzip.runtime.hf.attention_config import LAYERS_ENTRY

    layers = LAYERS_ENTRY.get(model.config) if attention is None else None
    if layers is not None:
        use_recorded(model, layers)


def _floating(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or the one of a name such as "bfloat16"."""
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise UsageError(f"dtype={dtype!r}: is no floating-point dtype", "give one such as torch.bfloat16")
    return named


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
