"""The tensors of a checkpoint, plain or compressed: the same view of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import Checkpoint, find_checkpoint
from neuzip.formats.container import Container, is_container
from neuzip.formats.manifest import TensorRecord
from neuzip.formats.tensor_file import DTYPE_BITS, Header, TensorFile, TensorInfo
from neuzip.kernels.float_fields import FORMATS

from . import lossless, truncated
from .lossless import PIECE

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint. `record` says how a compressed one is stored; a plain one has none."""

    file: str
    info: TensorInfo
    record: TensorRecord | None = None

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return self.info.name

    def pieces(self) -> Sequence[tuple[int, int]]:
        """Byte ranges that cover it, cut where the coder cuts."""
        return _Pieces(self.info.nbytes, PIECE * DTYPE_BITS.get(self.info.dtype, 8) // 8)


@dataclass(frozen=True)
class _Pieces(Sequence[tuple[int, int]]):
    """Ranges of `width` bytes that cover `total`. Not a list: `total` may be what a hostile header claims."""

    total: int
    width: int

    def __len__(self) -> int:
        return -(-self.total // self.width)

    def __getitem__(self, i: Any) -> Any:
        start = range(0, self.total, self.width)[i]
        return start, min(start + self.width, self.total)


class TensorSource:
    """All tensors of a checkpoint, read by byte range: `with TensorSource(path) as source`.

    Raises NeuzipError or FormatError for what is no checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str] | Checkpoint) -> None:
        self.checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path)
        self._files: dict[str, TensorFile | Container] = {}
        try:
            for file in self.checkpoint.weights:
                self._files[file] = open_weights(self.checkpoint.root / file)
        except BaseException:
            self.close()
            raise

    @property
    def is_compressed(self) -> bool:
        """Whether any of its files is a container."""
        return any(isinstance(f, Container) for f in self._files.values())

    def header(self, file: str) -> Header:
        """The header of a weight file as it was before compression."""
        opened = self._files[file]
        return opened.original if isinstance(opened, Container) else opened.header

    def opened(self, file: str) -> TensorFile | Container:
        """The open file itself."""
        return self._files[file]

    def tensors(self, file: str | None = None) -> Iterator[SourceTensor]:
        """The tensors of one file, or of all, in the order of the original files."""
        for name in [file] if file is not None else self.checkpoint.weights:
            opened = self._files[name]
            records = opened.manifest.tensors if isinstance(opened, Container) else {}
            for info in self.header(name).in_file_order:
                yield SourceTensor(name, info, records.get(info.name))

    def reader(self, tensor: SourceTensor) -> Callable[[int, int], Bytes]:
        """read(start, stop) for a tensor's restored bytes; both at multiples of its element size.

        For several threads. Raises FormatError, now or when reading, for streams that cannot be decoded.
        """
        opened = self._files[tensor.file]
        if isinstance(opened, TensorFile):
            return lambda start, stop: opened.read(tensor.info, start, stop)
        record = tensor.record
        assert record is not None
        if record.scheme == "alias":
            return self.reader(self.resolve(tensor))
        if record.scheme == "raw":
            return lambda start, stop: opened.read_raw(tensor.name, start, stop)
        decoder = self._decoder(tensor, opened, record)
        size = DTYPE_BITS[tensor.info.dtype] // 8

        def read(start: int, stop: int) -> Bytes:
            try:
                return decoder.read(start // size, stop // size).view(np.uint8)
            except FormatError:
                raise
            except NeuzipError as error:
                raise FormatError(opened.path, error.message, tensor=tensor.name) from error

        return read

    def read(self, tensor: SourceTensor, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes `start` to `stop` of a tensor as restored (all of it by default)."""
        return self.reader(tensor)(start, tensor.info.nbytes if stop is None else stop)

    def resolve(self, tensor: SourceTensor) -> SourceTensor:
        """The tensor itself, or the one that an alias stands for."""
        record = tensor.record
        if record is None or record.scheme != "alias":
            return tensor
        path = self.checkpoint.root / tensor.file
        folder = tensor.file[: tensor.file.rfind("/") + 1]
        file = folder + record.alias_file if record.alias_file is not None else tensor.file
        if file not in self._files and os.path.isfile(self.checkpoint.root / file):
            self._files[file] = open_weights(self.checkpoint.root / file)  # a shard beside a single file
        other = self._files.get(file)
        if not isinstance(other, Container):
            raise FormatError(
                path, f"its data is in {file!r}, which is not here", tensor=tensor.name, field="file"
            )
        info = other.original.tensors.get(record.alias_of or "")
        if info is None or not info.same_kind(tensor.info):
            raise FormatError(path, f"no tensor of this kind in {file!r}", tensor=tensor.name, field="of")
        target = SourceTensor(file, info, other.manifest.tensors[info.name])
        if target.record is not None and target.record.scheme == "alias":
            raise FormatError(path, "an alias of an alias", tensor=tensor.name, field="of")
        return target

    def check_streams(self, tensor: SourceTensor) -> None:
        """Compare a compressed tensor's streams with their checksums. Raises FormatError."""
        opened = self._files[tensor.file]
        if not isinstance(opened, Container) or tensor.record is None:
            return
        for stream, expected in tensor.record.streams.items():
            total = opened.stream_bytes(tensor.name, stream)
            found = digest(lambda a, b, s=stream: opened.read_stream(tensor.name, s, a, b), total)  # type: ignore[misc]
            if found != expected:
                raise FormatError(
                    opened.path, f"has the checksum {found} instead of {expected}: the file is damaged",
                    tensor=tensor.name, field=stream,
                )  # fmt: skip

    def _decoder(
        self, tensor: SourceTensor, opened: Container, record: TensorRecord
    ) -> lossless.Decoder | truncated.Decoder:
        fmt = FORMATS.get(tensor.info.dtype)
        if fmt is None:
            raise FormatError(
                opened.path, f"{tensor.info.dtype} cannot be {record.scheme}",
                tensor=tensor.name, field="scheme",
            )  # fmt: skip

        def read(stream: str, start: int, stop: int) -> Bytes:
            return opened.read_stream(tensor.name, stream, start, stop)

        def length(stream: str) -> int:
            return opened.stream_bytes(tensor.name, stream)

        try:
            if record.scheme == "lossless":
                return lossless.Decoder(read, length, tensor.info.numel, fmt, record.mantissa_bits)
            rounding = truncated.Rounding(fmt, record.mantissa_bits, record.block_size)
            return truncated.Decoder(read, length, tensor.info.numel, rounding)
        except FormatError:
            raise
        except NeuzipError as error:
            raise FormatError(opened.path, error.message, tensor=tensor.name) from error

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def weight_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of all tensors of a checkpoint as they are restored."""
    with TensorSource(path) as source:
        return sum(t.info.nbytes for t in source.tensors())


def open_weights(path: Path) -> TensorFile | Container:
    """A .safetensors file, opened as what it is."""
    with TensorFile(path) as file:
        compressed = is_container(file)
    return Container(path) if compressed else TensorFile(path)


def digest(read: Callable[[int, int], Bytes], nbytes: int, step: int = 1 << 22) -> str:
    """xxh3-64 of `nbytes` bytes, read in pieces."""
    running = xxhash.xxh3_64()
    for at in range(0, nbytes, step):
        running.update(read(at, min(at + step, nbytes)).data)
    return running.hexdigest()
