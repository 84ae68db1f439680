"""Tensors decoded and compared: with the checksums of their streams, with their own, and with an original."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from neuzip.errors import FormatError
from neuzip.kernels.float_fields import FORMATS, non_finite

from .pieces import PIECE, Bytes
from .progress import OnBytes, ignore
from .schemes.truncated import ErrorSums
from .sources.folder import FolderSource
from .sources.source import SourceTensor
from .workers import Workers

Reader = Callable[[int, int], Bytes]
"""reader(start, stop): bytes of a tensor."""

Keep = Callable[[SourceTensor, int, Bytes], None]
"""keep(tensor, start, data): the restored bytes of a tensor from `start` on."""


@dataclass(frozen=True)
class TensorVerdict:
    """The result of checking one tensor.

    `lossless` is whether it is stored so that it restores to the original. `identical` is whether it equals
    the original, or None if it was compared with none; for one that does not, the largest relative error and
    the relative L2 error. `of_another` says that the original is not the one that was rounded.
    `base_missing` says that the base of a delta was not there, so that only the difference was checked.
    """

    file: str
    name: str
    scheme: str
    nbytes: int
    identical: bool | None = None
    max_relative: float | None = None
    relative_l2: float | None = None
    lossless: bool = True
    of_another: bool = False
    base_missing: bool = False


@dataclass(frozen=True)
class _CheckedPiece:
    """A piece of a tensor: its restored bytes, whether they equal the original's, and the errors if not.

    `rounded_from` are the original's bytes where the tensor was rounded.
    """

    data: Bytes
    is_identical: bool = True
    errors: tuple[ErrorSums, ...] = ()
    rounded_from: Bytes | None = None


def check_tensors(
    source: FolderSource,
    tensors: list[SourceTensor],
    workers: Workers,
    original: Callable[[SourceTensor], Reader] | None = None,
    on_bytes: OnBytes = ignore,
    keep: Keep | None = None,
) -> Iterator[TensorVerdict]:
    """Check streams, decode, compare with checksum and original: a verdict a tensor. Raises FormatError.

    `original` gives a reader for the bytes to compare with. `keep` gets what was decoded, from several
    threads, before it is compared with anything.
    """

    def jobs() -> Iterator[Callable[[], _CheckedPiece]]:
        for tensor in tensors:
            try:
                read = source.reader(tensor)
            except FormatError as error:  # raised when this tensor is reached, after its checksums
                yield functools.partial(_check_streams, source, tensor, error)
                return
            yield functools.partial(_check_streams, source, tensor)
            read_original = original(tensor) if original is not None else None
            for piece in tensor.pieces(source.device):
                yield functools.partial(_check_piece, tensor, read, read_original, keep, *piece)

    results = workers.map(lambda job: job(), jobs())
    for tensor in tensors:
        running, rounded, is_identical, error = xxhash.xxh3_64(), xxhash.xxh3_64(), True, ErrorSums()
        next(results)
        for _ in tensor.pieces(source.device):
            piece = next(results)
            running.update(piece.data.data)
            if piece.rounded_from is not None:
                rounded.update(piece.rounded_from.data)
            is_identical &= piece.is_identical
            for part in piece.errors:
                error += part
            on_bytes(piece.data.size)
        if tensor.record is not None and running.hexdigest() != tensor.record.checksum:
            raise FormatError(
                source.checkpoint.root / tensor.file, "does not decode to what its checksum says",
                tensor=tensor.name,
            )  # fmt: skip
        verdict = _verdict(source, tensor)
        if original is not None and is_identical:
            verdict = replace(verdict, identical=True, max_relative=0.0, relative_l2=0.0)
        elif original is not None:
            recorded = tensor.record.original if tensor.record is not None else None
            verdict = replace(
                verdict, identical=False, max_relative=error.max_relative, relative_l2=error.relative_l2,
                of_another=recorded is not None and rounded.hexdigest() != recorded,
            )  # fmt: skip
        yield verdict


def _verdict(source: FolderSource, tensor: SourceTensor) -> TensorVerdict:
    """The verdict on a tensor that decodes to its checksum and was compared with nothing yet."""
    record = source.resolve(tensor).record
    scheme = record.scheme if record is not None else "plain"
    is_lossless = record is None or record.lossless
    return TensorVerdict(tensor.file, tensor.name, scheme, tensor.info.nbytes, lossless=is_lossless)


def _check_streams(
    source: FolderSource, tensor: SourceTensor, error: FormatError | None = None
) -> _CheckedPiece:
    """Compare the checksums of a tensor's streams. Raises FormatError, at last the `error` that is known."""
    source.check_streams(tensor)
    if error is not None:
        raise error
    return _CheckedPiece(np.empty(0, np.uint8))


def _check_piece(
    tensor: SourceTensor,
    read: Reader,
    read_original: Reader | None,
    keep: Keep | None,
    start: int,
    stop: int,
) -> _CheckedPiece:
    """Decode bytes `start` to `stop` of a tensor and compare them with the original's.

    Errors are sums over PIECE weights each, however many a piece has: sums of other parts round otherwise.
    An exact tensor has errors only if it differs.
    """
    data = read(start, stop)
    if keep is not None:
        keep(tensor, start, data)
    if read_original is None:
        return _CheckedPiece(data)
    expected = read_original(start, stop)
    is_exact = tensor.record is None or tensor.record.lossless
    rounded_from = expected if tensor.record is not None and tensor.record.original is not None else None
    fmt = FORMATS.get(tensor.info.dtype)
    is_identical = bool(np.array_equal(data, expected))
    if fmt is None or (is_identical and is_exact):
        return _CheckedPiece(data, is_identical, rounded_from=rounded_from)
    a, b = expected.view(fmt.dtype), data.view(fmt.dtype)
    errors = []
    for at in range(0, a.size, PIECE):
        x, y = a[at : at + PIECE], b[at : at + PIECE]
        finite = ~(non_finite(x, fmt) | non_finite(y, fmt))
        errors.append(ErrorSums.between(x[finite], y[finite], fmt))
    return _CheckedPiece(data, is_identical, tuple(errors), rounded_from)
