"""Checkpoints on the disk, plain or compressed: a folder, or a single weight file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from neuzip.compress.device import CPU, Device
from neuzip.compress.pieces import Bytes, ReadBytes
from neuzip.compress.schemes import codec_of
from neuzip.compress.schemes.codec import FloatCoding, GridCoding, RangeDecoder, StoredTensor
from neuzip.compress.workspace import reading
from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import Checkpoint, base_name, find_checkpoint
from neuzip.formats.container import is_container
from neuzip.formats.records import OfBaseRecord, Record
from neuzip.formats.safetensors_file import Header, TensorFile

from .container import ContainerFile
from .plain import PlainFile
from .source import Extent, SourceTensor

T = TypeVar("T")


class FolderSource:
    """All tensors of a checkpoint on the disk, read by byte range: `with FolderSource(path) as source`.

    They are decoded on `device`; those of a delta with the help of its `base`, which stays the caller's to
    close. With `allow_delta` a delta is opened without: then some cannot be read. Raises NeuzipError or
    FormatError for what is no checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        device: Device = CPU,
        *,
        base: FolderSource | None = None,
        allow_delta: bool = False,
    ) -> None:
        self.device = device
        self.base = base
        self.allow_delta = allow_delta or base is not None
        self.checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path)
        self._files: dict[str, PlainFile | ContainerFile] = {}
        try:
            for file in self.checkpoint.weights:
                self._files[file] = open_weights(self.checkpoint.root / file, delta=self.allow_delta)
        except BaseException:
            self.close()
            raise

    @property
    def is_compressed(self) -> bool:
        """Whether any weight file is a container."""
        return any(file.is_container for file in self._files.values())

    @property
    def is_delta(self) -> bool:
        """Whether another checkpoint is needed to restore it."""
        return base_name(self.checkpoint) is not None or any(f.needs_base for f in self._files.values())

    def is_container(self, file: str) -> bool:
        """Whether a weight file is a container."""
        return self._files[file].is_container

    def header(self, file: str) -> Header:
        """The header of a weight file as it was before compression."""
        return self._files[file].header

    def file_bytes(self, file: str) -> int:
        """Size of any file of the checkpoint. Raises FormatError for one that has gone away."""
        if file in self._files:
            return self._files[file].size
        with reading(self.checkpoint.root / file):
            return (self.checkpoint.root / file).stat().st_size

    def tensors(self, file: str | None = None) -> Iterator[SourceTensor]:
        """The tensors of one file, or of all, in the order of the original files."""
        for name in [file] if file is not None else self.checkpoint.weights:
            weights = self._files[name]
            for info in weights.header.in_file_order:
                yield SourceTensor(name, info, weights.records.get(info.name))

    def find(self, file: str, name: str) -> SourceTensor | None:
        """The tensor of that name in a weight file, or None."""
        weights = self._files[file]
        info = weights.header.tensors.get(name)
        return None if info is None else SourceTensor(file, info, weights.records.get(name))

    def stored_bytes(self, tensor: SourceTensor) -> int:
        """Bytes that a tensor takes in its file, names and records not counted."""
        return self._files[tensor.file].stored_bytes(tensor)

    def reader(self, tensor: SourceTensor, *, check: bool = False) -> ReadBytes:
        """read(start, stop) for a tensor's restored bytes; both at multiples of its element size.

        For several threads. `check` compares a stream that is read whole with its checksum. Raises
        FormatError, now or when reading, for streams that cannot be decoded.
        """
        weights = self._files[tensor.file]
        if isinstance(weights, PlainFile):
            return weights.reader(tensor)
        record = _record_of(tensor)
        base = self._base_reader(tensor) if record.needs_base else _nothing
        stored = self._stored(tensor, check=check, base=lambda: base)
        read = self._naming(tensor, lambda: codec_of(record).reader(stored))
        return lambda start, stop: self._naming(tensor, lambda: read(start, stop))

    def read(self, tensor: SourceTensor, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes `start` to `stop` of a tensor as restored (all of it by default)."""
        return self.reader(tensor)(start, tensor.info.nbytes if stop is None else stop)

    def decoder(self, tensor: SourceTensor, *, check: bool = False) -> RangeDecoder:
        """What decodes ranges of a tensor that has streams. Raises FormatError.

        With `check` a stream that is read whole, as its table is, is compared with its checksum.
        """
        stored = self._stored(tensor, check=check)
        return self._naming(tensor, lambda: codec_of(stored.record).decoder(stored))

    def coding(
        self, tensor: SourceTensor, streams: Mapping[str, Bytes] | None = None
    ) -> FloatCoding | GridCoding | None:
        """How a tensor is coded for the decoder on a GPU; None for one that it cannot decode.

        Whole `streams` that the caller has read are not read again. Raises FormatError.
        """
        if tensor.record is None:
            return None
        stored, arrays = self._stored(tensor), streams or {}

        def read(name: str, start: int, stop: int) -> Bytes:
            array = arrays.get(name)
            return stored.read_stream(name, start, stop) if array is None else array[start:stop]

        codec = codec_of(stored.record)
        return self._naming(tensor, lambda: codec.coding(replace(stored, read_stream=read)))

    def check_without_base(self, tensor: SourceTensor) -> None:
        """Check a tensor of a delta as far as that goes without its base. Raises FormatError."""
        self.check_streams(tensor)
        stored = self._stored(tensor)
        self._naming(tensor, lambda: codec_of(stored.record).check_without_base(stored))

    def check_streams(self, tensor: SourceTensor) -> None:
        """Compare a compressed tensor's streams with their checksums. Raises FormatError."""
        self._files[tensor.file].check_streams(tensor)

    def extents(self, tensor: SourceTensor) -> list[Extent]:
        """What is stored of a tensor that is no alias: its streams, or its bytes."""
        return self._files[tensor.file].extents(tensor)

    def read_into(self, file: str, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes of a weight file from `offset` on. For several threads."""
        self._files[file].read_into(offset, target)

    def resolve(self, tensor: SourceTensor) -> SourceTensor:
        """The tensor itself, or the one that an alias stands for. Raises FormatError."""
        if tensor.record is None or tensor.record.holder is None:
            return tensor
        beside, name = tensor.record.holder
        path = self.checkpoint.root / tensor.file
        file = tensor.file if beside is None else _folder(tensor.file) + beside
        if file not in self._files and os.path.isfile(self.checkpoint.root / file):
            # a shard beside a single file
            self._files[file] = open_weights(self.checkpoint.root / file, delta=self.allow_delta)
        if file not in self._files or not self._files[file].is_container:
            raise FormatError(
                path, f"its data is in {file!r}, which is not here", tensor=tensor.name, field="file"
            )
        target = self.find(file, name)
        if target is None or not target.info.same_kind(tensor.info):
            raise FormatError(path, f"no tensor of this kind in {file!r}", tensor=tensor.name, field="of")
        if target.record is not None and target.record.holder is not None:
            raise FormatError(path, "an alias of an alias", tensor=tensor.name, field="of")
        return target

    def base_tensor(self, tensor: SourceTensor) -> SourceTensor:
        """The base's tensor that one of a delta was made against, by its name. Raises NeuzipError."""
        path, record = self.checkpoint.root / tensor.file, tensor.record
        assert isinstance(record, OfBaseRecord)
        if self.base is None:
            raise NeuzipError(f"{path}: is a delta, and its base is not here", self.base_hint())
        file, weights = record.file or "", self.base.checkpoint.weights
        # The file that it was in; but a base that was sharded anew has it in another one beside that.
        beside = (w for w in weights if w != file and _folder(w) == _folder(file))
        for place in chain([file] if file in weights else [], beside):
            counterpart = self.base.find(place, record.of)
            if counterpart is not None and counterpart.info.same_kind(tensor.info):
                return counterpart
        kind = f"{tensor.info.dtype} {list(tensor.info.shape)}"
        raise NeuzipError(
            f"{self.base.checkpoint.path}: has no tensor {record.of!r} of {kind}, "
            f"which {path} was made against",
            self.base_hint(),
        )

    def base_hint(self) -> str:
        """Which base to give."""
        name = base_name(self.checkpoint)
        return f"give `base={name!r}`" if name is not None else "give the `base` that it was made against"

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> FolderSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(
        self, tensor: SourceTensor, *, check: bool = False, base: Callable[[], ReadBytes] | None = None
    ) -> StoredTensor[Any]:
        """A tensor of a container for its codec. Raises FormatError."""
        weights = self._files[tensor.file]
        assert isinstance(weights, ContainerFile)
        return weights.stored(
            tensor,
            self.device,
            lambda: self.reader(self.resolve(tensor), check=check),
            base or (lambda: self._base_reader(tensor)),
            check=check,
        )

    def _base_reader(self, tensor: SourceTensor) -> ReadBytes:
        counterpart = self.base_tensor(tensor)
        assert self.base is not None
        return self.base.reader(counterpart)

    def _naming(self, tensor: SourceTensor, work: Callable[[], T]) -> T:
        """The result of some work on a tensor, whose errors get the names of its file and of itself."""
        try:
            return work()
        except FormatError:
            raise
        except NeuzipError as error:
            path = self.checkpoint.root / tensor.file
            raise FormatError(path, error.message, tensor=tensor.name) from error


def _nothing(start: int, stop: int) -> Bytes:
    raise AssertionError("the record says that its tensor needs no base")


def _record_of(tensor: SourceTensor) -> Record:
    """The record of a tensor in a container."""
    assert tensor.record is not None
    return tensor.record


def _folder(path: str) -> str:
    """The folder of a relative path, with its slash, or nothing."""
    return path[: path.rfind("/") + 1]


def weight_bytes(path: str | os.PathLike[str], *, allow_delta: bool = False) -> int:
    """Bytes of all tensors of a checkpoint as they are restored."""
    with FolderSource(path, allow_delta=allow_delta) as source:
        return sum(t.info.nbytes for t in source.tensors())


def open_weights(path: Path, *, delta: bool = False) -> PlainFile | ContainerFile:
    """A .safetensors file, opened as what it is: a delta's container only if `delta`."""
    file = TensorFile(path)  # whose header, long with many tensors, is parsed once
    return ContainerFile(file, delta=delta) if is_container(file) else PlainFile(file)
