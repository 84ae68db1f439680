"""Names of diffusers that are replaced so that it loads and saves compressed folders.

diffusers lets a quantizer change parameters, but not how files are read. `register` therefore replaces the
function that reads a config, the one that reads a file of weights, and the one that finds the shards of a
folder; `save_pretrained` of models; and, for clear errors, a check before a tensor-parallel load and the
function that fuses adapters. All are replaced once and for good, by `neuzip/__init__.py`, when diffusers is
imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from threading import Lock
from typing import Any

from neuzip.distribution import ENGINES
from neuzip.errors import NeuzipError
from neuzip.runtime.diffusers.reading import (
    METHOD,
    decoding,
    refusing,
    refusing_slices,
    with_tensor_names,
    without_section,
)

NEEDED = {
    "diffusers.configuration_utils": ("ConfigMixin.load_config",),
    "diffusers.models.model_loading_utils": ("load_state_dict",),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained", "_get_checkpoint_shard_files"),
    "diffusers.quantizers.base": ("DiffusersQuantizer.get_state_dict_and_metadata",),
    "diffusers.quantizers.auto": ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"),
}
"""Modules of diffusers, and the names in them that are replaced or added to."""

_registering = Lock()


def register(config_class: type) -> None:
    """Let diffusers load and save compressed folders. For any thread, any number of times.

    `config_class` is the class of `quantization_config`, NeuzipConfig. A version of diffusers that lacks a
    name stays as it is, but raises NeuzipError for compressed folders.
    """
    with _registering:
        config_mixin = import_module("diffusers.configuration_utils").ConfigMixin
        if hasattr(inspect.getattr_static(config_mixin, "load_config"), _MARK):
            return
        missing = missing_names()
        if missing:
            reason, hint = unsupported(missing)
            _replace(config_mixin, "load_config", lambda load: refusing(load, reason, hint))
        else:
            _register(config_class)
            _replace(config_mixin, "load_config", without_section)
        setattr(inspect.getattr_static(config_mixin, "load_config"), _MARK, True)


_MARK = "_knows_compressed_folders"


def missing_names() -> list[str]:
    """The names that this version of diffusers lacks."""
    missing = []
    for module, names in NEEDED.items():
        for name in names:
            try:
                owner: Any = import_module(module)
                for part in name.split("."):
                    owner = getattr(owner, part)
            except (ImportError, AttributeError):
                missing.append(f"{module}.{name}")
    return missing


def unsupported(missing: list[str]) -> tuple[str, str]:
    """Why and what to do, for a message."""
    from diffusers import __version__

    return (
        f"neuzip does not know how diffusers {__version__} reads files (there is no {missing[0]})",
        f"install another version of diffusers ({ENGINES['diffusers'].versions}), or restore the folder with "
        "`neuzip decompress`",
    )


def _register(config_class: type) -> None:
    loading = import_module("diffusers.models.model_loading_utils")
    models = import_module("diffusers.models.modeling_utils")
    auto = import_module("diffusers.quantizers.auto")
    _replace_everywhere("load_state_dict", loading.load_state_dict, decoding(loading.load_state_dict))
    _replace(models, "_get_checkpoint_shard_files", with_tensor_names)
    _replace(models.ModelMixin, "save_pretrained", as_container)
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = config_class
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = make_quantizer


def refuse_tensor_parallel_loads() -> None:
    """Raise NeuzipError for compressed files when diffusers is to read slices of them."""
    with _registering:
        parallel = import_module("diffusers.hooks.tensor_parallel")
        _replace(parallel, "_check_tp_weights_format", refusing_slices)


def refuse_fusing() -> None:
    """Raise NeuzipError when adapters are to be added to compressed weights, before any has been."""
    with _registering:
        mixin = import_module("diffusers.loaders.peft").PeftAdapterMixin
        _replace(mixin, "fuse_lora", not_into_compressed)


def not_into_compressed(fuse: Callable[..., Any]) -> Callable[..., Any]:
    """`fuse_lora` of models whose weights are dense."""

    @wraps(fuse)
    def fuse_lora(self: Any, *arguments: Any, **options: Any) -> Any:
        from neuzip.runtime.residency import is_compressed

        if any(map(is_compressed, self.parameters())):
            raise NeuzipError(
                f"fuse_lora would change compressed weights of {type(self).__name__}, which are frozen",
                "use the adapter without fusing it, or load the model dense",
            )
        return fuse(self, *arguments, **options)

    return fuse_lora


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put a changed function in the place of one; a class method stays one."""
    function = inspect.getattr_static(owner, name, None)
    if isinstance(function, classmethod):
        setattr(owner, name, classmethod(change(function.__func__)))
    elif function is not None:
        setattr(owner, name, change(function))


def _replace_everywhere(function: str, old: Any, new: Any) -> None:
    """Put a function in the place of another in all modules of diffusers that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "diffusers" and vars(module).get(function) is old:
            setattr(module, function, new)


def make_quantizer(config: Any, **options: Any) -> Any:
    """The quantizer for a NeuzipConfig."""
    from neuzip.runtime.diffusers.quantizer import NeuzipDiffusersQuantizer

    return NeuzipDiffusersQuantizer(config, **options)


def as_container(save: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained`, which of a model that is compressed in memory makes a compressed folder."""
    signature = inspect.signature(save)

    @wraps(save)
    def save_pretrained(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        model, settings = arguments[0], call.arguments
        quantizer = getattr(model, "hf_quantizer", None)
        residency = getattr(quantizer, "residency", "dense")
        config = getattr(quantizer, "quantization_config", None)
        if residency == "dense" or getattr(config, "quant_method", None) != METHOD:
            return save(*arguments, **options)
        from neuzip.runtime.save import require_folder, save_call

        require_folder(residency, settings)
        require_safetensors(residency, settings)
        return save_call(save, call)

    return save_pretrained


def require_safetensors(residency: str, settings: dict[str, Any]) -> None:
    """Raise NeuzipError for arguments of `save_pretrained` that ask for another kind of file."""
    if not settings.get("safe_serialization", True) or settings.get("use_flashpack"):
        raise NeuzipError(
            f"a model of the residency {residency!r} is saved as safetensors only",
            "leave out `safe_serialization` and `use_flashpack`, or call model.dequantize() first",
        )
