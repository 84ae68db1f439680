"""Makes Hugging Face checkpoints smaller and proves that nothing was lost.

`__all__` lists the public names; `neuzip.delta` has names of its own. Functions on files are in
`neuzip.checkpoints`, those that run models in `neuzip.models`; the keywords of both are named as the options
of the command line.

Names are looked up when they are first used, so `import neuzip` costs nothing. A public name never equals the
name of a room: importing `neuzip.compress` binds the room to that attribute and would hide a function there.

Importing it also lets transformers and diffusers load compressed folders, and transformers the models of
`neuzip.runtime.hf.norm_placement`, and attend by "neuzip_sage8" and "neuzip_sage4": at once if what it needs
is there already, and otherwise as soon as it is imported. `import torch` imports it as well
(neuzip_autoload.py).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from neuzip import delta as delta
    from neuzip.checkpoints import compress_checkpoint as compress_checkpoint
    from neuzip.checkpoints import decompress_checkpoint as decompress_checkpoint
    from neuzip.checkpoints import diff_checkpoints as diff_checkpoints
    from neuzip.checkpoints import export_checkpoint as export_checkpoint
    from neuzip.checkpoints import inspect_checkpoint as inspect_checkpoint
    from neuzip.checkpoints import pull as pull
    from neuzip.checkpoints import push as push
    from neuzip.checkpoints import verify_checkpoint as verify_checkpoint
    from neuzip.compress.rules import Rule as Rule
    from neuzip.compress.scheme import Scheme as Scheme
    from neuzip.errors import NeuzipError as NeuzipError
    from neuzip.installation import check_installation as check_installation
    from neuzip.kernels.attention import sageattn as sageattn
    from neuzip.models import choose_kv_bits as choose_kv_bits
    from neuzip.models import evaluate as evaluate
    from neuzip.models import generate as generate
    from neuzip.runtime.hf.attention import patch_attention as patch_attention
    from neuzip.runtime.hf.attention import unpatch_attention as unpatch_attention
    from neuzip.runtime.hf.kv_cache import KVCache as KVCache
    from neuzip.runtime.hf.load import load_model as load_model
    from neuzip.runtime.hf.quantization_config import NeuzipConfig as NeuzipConfig
    from neuzip.runtime.load_file import load_file as load_file
    from neuzip.runtime.load_file import safe_open as safe_open
    from neuzip.train.trainer import train_compressed as train_compressed

__version__: str

__all__ = [
    "KVCache",
    "NeuzipConfig",
    "NeuzipError",
    "Rule",
    "Scheme",
    "__version__",
    "check_installation",
    "choose_kv_bits",
    "compress_checkpoint",
    "decompress_checkpoint",
    "diff_checkpoints",
    "evaluate",
    "export_checkpoint",
    "generate",
    "inspect_checkpoint",
    "load_file",
    "load_model",
    "patch_attention",
    "pull",
    "push",
    "safe_open",
    "sageattn",
    "train_compressed",
    "unpatch_attention",
    "verify_checkpoint",
]

_ROOMS = ("cli", "compress", "eval", "formats", "kernels", "runtime", "train")

_MODULES = ("delta",)
"""Modules with public names of their own."""

_HOME = {
    "KVCache": "neuzip.runtime.hf.kv_cache",
    "NeuzipConfig": "neuzip.runtime.hf.quantization_config",
    "NeuzipError": "neuzip.errors",
    "Rule": "neuzip.compress.rules",
    "Scheme": "neuzip.compress.scheme",
    "check_installation": "neuzip.installation",
    "choose_kv_bits": "neuzip.models",
    "compress_checkpoint": "neuzip.checkpoints",
    "decompress_checkpoint": "neuzip.checkpoints",
    "diff_checkpoints": "neuzip.checkpoints",
    "evaluate": "neuzip.models",
    "export_checkpoint": "neuzip.checkpoints",
    "generate": "neuzip.models",
    "inspect_checkpoint": "neuzip.checkpoints",
    "load_file": "neuzip.runtime.load_file",
    "load_model": "neuzip.runtime.hf.load",
    "patch_attention": "neuzip.runtime.hf.attention",
    "pull": "neuzip.checkpoints",
    "push": "neuzip.checkpoints",
    "safe_open": "neuzip.runtime.load_file",
    "sageattn": "neuzip.kernels.attention",
    "train_compressed": "neuzip.train.trainer",
    "unpatch_attention": "neuzip.runtime.hf.attention",
    "verify_checkpoint": "neuzip.checkpoints",
}
"""The module of each public name."""


if not TYPE_CHECKING:  # a type checker that saw it would take every name for a public one

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("neuzip-toolkit")
        elif name in _HOME:
            value = getattr(_imported(_HOME[name], name), name)
        elif name in (*_ROOMS, *_MODULES):
            value = import_module(f"neuzip.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def _imported(module: str, name: str) -> ModuleType:
    """The module of a public name. Raises MissingPackage, also a ModuleNotFoundError."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        from neuzip.distribution import missing_package

        if (missing := missing_package(error, f"neuzip.{name}")) is None:
            raise
        raise missing from error


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_config() -> None:
    import_module("neuzip.runtime.hf.transformers_4").register_earlier()


def _register_quantizer_and_attention() -> None:
    try:
        import_module("neuzip.runtime.hf.patches")
    except Exception as failure:
        _refuse_compressed_folders(failure)
        raise
    import_module("neuzip.runtime.hf.attention")


def _refuse_compressed_folders(reason: Exception) -> None:
    """Have transformers raise NeuzipError when it is to load one: else it would start from random weights."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    from neuzip.errors import NeuzipError

    class Refusal:
        @classmethod
        def from_dict(cls, *_: Any, **__: Any) -> None:
            raise NeuzipError(
                f"neuzip could not register with transformers, so it loads no compressed folder: {reason}",
                "restore the folder with `neuzip decompress`",
            ) from reason

    AUTO_QUANTIZATION_CONFIG_MAPPING["neuzip"] = Refusal


def _register_norm_placement() -> None:
    import_module("neuzip.runtime.hf.lazy_config").register_lazily()


def _register_with_diffusers() -> None:
    config = import_module("neuzip.runtime.hf.quantization_config").NeuzipConfig  # one for both libraries
    import_module("neuzip.runtime.diffusers.patches").register(config)


def _register_with_tensor_parallelism_of_diffusers() -> None:
    import_module("neuzip.runtime.diffusers.patches").refuse_tensor_parallel_loads()


def _register_with_adapters_of_diffusers() -> None:
    import_module("neuzip.runtime.diffusers.patches").refuse_fusing()


_REGISTER = {
    "diffusers.hooks.tensor_parallel": _register_with_tensor_parallelism_of_diffusers,
    "diffusers.loaders.peft": _register_with_adapters_of_diffusers,
    "diffusers.models.modeling_utils": _register_with_diffusers,
    "transformers.configuration_utils": _register_config,
    "transformers.modeling_utils": _register_quantizer_and_attention,
    "transformers.models.auto.configuration_auto": _register_norm_placement,
}
"""Modules of the engines, and what registers with each: nothing that imports what may be half imported."""


def _register(name: str) -> None:
    """Register with a module. What goes wrong is said, and must not keep others from using an engine."""
    try:
        _REGISTER[name]()
    except Exception as failure:
        import logging

        logging.getLogger(__name__).warning("neuzip could not register with %s: %s", name, failure)


class _WhenImported:
    """A finder that has these found by those after it, and registers what we have when one has run."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _REGISTER:
            return None
        others = sys.meta_path[sys.meta_path.index(cls) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((s for s in specs if s is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(name)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


class _Running(ModuleType):
    """A module that has not run to its end: when it has, whoever asks it for a name first has us register.

    transformers imports torch within such modules, and torch imports us. LazyLoader of importlib works alike.
    """

    def __getattribute__(self, name: str) -> Any:
        module = super()
        if not _is_running(module.__getattribute__("__spec__")):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _register(module.__getattribute__("__name__"))
        return module.__getattribute__(name)


def _is_running(spec: ModuleSpec | None) -> bool:
    return getattr(spec, "_initializing", False)


def _wait_for(name: str) -> None:
    """Register with a module that is there already: at once, or when it has run to its end."""
    module = sys.modules.get(name)
    if module is not None and _is_running(module.__spec__):
        module.__class__ = _Running
    elif module is not None:
        _register(name)


sys.meta_path.insert(0, _WhenImported)  # before the question, as other threads import too
for _name in _REGISTER:
    _wait_for(_name)
