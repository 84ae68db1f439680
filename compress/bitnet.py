"""Checkpoints of transformers' bitnet: which of their weights it makes ternary in every forward pass."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from neuzip.errors import NeuzipError

from .sources.source import TensorSource

LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json that is read."""


def online_config(source: TensorSource) -> dict[str, Any] | None:
    """The quantization_config that has transformers make weights ternary in every forward pass, or None."""
    config = config_of(source).get("quantization_config")
    return config if is_online(config) else None


def config_of(source: TensorSource) -> dict[str, Any]:
    """The config.json of a checkpoint; {} where there is none to read, of which whoever needs it says so."""
    path = source.checkpoint.root / "config.json"
    if "config.json" not in source.checkpoint.others or path.stat().st_size > LARGEST_CONFIG:
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_online(config: object) -> TypeGuard[dict[str, Any]]:
    """Whether a quantization_config says that transformers' bitnet rounds floats in every forward pass."""
    wanted = {"quant_method": "bitnet", "quantization_mode": "online"}
    return isinstance(config, dict) and wanted.items() <= config.items()


def bitnet_converts(name: str, config: Mapping[str, Any]) -> bool:
    """Whether transformers' bitnet makes a tensor ternary, as its should_convert_module says.

    `config` is the quantization_config. Raises NeuzipError for what is no regular expression.
    """
    module, _, kind = name.rpartition(".")
    skipped = config.get("modules_to_not_convert")
    skipped = [k for k in skipped if isinstance(k, str)] if isinstance(skipped, list) else ["lm_head"]
    try:
        return kind == "weight" and not any(
            module.endswith(k) or re.match(rf"(?:{k})(?:(?<=\.)|(?=\.|$))", module) for k in skipped
        )
    except re.error as error:
        raise NeuzipError(f"config.json: modules_to_not_convert: {error}", "correct it") from error
