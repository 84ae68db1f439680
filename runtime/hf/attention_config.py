"""Bits of each layer's attention in config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neuzip.errors import FormatError, UsageError
from neuzip.formats.config_section import SECTION, read_config
from neuzip.runtime.config_entries import ConfigEntry

Layers = tuple[int | None, ...]
"""Bits of each layer; None: full precision."""

NAME = "attention"

FIELD = f"{SECTION}.{NAME}.layers"

BITS = (4, 8)


def record_layers(folder: str | os.PathLike[str], layers: int | Sequence[int | None]) -> None:
    """Write bits of each layer to the config.json of a folder; of a compressed one the original's stays.

    Raises UsageError for bits that there are not and for a wrong number of layers, FormatError for a
    config.json that is not there or that cannot be read.
    """
    path = Path(folder) / "config.json"
    count = _layer_count(read_config(path))
    if count is None and isinstance(layers, int):
        raise FormatError(path, "does not say how many layers there are", field="num_hidden_layers")
    LAYERS_ENTRY.write(folder, checked_layers(layers, count))


def _parsed(value: Any, document: Mapping[str, Any], path: str | os.PathLike[str]) -> Layers:
    if not isinstance(value, Mapping) or not isinstance(value.get("layers"), list | tuple):
        raise FormatError(path, 'not an object with a list of "layers"', field=f"{SECTION}.{NAME}")
    try:
        return checked_layers(value["layers"], _layer_count(document))
    except UsageError as error:
        raise FormatError(path, error.message, field=FIELD, hint=error.hint) from error


def _to_json(layers: Layers) -> dict[str, Any]:
    return {"layers": list(layers)}


LAYERS_ENTRY: ConfigEntry[Layers] = ConfigEntry(NAME, _parsed, _to_json)
"""The bits of each layer that a config.json records."""


def checked_layers(layers: int | Sequence[int | None], count: int | None) -> Layers:
    """Bits of each of `count` layers. Raises UsageError."""
    if not isinstance(layers, int | Sequence):
        raise UsageError(f"attention of {layers!r} bits: there is none", "give 8, 4, or a number a layer")
    chosen = (layers,) * (count or 0) if isinstance(layers, int) else tuple(layers)
    for bits in {layers} if isinstance(layers, int) else chosen:
        if bits is not None and (type(bits) is not int or bits not in BITS):
            raise UsageError(
                f"attention of {bits!r} bits: there is none", "give 8, 4, or None for full precision"
            )
    if count is not None and len(chosen) != count:
        raise UsageError(miscounted(chosen, count), "give one number, or one for each layer")
    return chosen


def miscounted(layers: Sequence[object], count: int) -> str:
    """The message of an error about bits for another number of layers."""
    return f"bits of attention for {len(layers)} layers, but the model has {count}"


def _layer_count(document: Mapping[str, Any]) -> int | None:
    """How many layers a config.json says the model has, by the names that models have for it."""
    for part in (document, document.get("text_config")):
        if isinstance(part, Mapping):
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                if type(part.get(name)) is int:
                    return int(part[name])
    return None
