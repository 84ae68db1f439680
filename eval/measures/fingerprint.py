"""What a measurement depends on: the same values, the same measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from neuzip.formats.checkpoint import Checkpoint, file_checksum


def of_checkpoint(checkpoint: Checkpoint) -> str:
    """A checksum of all files of a checkpoint and their names. Reads them whole."""
    files = (*checkpoint.weights, *checkpoint.others)
    return of_values({file: file_checksum(checkpoint.root / file) for file in sorted(files)})


def of_text(text: str) -> str:
    """A checksum of a text."""
    return xxhash.xxh3_64(text.encode("utf-8", "surrogatepass")).hexdigest()


def of_values(values: Mapping[str, Any]) -> str:
    """A checksum of plain values, whatever their order."""
    return of_text(json.dumps(values, sort_keys=True))


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names of the values that are not the same in both.

    >>> differing({"text": 1, "dtype": 2}, {"text": 1, "window": 3})
    ['dtype', 'window']
    """
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
