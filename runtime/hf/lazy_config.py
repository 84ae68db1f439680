"""What tells transformers' AutoConfig of `norm_placement`, and imports it when a config is asked for.

Not earlier: transformers may be in the middle of importing what `norm_placement` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuzip.runtime.hf.model_types import NORM_PLACEMENT

if TYPE_CHECKING:
    from neuzip.runtime.hf.norm_placement import NormPlacementConfig


class LazyConfig:
    """The class of the config for AutoConfig: imports the real one when transformers asks for a config."""

    def __new__(cls, **options: Any) -> NormPlacementConfig:  # type: ignore[misc]
        return cls._real()(**options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """The config of a config.json."""
        return cls._real().from_dict(config_dict, **options)

    @staticmethod
    def _real() -> type[NormPlacementConfig]:
        from neuzip.runtime.hf.norm_placement import NormPlacementConfig

        return NormPlacementConfig


def register_lazily() -> None:
    """Make the config known to AutoConfig, unless it is."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if NORM_PLACEMENT not in CONFIG_MAPPING:
        CONFIG_MAPPING.register(NORM_PLACEMENT, LazyConfig)  # type: ignore[arg-type]
