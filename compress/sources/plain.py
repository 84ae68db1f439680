"""A plain weight file, read by byte range."""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.compress.pieces import Bytes, ReadBytes
from neuzip.formats.records import Record
from neuzip.formats.safetensors_file import Header, TensorFile

from .source import Extent, SourceTensor


class PlainFile:
    """An open .safetensors file with tensors as they are."""

    is_container = False
    needs_base = False
    records: Mapping[str, Record] = {}

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    @property
    def header(self) -> Header:
        """The header of the file."""
        return self._file.header

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def reader(self, tensor: SourceTensor) -> ReadBytes:
        """read(start, stop) for the bytes of a tensor."""
        return lambda start, stop: self._file.read(tensor.info, start, stop)

    def stored_bytes(self, tensor: SourceTensor) -> int:
        """Bytes that a tensor takes in the file."""
        return tensor.info.nbytes

    def extents(self, tensor: SourceTensor) -> list[Extent]:
        """Where the bytes of a tensor lie."""
        start = self._file.data_start + tensor.info.start
        return [Extent(None, start, start + tensor.info.nbytes, None)]

    def read_into(self, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes of the file from `offset` on. For several threads."""
        self._file.read_at(offset, target)

    def check_streams(self, tensor: SourceTensor) -> None:
        """Do nothing: there are no checksums."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
