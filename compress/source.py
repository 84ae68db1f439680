"""The tensors of a checkpoint, plain or compressed: the same view of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import Checkpoint, base_name, find_checkpoint
from neuzip.formats.container import Container, checksum, is_container, stream_name
from neuzip.formats.manifest import TensorRecord
from neuzip.formats.safetensors_file import DTYPE_BITS, Header, TensorFile, TensorInfo
from neuzip.kernels import rans
from neuzip.kernels.delta import Digits
from neuzip.kernels.float_fields import FORMATS, Bits, FloatFormat

from . import delta, lossless, truncated
from .device import CPU, Device
from .lossless import PIECE, OnGpu
from .workspace import reading

if TYPE_CHECKING:
    from . import ternary

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

    def pieces(self, device: Device = CPU) -> Sequence[tuple[int, int]]:
        """Byte ranges that cover it, cut where the coder cuts; a GPU takes several of those at a time."""
        return _Pieces(self.info.nbytes, max(PIECE * DTYPE_BITS.get(self.info.dtype, 8) // 8, device.piece))


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


@dataclass(frozen=True)
class Extent:
    """Where bytes of a tensor lie in its file: a stream, or with `stream` None the tensor as it is.

    `start` and `stop` count from the beginning of the file. `checksum` is None in a plain file.
    """

    stream: str | None
    start: int
    stop: int
    checksum: str | None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Coding:
    """How a tensor is coded, for a decoder that gets the streams elsewhere. Their lengths agree with it.

    `planes` says by width where in `sign_mantissa` each plane begins.
    """

    fmt: FloatFormat
    mantissa_bits: int
    block_size: int | None
    table: rans.Table
    planes: dict[int, int]


class TensorSource:
    """All tensors of a checkpoint, read by byte range: `with TensorSource(path) as source`.

    They are decoded on `device`; those of a delta with the help of its `base`, which stays the caller's to
    close. With `allow_delta` a delta is opened without: then some cannot be read. Raises NeuzipError or
    FormatError for what is no checkpoint.
    """

    base: TensorSource | None = None
    allow_delta = False

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        device: Device = CPU,
        *,
        base: TensorSource | None = None,
        allow_delta: bool = False,
    ) -> None:
        self.device = device
        self.base = base
        self.allow_delta = allow_delta or base is not None
        self.checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path)
        self._files: dict[str, TensorFile | Container] = {}
        try:
            for file in self.checkpoint.weights:
                self._files[file] = open_weights(self.checkpoint.root / file, delta=self.allow_delta)
        except BaseException:
            self.close()
            raise

    @property
    def is_compressed(self) -> bool:
        """Whether any of its files is a container."""
        return any(isinstance(f, Container) for f in self._files.values())

    @property
    def is_delta(self) -> bool:
        """Whether another checkpoint is needed to restore it."""
        return base_name(self.checkpoint) is not None or any(
            isinstance(f, Container) and f.manifest.needs_base for f in self._files.values()
        )

    def header(self, file: str) -> Header:
        """The header of a weight file as it was before compression."""
        opened = self._files[file]
        return opened.original if isinstance(opened, Container) else opened.header

    def file_bytes(self, file: str) -> int:
        """Size of any file of the checkpoint. Raises FormatError for one that has gone away."""
        if file in self._files:
            opened = self._files[file]
            return (opened.file if isinstance(opened, Container) else opened).size
        with reading(self.checkpoint.root / file):
            return (self.checkpoint.root / file).stat().st_size

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

    def find(self, file: str, name: str) -> SourceTensor | None:
        """The tensor of that name in a weight file, or None."""
        opened, info = self._files[file], self.header(file).tensors.get(name)
        records = opened.manifest.tensors if isinstance(opened, Container) else {}
        return None if info is None else SourceTensor(file, info, records.get(name))

    def reader(self, tensor: SourceTensor, *, check: bool = False) -> Callable[[int, int], Bytes]:
        """read(start, stop) for a tensor's restored bytes; both at multiples of its element size.

        For several threads. `check` compares a stream that is read whole with its checksum. Raises
        FormatError, now or when reading, for streams that cannot be decoded.
        """
        opened = self._files[tensor.file]
        if isinstance(opened, TensorFile):
            return lambda start, stop: opened.read(tensor.info, start, stop)
        record = tensor.record
        assert record is not None
        if record.scheme == "alias":
            return self.reader(self.resolve(tensor), check=check)
        if record.scheme == "raw":
            return lambda start, stop: opened.read_raw(tensor.name, start, stop)
        of_base = self._base_reader(tensor) if record.needs_base else None
        if record.scheme == "base":
            assert of_base is not None
            return of_base
        decoder = self.decoder(tensor, check=check)
        size = DTYPE_BITS[tensor.info.dtype] // 8

        def read(start: int, stop: int) -> Bytes:
            try:
                if isinstance(decoder, delta.Decoder):
                    return decoder.read(start // size, stop // size, read_base).view(np.uint8)
                return decoder.read(start // size, stop // size).view(np.uint8)
            except FormatError:
                raise
            except NeuzipError as error:
                raise FormatError(opened.path, error.message, tensor=tensor.name) from error

        def read_base(start: int, stop: int) -> Bits:
            assert of_base is not None
            return of_base(start * size, stop * size).view(FORMATS[tensor.info.dtype].dtype)

        return read

    def _base_reader(self, tensor: SourceTensor) -> Callable[[int, int], Bytes]:
        found = self.base_tensor(tensor)
        assert self.base is not None
        return self.base.reader(found)

    def base_tensor(self, tensor: SourceTensor) -> SourceTensor:
        """The base's tensor that one of a delta was made against, by its name. Raises NeuzipError."""
        path, record = self.checkpoint.root / tensor.file, tensor.record
        assert record is not None
        if self.base is None:
            raise NeuzipError(f"{path}: is a delta, and its base is not here", self.base_hint())
        file, of = record.alias_file or "", record.alias_of or ""
        folder = file[: file.rfind("/") + 1]
        weights = self.base.checkpoint.weights
        # The file that it was in; but a base that was sharded anew has it in another one beside that.
        beside = (w for w in weights if w != file and w[: w.rfind("/") + 1] == folder)
        for place in chain([file] if file in weights else [], beside):
            found = self.base.find(place, of)
            if found is not None and found.info.same_kind(tensor.info):
                return found
        kind = f"{tensor.info.dtype} {list(tensor.info.shape)}"
        raise NeuzipError(
            f"{self.base.checkpoint.path}: has no tensor {of!r} of {kind}, which {path} was made against",
            self.base_hint(),
        )

    def base_hint(self) -> str:
        """Which base to give."""
        name = base_name(self.checkpoint)
        return f"give `base={name!r}`" if name is not None else "give the `base` that it was made against"

    def extents(self, tensor: SourceTensor) -> list[Extent]:
        """What is stored of a tensor that is no alias: its streams, or its bytes."""
        opened, record = self._files[tensor.file], tensor.record
        file = opened.file if isinstance(opened, Container) else opened
        entries = file.header.tensors

        def extent(stream: str | None, entry: str, checksum: str | None) -> Extent:
            info = entries[entry]
            return Extent(stream, file.data_start + info.start, file.data_start + info.stop, checksum)

        if record is None:
            return [extent(None, tensor.name, None)]
        if not record.streams:
            assert isinstance(opened, Container)
            start = file.data_start + opened.raw_start(tensor.name)
            return [Extent(None, start, start + tensor.info.nbytes, record.checksum)]
        return [extent(s, stream_name(tensor.name, s), checksum) for s, checksum in record.streams.items()]

    def read_into(self, file: str, offset: int, target: Bytes) -> None:
        """Fill `target` with the bytes of a weight file from `offset` on. For several threads."""
        opened = self._files[file]
        (opened.file if isinstance(opened, Container) else opened).read_at(offset, target)

    def coding(self, tensor: SourceTensor) -> Coding | None:
        """How the floats of a tensor are coded; None for one that is ternary, or stored as it is.

        Raises FormatError.
        """
        record = tensor.record
        if record is None or not record.streams or record.scheme == "ternary":
            return None
        decoder = self.decoder(tensor)
        assert isinstance(decoder, (lossless.Decoder, truncated.Decoder))
        inner = decoder.inner if isinstance(decoder, truncated.Decoder) else decoder
        return Coding(
            FORMATS[tensor.info.dtype], record.mantissa_bits, record.block_size,
            inner.table, inner.plane_starts,
        )  # fmt: skip

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
            # a shard beside a single file
            self._files[file] = open_weights(self.checkpoint.root / file, delta=self.allow_delta)
        other = self._files.get(file)
        if not isinstance(other, Container):
            raise FormatError(
                path, f"its data is in {file!r}, which is not here", tensor=tensor.name, field="file"
            )
        target = self.find(file, record.alias_of or "")
        if target is None or not target.info.same_kind(tensor.info):
            raise FormatError(path, f"no tensor of this kind in {file!r}", tensor=tensor.name, field="of")
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
            _require_checksum(opened.path, tensor.name, stream, found, expected)

    def decoder(
        self, tensor: SourceTensor, *, check: bool = False
    ) -> lossless.Decoder | truncated.Decoder | ternary.Decoder | delta.Decoder:
        """What decodes ranges of a tensor that has streams. Raises FormatError.

        With `check` a stream that is read whole, as its table is, is compared with its checksum. Ternary
        tensors are decoded on the CPU, whatever the device: there is little to do.
        """
        opened, record = self._files[tensor.file], tensor.record
        assert isinstance(opened, Container)
        assert record is not None
        fmt = FORMATS.get(tensor.info.dtype)
        if fmt is None:
            raise FormatError(
                opened.path, f"{tensor.info.dtype} cannot be {record.scheme}",
                tensor=tensor.name, field="scheme",
            )  # fmt: skip

        def read(stream: str, start: int, stop: int) -> Bytes:
            data = opened.read_stream(tensor.name, stream, start, stop)
            if check and (start, stop) == (0, length(stream)):
                _require_checksum(opened.path, tensor.name, stream, checksum(data), record.streams[stream])
            return data

        def length(stream: str) -> int:
            return opened.stream_bytes(tensor.name, stream)

        if record.scheme == "ternary":
            return _ternary_decoder(opened.path, tensor, read, length)
        gpu = self.device.gpu_for(tensor.info.numel)
        on_gpu = None
        if gpu is not None:
            starts = {e.stream: e.start for e in self.extents(tensor)}
            on_gpu = OnGpu(gpu, lambda s, at, target: self.read_into(tensor.file, starts[s] + at, target))
        try:
            if record.scheme == "delta":
                cut = Digits(fmt.bits, record.shift, record.low_bits)
                return delta.Decoder(read, length, tensor.info.numel, fmt, cut, record.digits, gpu)
            if record.scheme == "lossless":
                return lossless.Decoder(read, length, tensor.info.numel, fmt, record.mantissa_bits, on_gpu)
            rounding = truncated.Rounding(fmt, record.mantissa_bits, record.block_size)
            return truncated.Decoder(read, length, tensor.info.numel, rounding, on_gpu)
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


def _require_checksum(path: Path, tensor: str, stream: str, found: str, expected: str) -> None:
    if found != expected:
        raise FormatError(
            path, f"has the checksum {found} instead of {expected}: the file is damaged",
            tensor=tensor, field=stream,
        )  # fmt: skip


def _ternary_decoder(
    path: Path, tensor: SourceTensor, read: lossless.ReadStream, length: Callable[[str], int]
) -> ternary.Decoder:
    import torch  # only who has ternary tensors waits for it

    from . import ternary

    def read_tensor(stream: str, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(read(stream, start, stop))

    try:
        return ternary.of_tensor(tensor, read_tensor, length)
    except NeuzipError as error:
        raise FormatError(path, error.message, tensor=tensor.name) from error


def weight_bytes(path: str | os.PathLike[str], *, allow_delta: bool = False) -> int:
    """Bytes of all tensors of a checkpoint as they are restored."""
    with TensorSource(path, allow_delta=allow_delta) as source:
        return sum(t.info.nbytes for t in source.tensors())


def open_weights(path: Path, *, delta: bool = False) -> TensorFile | Container:
    """A .safetensors file, opened as what it is: a delta's container only if `delta`."""
    with TensorFile(path) as file:
        compressed = is_container(file)
    return Container(path, delta=delta) if compressed else TensorFile(path)


def digest(read: Callable[[int, int], Bytes], nbytes: int, step: int = 1 << 22) -> str:
    """xxh3-64 of `nbytes` bytes, read in pieces."""
    running = xxhash.xxh3_64()
    for at in range(0, nbytes, step):
        running.update(read(at, min(at + step, nbytes)).data)
    return running.hexdigest()
