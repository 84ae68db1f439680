"""The quantization config that vLLM makes where a folder is compressed by neuzip, or `quantization="neuzip"`.

vLLM pickles it for its worker processes. In each process in which one comes to be, vLLM's default loader is
replaced by ours: so a start without neuzip has vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from neuzip.runtime.serving import (
    SECTION,
    EngineRefusal,
    ServingOptions,
    checked,
    require_readable,
    require_supported,
)
from neuzip.runtime.vllm.options import ENTRY, serving_options


class VllmConfigOfNeuzip(QuantizationConfig):
    """Which method each layer of a model gets. `is_compressed` says that the folder is a compressed one."""

    def __init__(self, is_compressed: bool = False) -> None:
        super().__init__()
        self.is_compressed = is_compressed
        self.entry: Any = None
        """What config.json has for vLLM in neuzip's section."""

        self._options: ServingOptions | None = None
        self._prepare_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare_process()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(is_compressed={self.is_compressed})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VllmConfigOfNeuzip:
        """The config of a compressed folder. Raises EngineRefusal for one that vLLM cannot serve."""
        require_readable(config)
        original = config.get("original")
        if original is not None:
            method = original.get("quant_method") if isinstance(original, dict) else original
            raise EngineRefusal(
                f"vLLM cannot serve weights that were quantized ({method}) before neuzip compressed them",
                "restore the folder with `neuzip decompress`, and serve that",
            )
        return cls(is_compressed=True)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Take over what config.json says, as soon as vLLM has read it. Raises EngineRefusal."""
        section = getattr(hf_config, SECTION, None)
        if section is not None:
            entry = section.get(ENTRY) if isinstance(section, dict) else None
            checked(entry, f"config.json, {SECTION}.{ENTRY}", ENTRY)
            self.entry, self._options = entry, None

    def options(self) -> ServingOptions:
        """The options of the start whose model is being made. Raises EngineRefusal.

        They are kept: vLLM has no current config when it reloads weights, and asks for methods again.
        """
        if self._options is not None:
            return self._options
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        if self.is_compressed:
            from neuzip.runtime.vllm.loader import require_loader

            require_loader(config.load_config.load_format)
        additional = config.additional_config
        neuzip_options = additional.get(SECTION) if isinstance(additional, dict) else None
        self._options = serving_options(neuzip_options, self.entry, is_compressed=self.is_compressed)
        return self._options

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves it to vLLM, as attention. Raises EngineRefusal."""
        from neuzip.runtime.vllm.choice import method_of

        return method_of(layer, prefix, self.options())

    def get_name(self) -> Any:
        """The name that `quantization` has."""
        return "neuzip"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All dtypes that a model can compute in; packed weights have fewer, see `methods`."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that decodes: compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file beside config.json."""
        return []

    @staticmethod
    def _prepare_process() -> None:
        """Have this process load with our loader. Raises EngineRefusal for an unsupported version."""
        import vllm

        require_supported(ENTRY, vllm.__version__)
        from neuzip.runtime.vllm.loader import install

        install()
