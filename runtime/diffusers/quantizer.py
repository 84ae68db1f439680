"""`quantization_config=NeuzipConfig(...)` in diffusers: the weights of a model stay compressed in memory.

diffusers hands a quantizer each weight as it arrives, dense, on its way to its device. It does not matter
whether the folder is plain or compressed by neuzip. Of a compressed folder without a `quantization_config`
diffusers makes a plain model and no quantizer: see `reading`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from neuzip.errors import UsageError
from neuzip.runtime.residencies import RESIDENCIES
from neuzip.runtime.residency import (
    DTYPES,
    compress,
    compressible,
    decompress_parameters,
    expanded,
    is_compressed,
    pack_arrived,
    require_places,
)
from neuzip.runtime.serving import STEPS

if TYPE_CHECKING:
    from neuzip.runtime.weights import WeightUse

SETTINGS_OF_LANGUAGE_MODELS = ("activations", "expert_memory", "expert_pool_bytes")
"""Attributes of NeuzipConfig that a model of diffusers does not have a use for."""


class NeuzipDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Compresses linear weights and embeddings in memory, each when it arrives; others stay dense.

    `quantization_config` is a NeuzipConfig. Raises UsageError for settings that have no effect in diffusers.
    """

    use_keep_in_fp32_modules = True  # the values are the original's, so what it keeps in fp32 stays so too
    is_serializable = True
    is_trainable = True  # adapters on top
    is_compileable = True

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.residency: str = quantization_config.residency
        self._dtype: torch.dtype | None = None
        self._uses: dict[str, WeightUse] = {}
        for name in SETTINGS_OF_LANGUAGE_MODELS:
            if (value := getattr(quantization_config, name, None)) is not None:
                raise UsageError(
                    f"`{name}={value!r}`: has no effect on a model of diffusers", f"leave out `{name}`"
                )

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Raise UsageError for places where weights of the residency cannot be.

        Words such as "auto" pass: diffusers asks again when they have become places.
        """
        if not isinstance(device_map, str):
            require_places(self.residency, expanded(device_map or {"": "cpu"}))

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype of the model. Raises UsageError for one whose weights are not compressed in memory."""
        if self.residency != "dense" and torch_dtype not in DTYPES:
            reason = "and diffusers loads fp32 unless told" if torch_dtype is None else f"not {torch_dtype}"
            raise UsageError(
                f"the residency {self.residency!r} is for bf16 and fp16 weights, {reason}",
                "give dtype=torch.bfloat16, or the residency 'dense'",
            )
        self._dtype = torch_dtype
        return torch_dtype

    def get_cuda_warm_up_factor(self) -> int:
        """The divisor by which diffusers chooses how much to allocate at once: 2 for all dense bytes."""
        return round(4 / RESIDENCIES[self.residency].bytes_per_weight)

    def _process_model_before_weight_loading(self, model: nn.Module, **_: object) -> None:
        """Find the parameters that can be compressed; modules stay as they are."""
        self._uses = {} if self.residency == "dense" else compressible(model, self._dtype)

    def check_if_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, *_: object, **__: object
    ) -> bool:
        """Whether a parameter that has arrived, in the dtype that it will have, is to be compressed."""
        return param_name in self._uses and param_value.dtype in DTYPES

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        *_: object,
        **__: object,
    ) -> None:
        """Put a parameter in its place, compressed on its device if that pays; quantized ones as codes."""
        path, _dot, name = param_name.rpartition(".")
        arrived, use = param_value.to(target_device), self._uses[param_name]
        steps: torch.Tensor | None = getattr(param_value, STEPS, None)
        if steps is not None and self.residency == "packed" and not use.transposed:
            parameter = nn.Parameter(pack_arrived(arrived, steps.to(target_device)), requires_grad=False)
        else:
            parameter = compress(arrived, use, self.residency)
        parameter.requires_grad = False
        model.get_submodule(path)._parameters[name] = parameter

    def _process_model_after_weight_loading(self, model: Any, **_: object) -> None:
        """Take the config out of the model's: a residency is no part of a checkpoint."""
        entries = {key: value for key, value in model._internal_dict.items() if key != "quantization_config"}
        model._internal_dict = type(model._internal_dict)(entries)
        if self.residency == "dense":  # a plain model, which may be cast
            model.is_quantized = False
            del model.quantization_method

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What `save_pretrained` lays out, without the values of compressed weights."""
        return {
            name: DecodedWhenWritten.of(value) if is_compressed(value) else value
            for name, value in state_dict.items()
        }, {}

    def _dequantize(self, model: nn.Module) -> nn.Module:
        decompress_parameters(model)
        return model


class DecodedWhenWritten(torch.Tensor):
    """A tensor on the meta device that stands for a compressed weight while diffusers splits a checkpoint.

    diffusers calls `contiguous()` for the tensors of a file when it writes that file: the result is the
    weight, dense on the CPU.
    """

    weight: Any

    @classmethod
    def of(cls, weight: Any) -> DecodedWhenWritten:
        """A tensor that stands for a compressed weight."""
        tensor = torch.empty(weight.shape, dtype=weight.dtype, device="meta").as_subclass(cls)
        tensor.weight = weight
        return tensor

    def contiguous(self, *_: object, **__: object) -> torch.Tensor:
        """The values."""
        dense: torch.Tensor = self.weight.dense().cpu().contiguous()
        return dense
