"""A container, read by byte range: its streams for the codecs, with their checksums compared on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from neuzip.compress.device import Device
from neuzip.compress.pieces import Bytes, ReadBytes, digest
from neuzip.compress.schemes import codec_of
from neuzip.compress.schemes.codec import StoredTensor
from neuzip.errors import FormatError
from neuzip.formats.container import Container, checksum
from neuzip.formats.records import Record, stream_name
from neuzip.formats.safetensors_file import Header, TensorFile

from .source import Extent, SourceTensor


class ContainerFile:
    """A container with compressed tensors, from the open file; one of a delta only if `delta`."""

    is_container = True

    def __init__(self, file: TensorFile, *, delta: bool) -> None:
        self._container = Container(file, delta=delta)
        self.path = self._container.path

    @property
    def needs_base(self) -> bool:
        """Whether another checkpoint is needed to restore the file."""
        return self._container.manifest.needs_base

    @property
    def records(self) -> Mapping[str, Record]:
        """How each tensor is stored."""
        return self._container.manifest.tensors

    @property
    def header(self) -> Header:
        """The header of the file as it was before compression."""
        return self._container.original

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._container.file.size

    def stored_bytes(self, tensor: SourceTensor) -> int:
        """Bytes that a tensor takes in the file, its names and records not counted."""
        return self._container.stored_bytes(tensor.name)

    def stored(
        self,
        tensor: SourceTensor,
        device: Device,
        holder: Callable[[], ReadBytes],
        base: Callable[[], ReadBytes],
        *,
        check: bool = False,
    ) -> StoredTensor[Any]:
        """A tensor for its codec, decoded on `device`. Raises FormatError for a dtype that the codec has not.

        With `check` a stream that is read whole, as its table is, is compared with its checksum.
        """
        container, name, record = self._container, tensor.name, self.records[tensor.name]
        if record.stream_dtypes and not codec_of(record).takes(tensor.info.dtype):
            raise FormatError(
                self.path, f"{tensor.info.dtype} cannot be {record.scheme}", tensor=name, field="scheme"
            )

        def length(stream: str) -> int:
            return container.stream_bytes(name, stream)

        def read(stream: str, start: int, stop: int) -> Bytes:
            data = container.read_stream(name, stream, start, stop)
            if check and (start, stop) == (0, length(stream)):
                self._require_checksum(name, stream, checksum(data), record.streams[stream])
            return data

        gpu = device.gpu_for(tensor.info.numel) if record.stream_dtypes else None
        starts = {e.stream: e.start for e in self.extents(tensor)} if gpu is not None else {}
        return StoredTensor(
            tensor.info, record, read, length,
            lambda start, stop: container.read_raw(name, start, stop), holder, base, gpu,
            lambda stream, at, target: self.read_into(starts[stream] + at, target),
        )  # fmt: skip

    def extents(self, tensor: SourceTensor) -> list[Extent]:
        """Where the bytes of a tensor that is no alias lie: its streams, or its bytes as they are."""
        record, file = self.records[tensor.name], self._container.file
        if not record.streams:
            start = file.data_start + self._container.raw_start(tensor.name)
            return [Extent(None, start, start + tensor.info.nbytes, record.checksum)]
        extents = []
        for stream, expected in record.streams.items():
            info = file.header.tensors[stream_name(tensor.name, stream)]
            extents.append(
                Extent(stream, file.data_start + info.start, file.data_start + info.stop, expected)
            )
        return extents

    def read_into(self, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes of the file from `offset` on. For several threads."""
        self._container.file.read_at(offset, target)

    def check_streams(self, tensor: SourceTensor) -> None:
        """Compare a tensor's streams with their checksums. Raises FormatError."""
        container, name = self._container, tensor.name
        for stream, expected in self.records[name].streams.items():
            total = container.stream_bytes(name, stream)
            actual = digest(lambda a, b, s=stream: container.read_stream(name, s, a, b), total)  # type: ignore[misc]
            self._require_checksum(name, stream, actual, expected)

    def _require_checksum(self, tensor: str, stream: str, actual: str, expected: str) -> None:
        if actual != expected:
            raise FormatError(
                self.path, f"has the checksum {actual} instead of {expected}: the file is damaged",
                tensor=tensor, field=stream,
            )  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        self._container.close()
