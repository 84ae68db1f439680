"""The checkpoint that a delta is made against, and is restored with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.errors import NeuzipError
from neuzip.formats.records import OfBaseRecord

from .pieces import digest
from .sources.folder import FolderSource
from .sources.source import SourceTensor

if TYPE_CHECKING:
    from .workers import Workers

LARGEST_CONFIG = 1 << 20
"""Bytes of a config.json that is looked into for a name."""


class DeltaBase:
    """The tensors of a base beside those of `source`. `name` is what people call it; see `name_of`."""

    def __init__(self, source: FolderSource, name: str) -> None:
        self.source = source
        self.name = name
        self._tensors: dict[tuple[str, str], list[SourceTensor]] = {}
        for tensor in source.tensors():
            self._tensors.setdefault((_folder(tensor.file), tensor.name), []).append(tensor)

    def sizes(self) -> dict[str, int]:
        """The sizes of its weight files as they are restored, to know it by."""
        headers = {file: self.source.header(file) for file in self.source.checkpoint.weights}
        return {file: len(header.raw) + header.data_bytes for file, header in headers.items()}

    def counterpart(self, tensor: SourceTensor) -> SourceTensor | None:
        """The tensor of the same name, dtype and shape, in the file of the same name or another beside it."""
        alike = [
            t
            for t in self._tensors.get((_folder(tensor.file), tensor.name), ())
            if t.info.same_kind(tensor.info)
        ]
        return next((t for t in alike if t.file == tensor.file), alike[0] if alike else None)


def _folder(path: str) -> str:
    return path[: path.rfind("/") + 1]


def name_of(path: str | os.PathLike[str], argument: str) -> str:
    """The name of a base: `argument` if that is a Hub id, or what config.json says, or its folder's name."""
    path = Path(path)
    if not Path(argument).exists():
        return argument
    config = path / "config.json"
    if config.is_file() and config.stat().st_size <= LARGEST_CONFIG:
        try:
            document = json.loads(config.read_bytes())
        except (ValueError, RecursionError):  # only a name was wanted
            document = None
        name = document.get("_name_or_path") if isinstance(document, dict) else None
        if isinstance(name, str) and name and not os.path.isabs(name):
            return name
    return path.resolve().name


def check_base(source: FolderSource, workers: Workers) -> None:
    """Compare the base's tensors with the checksums that a delta was made against. Raises NeuzipError.

    Before anything is added to anything, or written.
    """
    assert source.base is not None
    needing = [(t, t.record) for t in source.tensors() if isinstance(t.record, OfBaseRecord)]
    counterparts = [source.base_tensor(t) for t, _ in needing]

    def checksum(tensor: SourceTensor) -> str:
        assert source.base is not None
        return digest(source.base.reader(tensor), tensor.info.nbytes)

    checksums = workers.map(checksum, counterparts)
    for (tensor, record), counterpart, actual in zip(needing, counterparts, checksums, strict=True):
        if actual != record.base_checksum:
            raise NeuzipError(
                f"{source.base.checkpoint.root / counterpart.file}: tensor {counterpart.name!r} has the "
                f"checksum {actual}, and {source.checkpoint.root / tensor.file} was made against one with "
                f"{record.base_checksum}",
                source.base_hint(),
            )
