"""SGLang's quantization config of the name "neuzip": large matrices are packed, other layers are SGLang's.

SGLang makes one for `--quantization neuzip`, and where a config.json asks for the residency "packed". A dense
model has none, see `hooks`.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from neuzip.runtime.serving import EngineRefusal, require_supported
from neuzip.runtime.sglang.options import ENTRY

logger = logging.getLogger("sglang.neuzip")


class SglangConfigOfNeuzip(QuantizationConfig):
    """Which method each layer of a packed model gets. `exact` decodes weights before each product."""

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        require_supported(ENTRY, metadata.version("sglang"))
        self.exact = exact
        self._experts_logged = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(exact={self.exact})"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SglangConfigOfNeuzip:
        """The config of what `hooks.served_config` wrote. Raises EngineRefusal for anything else."""
        options = config.get(ENTRY)
        if not isinstance(options, dict):
            raise EngineRefusal(
                "config.json, quantization_config: SGLang did not apply neuzip's hook, which reads it",
                "look for the reason in SGLang's log, or restore the folder with `neuzip decompress`",
            )
        return cls(options["exact"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves it to SGLang, as attention and experts. Raises EngineRefusal."""
        from neuzip.runtime.sglang import methods

        if isinstance(layer, LinearBase):
            return methods.linear_method(layer, self.exact)
        if isinstance(layer, VocabParallelEmbedding):
            return methods.embedding_method(layer, self.exact)
        if any(kind.__name__ == "FusedMoE" for kind in type(layer).__mro__) and not self._experts_logged:
            self._experts_logged = True
            logger.warning("neuzip: experts stay dense in SGLang; the other layers are packed")
        return None

    def is_linear_unquantized(self, prefix: str) -> bool:
        """Whether SGLang may compute with the bytes of a linear layer's weight: it may not."""
        return False

    def get_name(self) -> str:
        """The name that `--quantization` has."""
        return "neuzip"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes of weights that are packed."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that multiplies with packed weights: compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file beside config.json."""
        return []

    def get_scaled_act_names(self) -> list[str]:
        """No activation function is scaled."""
        return []
