"""What we write into a model's config.json: the object "neuzip", an entry a matter.

    activations     how the inputs of ternary layers are quantised (runtime/activations.py)
    attention       in how many bits each layer attends (runtime/hf/attention_config.py)
    dropped_layers  which layers a model was made without (eval/layers/removal.py)

Loaders of others ignore it. A compressed folder has its own beside that of the original.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuzip.errors import FULL, DiskFull, FormatError, NeuzipError
from neuzip.formats.safetensors_file import opener, parse_json

SECTION = "neuzip"
"""The key in config.json, and the attribute of a config of transformers."""


def read_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises FormatError for what is none."""
    if not path.is_file():
        raise FormatError(path, "is not there", hint="give the folder of a model")
    document = parse_json(path.read_bytes(), path)
    if not isinstance(document, dict):
        raise FormatError(path, "not an object")
    return document


def own_section(document: Mapping[str, Any], path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Our section of a config.json, empty if there is none. Raises FormatError if it is no object."""
    section = document.get(SECTION)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise FormatError(path, "not an object", field=SECTION)
    return section


def with_entry(
    document: Mapping[str, Any], name: str, value: object, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """A config.json with an entry of our section. Raises FormatError if the section is no object."""
    return {**document, SECTION: {**own_section(document, path), name: value}}


def write_entry(path: Path, name: str, value: object) -> None:
    """Put an entry into our section of a config.json, at once or not at all. Raises NeuzipError."""
    document = with_entry(read_config(path), name, value, path)
    new = path.with_name(f"{path.name}.new")
    mode = stat.S_IMODE(path.stat().st_mode) & 0o777
    try:
        with open(new, "w", encoding="utf-8", opener=opener(mode)) as file:
            file.write(json.dumps(document, indent=2) + "\n")
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        if error.errno in FULL:
            raise DiskFull(path) from error
        raise NeuzipError(f"{path}: cannot be written: {error.strerror}") from error
