"""What tells transformers' AutoConfig of `norm_placement`, and imports it when a config is asked for.

Not earlier: transformers may be in the middle of importing what `norm_placement` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuzip.runtime.hf.norm_placement import NormPlacementConfig

MODEL_TYPE = "neuzip_norm_placement"


class LaterConfig:
    """What stands for the config until transformers asks for one."""

    def __new__(cls, **options: Any) -> NormPlacementConfig:  # type: ignore[misc]
        return cls._real()(**options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """As the config's own."""
        return cls._real().from_dict(config_dict, **options)

    @staticmethod
    def _real() -> type[NormPlacementConfig]:
        from neuzip.runtime.hf.norm_placement import NormPlacementConfig

        return NormPlacementConfig


def register_later() -> None:
    """Make the config known to AutoConfig, unless it is."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if MODEL_TYPE not in CONFIG_MAPPING:
        CONFIG_MAPPING.register(MODEL_TYPE, LaterConfig)  # type: ignore[arg-type]
