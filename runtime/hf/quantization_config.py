"""`quantization_config` of `from_pretrained`: which residency the weights of a model shall have.

One class for transformers and diffusers, so that one config serves all components of a pipeline.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  where both packages are missing, the error names torch
import transformers
from transformers.utils.quantization_config import QuantizationConfigMixin

from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.runtime.requirements import require_expert_memory, require_expert_pool

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD = "neuzip"
"""The `quant_method` of a compressed folder's config.json."""


class NeuzipMethod(str, Enum):
    """The `quant_method` of a NeuzipConfig: diffusers asks it for its `value`, transformers compares it."""

    NEUZIP = METHOD


EXPERTS = "neuzip"
"""What configs call our way to compute mixtures of experts: see `experts`."""

FILL = "_load_pretrained_model"
"""The step of `PreTrainedModel.from_pretrained` that fills a model with tensors."""


class NeuzipConfig(QuantizationConfigMixin):
    """The `quantization_config` for `from_pretrained` of transformers and diffusers: weights stay compressed.

    It works for any folder, plain or compressed by neuzip, and is not written to a checkpoint. `residency` is
    the in-memory weight format, "dense", "packed" or "ans", and `activations` how the inputs of ternary
    layers are quantised. `expert_memory` limits the bytes of experts on a GPU, and `expert_pool_bytes` those
    of the pool of decoded experts. All are as in `load_model`.

    Raises UsageError for values that do not exist, and NeuzipError for a version of transformers that cannot
    do it.
    """

    def __init__(
        self,
        residency: str = "dense",
        activations: str | Mapping[str, Any] | None = None,
        *,
        expert_memory: int | None = None,
        expert_pool_bytes: int | None = None,
    ) -> None:
        if residency != "dense":
            from neuzip.runtime.activations import Activations
            from neuzip.runtime.residency import require_residency

            require_residency(residency)
            activations = None if activations is None else Activations.of(activations).to_json()
        elif activations is not None:
            raise UsageError(
                f"activations {activations!r}: the inputs of a dense model are not quantised",
                "give the residency 'packed', which keeps ternary weights in 2 bits",
            )
        require_expert_memory(expert_memory, residency)
        require_expert_pool(expert_pool_bytes, residency)
        self.quant_method = NeuzipMethod.NEUZIP  # type: ignore[assignment]
        self.residency = residency
        self.activations = activations
        self.expert_memory, self.expert_pool_bytes = expert_memory, expert_pool_bytes
        self.weights_file: str | None = None  # `transformers_weights` of the original's config.json
        from transformers import modeling_utils
        from transformers.quantizers.base import HfQuantizer

        if not hasattr(modeling_utils.PreTrainedModel, FILL):
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
        for name in ("expert_memory", "expert_pool_bytes"):
            value = getattr(self, name)
            more += "" if value is None else f", {name}={value}"
        return f"{type(self).__name__}(residency={self.residency!r}{more})"


class PlacedConfig(NeuzipConfig):
    """The config of `load_model`, which hands tensors out where they shall stay, without a device map."""
