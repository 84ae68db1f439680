"""The files of a compressed folder beside what its tensors are: checksums, and what was rewritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuzip.errors import FormatError
from neuzip.formats.checkpoint import (
    ORIGINAL_FOLDER,
    WEIGHTS_KEY,
    Checkpoint,
    config_files,
    file_checksum,
    index_files,
    read_lenient,
    read_stored_files,
    rewritten_config,
    rewritten_index,
)
from neuzip.formats.config_section import SECTION
from neuzip.formats.records import Record

from .sources.folder import FolderSource


def verify_files(source: FolderSource) -> int:
    """Check the files of a compressed folder other than containers; how many there are."""
    if not source.checkpoint.is_compressed_folder:
        return len(source.checkpoint.weights)
    root = source.checkpoint.root
    stored = read_stored_files(root, delta=source.allow_delta)
    present = {*source.checkpoint.weights, *source.checkpoint.others}
    for name, file in stored.items():
        place = file.place(name)
        path = root / place
        if place not in present:
            raise FormatError(path, "is missing")
        if file.is_container:
            if not source.is_container(name):
                raise FormatError(path, "is not the container that the folder's manifest says it is")
        elif path.stat().st_size != file.nbytes or file_checksum(path) != file.checksum:
            raise FormatError(path, "does not have the checksum of the folder's manifest: it is damaged")
    listed = {name for name, file in stored.items() if file.is_container}
    for name in source.checkpoint.weights:
        if name not in listed:
            raise FormatError(root / name, "is not in the folder's manifest")
    return len(stored)


def check_rewritten(source: FolderSource) -> None:
    """Compare what was rewritten in a compressed folder with the originals and the records of all tensors.

    What config.json has under `neuzip` is not looked at: how a model runs may be changed. The sentence that
    stops a transformers without neuzip may be missing, as in older folders. Raises FormatError.
    """
    checkpoint = source.checkpoint
    if not checkpoint.is_compressed_folder:
        return
    root = checkpoint.root / ORIGINAL_FOLDER
    stored = read_stored_files(checkpoint.root, delta=source.allow_delta)
    records: dict[str, dict[str, Record]] = {file: {} for file in checkpoint.weights}
    for tensor in source.tensors():
        if tensor.record is not None:
            records[tensor.file][tensor.name] = tensor.record
    lossless = all(r.lossless for of_file in records.values() for r in of_file.values())
    rewritten = tuple(file for file, how in stored.items() if how.is_rewritten)
    originals = Checkpoint(root, root, checkpoint.weights, rewritten)
    wanted = {file: rewritten_index(originals, file, records) for file in index_files(originals)}
    wanted |= {file: rewritten_config(originals, file, lossless) for file in config_files(originals)}
    for file, content in wanted.items():
        _require_entries(checkpoint.root / file, json.loads(content))


def _require_entries(path: Path, wanted: dict[str, Any]) -> None:
    """Raise FormatError unless a JSON file has these keys and values, but for those that say how to run."""
    if not path.is_file():
        raise FormatError(path, "is missing")
    document = read_lenient(path)
    for key in wanted.keys() - {SECTION}:
        if key == WEIGHTS_KEY and key not in document:
            continue  # an older folder
        # As text: NaN, which Python's JSON may hold, differs from itself.
        a, b = (json.dumps(d.get(key), sort_keys=True) for d in (document, wanted))
        if key not in document or a != b:
            raise FormatError(
                path, f"is not what follows from {ORIGINAL_FOLDER}: it is damaged", field=key,
                hint="neuzip decompress restores the original without it; where that is at hand, move the"
                " file away and repeat neuzip compress, which makes it again",
            )  # fmt: skip
