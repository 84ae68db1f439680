"""What every source of tensors offers: one view of plain and compressed checkpoints, here or on the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from neuzip.compress.device import CPU, Device
from neuzip.compress.pieces import PIECE, ReadBytes
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.records import Record
from neuzip.formats.safetensors_file import DTYPE_BITS, Header, TensorInfo


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint. `record` says how a compressed one is stored; a plain one has none."""

    file: str
    info: TensorInfo
    record: Record | None = None

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


class TensorSource(Protocol):
    """All tensors of a checkpoint, read by byte range."""

    checkpoint: Checkpoint

    @property
    def is_compressed(self) -> bool:
        """Whether any weight file is a container."""

    def header(self, file: str) -> Header:
        """The header of a weight file as it was before compression."""

    def file_bytes(self, file: str) -> int:
        """Size of any file of the checkpoint. Raises FormatError for one that has gone away."""

    def tensors(self, file: str | None = None) -> Iterator[SourceTensor]:
        """The tensors of one file, or of all, in the order of the original files."""

    def reader(self, tensor: SourceTensor, *, check: bool = False) -> ReadBytes:
        """read(start, stop) for a tensor's restored bytes; both at multiples of its element size.

        For several threads. `check` compares a stream that is read whole with its checksum. Raises
        FormatError, now or when reading, for streams that cannot be decoded.
        """
