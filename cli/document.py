"""The one JSON object of a run under `--json`: its envelope, and values as JSON knows them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from os import PathLike
from typing import Any

from neuzip.cli.command_run import RUN

SCHEMA = 2
"""The version of the keys in neuzip.cli.schema, which no command reads: describing them takes milliseconds.

It goes up when a key changes its name, its type or its meaning; a new key leaves it as it is.
"""


def print_document(data: Mapping[str, object]) -> None:
    """Print the one object of a run under --json."""
    from neuzip import __version__

    RUN.answered = True
    envelope = {"schema": SCHEMA, "neuzip": __version__, "command": RUN.command}
    print(json.dumps({**envelope, **plain(data)}, indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Turn a value into what JSON knows: dataclasses become objects, paths strings, NaN and infinity null.

    >>> plain({"loss": float("inf"), "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")
