"""Names of transformers that are replaced so that it loads and saves compressed folders.

transformers lets a quantizer change parameters, but not how files are read and written. `register` therefore
replaces what opens a safetensors file, where transformers asks for a dtype, and what writes one; the step
that fills a model, and the one that saves it; and how the config of a caller is joined with the checkpoint's.
All are replaced once and for good: threads may save at the same time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any

from transformers import modeling_utils
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
)

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.filling import filled_by_us
from neuzip.runtime.hf.quantization_config import EXPERTS, FILL, METHOD, NeuzipConfig

if TYPE_CHECKING:
    from transformers.quantizers.base import HfQuantizer

_registering = Lock()


def register() -> None:
    """Let transformers load and save compressed folders. For any thread, any number of times."""
    with _registering:
        if METHOD in AUTO_QUANTIZER_MAPPING:
            return
        AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = NeuzipConfig
        modeling_utils.safe_open = _safe_open  # type: ignore[assignment, attr-defined]
        _replace(modeling_utils, "safe_save_file", _with_values)
        _replace(modeling_utils.PreTrainedModel, FILL, filled_by_us)
        _replace(modeling_utils.PreTrainedModel, "save_pretrained", _as_container)
        _replace(modeling_utils.PreTrainedModel, "get_correct_experts_implementation", _with_our_experts)
        _replace(AutoHfQuantizer, "merge_quantization_configs", _with_our_config)
        _register_experts()
        AUTO_QUANTIZER_MAPPING[METHOD] = make_quantizer  # type: ignore[assignment]  # last: who sees it finds all


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put a changed function in the place of one; a static or class method stays one.

    Where it is missing, `NeuzipConfig` says so: transformers must stay usable.
    """
    function = inspect.getattr_static(owner, name, None)
    if isinstance(function, staticmethod | classmethod):
        setattr(owner, name, type(function)(change(function.__func__)))
    elif function is not None:
        setattr(owner, name, change(function))


def make_quantizer(config: NeuzipConfig, **options: Any) -> HfQuantizer:
    """The quantizer for a residency."""
    from neuzip.runtime.hf.quantizer import CompressingQuantizer, DenseQuantizer

    kind: Any = DenseQuantizer if config.residency == "dense" else CompressingQuantizer
    quantizer: HfQuantizer = kind(config, **options)
    return quantizer


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
        from neuzip.runtime.hf.quantizer import CompressingQuantizer

        is_ours = isinstance(getattr(model, "hf_quantizer", None), CompressingQuantizer)
        saves_adapters = getattr(model, "_hf_peft_config_loaded", False)  # and nothing else
        if not is_ours or saves_adapters:
            return save(*arguments, **options)
        from neuzip.runtime.save import require_folder, save_call

        require_folder(model.hf_quantizer.residency, settings)
        from neuzip.runtime.bitlinear import bit_linears

        if bit_linears(model):
            raise NeuzipError(
                "a model with ternary layers is not saved, as their scales would be rounded to its dtype",
                "copy the folder it came from, or make it dense first: model.dequantize()",
            )
        return save_call(save, call)

    return save_pretrained


def _register_experts() -> None:
    """Let configs name our experts; transformers 4 has no interface for them."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _experts(*arguments: Any, **options: Any) -> Any:
    from neuzip.runtime.hf.experts import experts_forward

    return experts_forward(*arguments, **options)


def _with_our_experts(check: Any) -> Any:
    """What looks whether an implementation of experts exists: early versions of 5 have a list for that."""

    @wraps(check)
    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> Any:
        return EXPERTS if requested_experts == EXPERTS else check(self, requested_experts)

    return get_correct_experts_implementation


def _with_our_config(merge: Any) -> Any:
    """How transformers joins the config of a caller with the checkpoint's: the caller's residency counts."""

    @wraps(merge)
    def merged(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        stored, config = quantization_config, quantization_config_from_args
        if not isinstance(config, NeuzipConfig):
            return merge(cls, stored, config)
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        if method != METHOD:
            raise NeuzipError(
                f"the weights are quantized already ({method}), so there is no residency for them",
                "leave quantization_config out, or load a checkpoint that is not quantized",
            )
        original = NeuzipConfig.from_dict(stored) if isinstance(stored, dict) else stored
        chosen = copy.copy(config)
        chosen.weights_file = original.weights_file
        return chosen

    return merged


register()  # here, as importing transformers' models imports this, and the other way round
