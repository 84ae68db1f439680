"""Checkpoints of the Hub whose weight files come and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from neuzip.compress.pieces import Bytes, ReadBytes
from neuzip.compress.workspace import writing
from neuzip.errors import FormatError
from neuzip.formats.checkpoint import with_indices
from neuzip.formats.container import is_container_metadata
from neuzip.formats.hub.pull import remove_unfinished
from neuzip.formats.hub.stream import RemoteCheckpoint, download, read_range
from neuzip.formats.safetensors_file import Header, TensorFile

from .plain import PlainFile
from .source import SourceTensor


class HubSource:
    """A checkpoint of the Hub whose weight files come and go; their headers are known throughout.

    The other files have to be in `folder` before they are read. What is read of a weight file that is not
    there is fetched from the Hub.
    """

    def __init__(self, remote: RemoteCheckpoint, folder: Path, headers: Mapping[str, Header]) -> None:
        self.checkpoint = remote.at(folder)
        self.remote = remote
        self._headers = headers
        self._files: dict[str, PlainFile] = {}

    @property
    def is_compressed(self) -> bool:
        """Whether any weight file is a container."""
        return any(is_container_metadata(h.metadata) for h in self._headers.values())

    def header(self, file: str) -> Header:
        """The header of a weight file."""
        return self._headers[file]

    def file_bytes(self, file: str) -> int:
        """Size of any file of the checkpoint."""
        return self.remote.files[file].nbytes

    def tensors(self, file: str | None = None) -> Iterator[SourceTensor]:
        """The tensors of one file, or of all, in the order of the files."""
        for name in [file] if file is not None else self.checkpoint.weights:
            for info in self._headers[name].in_file_order:
                yield SourceTensor(name, info)

    def reader(self, tensor: SourceTensor, *, check: bool = False) -> ReadBytes:
        """read(start, stop) for a tensor's bytes. There are no streams to `check`."""
        if tensor.file in self._files:
            return self._files[tensor.file].reader(tensor)
        begin = len(self._headers[tensor.file].raw) + tensor.info.start

        def read(start: int, stop: int) -> Bytes:
            return np.frombuffer(read_range(self.remote, tensor.file, begin + start, begin + stop), np.uint8)

        return read

    def download_others(self) -> None:
        """Bring everything that is no weight file, and check what indices say. Raises NeuzipError."""
        root = self.checkpoint.root
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            remove_unfinished(root)
        for file in self.checkpoint.others:
            download(self.remote, file, root)
        self.checkpoint = with_indices(self.checkpoint)

    def arrive(self, file: str) -> None:
        """Read a weight file from its place from now on. Raises FormatError."""
        path = self.checkpoint.root / file
        weights = self._files[file] = PlainFile(TensorFile(path))
        if weights.header.raw != self._headers[file].raw:
            raise FormatError(path, "has another header than the Hub gave for it")

    def leave(self, file: str) -> None:
        """Delete a weight file."""
        self._files.pop(file).close()
        (self.checkpoint.root / file).unlink()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> HubSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
