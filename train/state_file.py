"""A file of the state of a run: tensors, and in the metadata one JSON text of all else.

One text, because safetensors writes several entries in an order that changes: so the same state is the same
bytes. It has a checksum of the tensors, as a run that went on from damaged ones would not notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neuzip.errors import FormatError

VERSION = "1"


def write_state(path: Path, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts; `kind` says of what. Raises OSError and SafetensorError."""
    text = json.dumps({"version": VERSION, **facts, "checksum": _checksum(tensors)})
    save_file(dict(tensors), path, {kind: text})


def read_state(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the tensors.

    Raises FormatError for what is no such file and for a damaged one, FileNotFoundError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = _facts(path, kind, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except SafetensorError as error:
        raise FormatError(path, f"is not a safetensors file: {error}") from error
    # Older files have none.
    if "checksum" in facts and facts["checksum"] != _checksum(tensors):
        raise FormatError(path, "does not have the tensors that were written: it is damaged")
    return facts, tensors


def _facts(path: Path, kind: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata[kind])
    except (KeyError, ValueError) as error:
        raise FormatError(path, f"is no state of {kind}", field=kind) from error
    if not isinstance(facts, dict):
        raise FormatError(path, f"is no state of {kind}", field=kind)
    version = facts.get("version", metadata.get("version"))
    if version != VERSION:
        raise FormatError(path, f"has version {version}, not {VERSION}", field="version")
    return facts


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-64 of names and bytes, in the order of the names."""
    running = xxhash.xxh3_64()
    for name, tensor in sorted(tensors.items()):
        running.update(name.encode())
        running.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return running.hexdigest()
