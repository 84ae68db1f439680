"""Tensors in pieces: what one job of a coder is, how weights and streams are read, and their lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from neuzip.errors import NeuzipError
from neuzip.formats.container import ALIGNMENT
from neuzip.kernels import rans
from neuzip.kernels.float_fields import Bits, plane_bytes, plane_widths

PIECE = 128 * rans.BLOCK
"""Weights of one job, 2 M: a millisecond of work, against which handing it to a thread weighs little."""

OVERHEAD = 768
"""Bytes by which streams must be smaller than their tensor: about what their names and checksums take."""

Bytes = npt.NDArray[np.uint8]

T = TypeVar("T")
R = TypeVar("R")


class Map(Protocol):
    """The built-in `map`, or one that computes several results at once and yields them in order."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


Read = Callable[[int, int], Bits]
"""read(start, stop): the bit patterns of weights start to stop."""

ReadBytes = Callable[[int, int], Bytes]
"""read(start, stop): bytes start to stop of a tensor, both at multiples of its element size."""

ReadStream = Callable[[str, int, int], Bytes]
"""read_stream(name, start, stop): bytes start to stop of a stream."""

Fill = Callable[[str, int, Bytes], None]
"""fill(name, start, target): the bytes of a stream from `start` on, into `target`."""

Observe = Callable[[Bits], None]
"""observe(bits): called with all pieces of a tensor in order, once."""


class NotWorthwhile(Exception):
    """The streams would not be smaller than the tensor: store it raw."""


def is_worthwhile(nbytes: int, plain: int) -> bool:
    """Whether streams of `nbytes` are so much smaller than a tensor of `plain` bytes that they are stored."""
    return nbytes + OVERHEAD < plain


def ignore(_: Bits) -> None:
    """Do nothing with a piece."""


def pieces(numel: int) -> list[tuple[int, int]]:
    """Ranges of PIECE weights that cover a tensor."""
    return [(start, min(start + PIECE, numel)) for start in range(0, numel, PIECE)]


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of streams."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def expect_length(stream: str, nbytes: int, expected: int) -> None:
    """Raise NeuzipError unless a stream is as long as its tensor says."""
    if nbytes != expected:
        raise NeuzipError(f"the stream {stream!r} has {nbytes} bytes instead of {expected}")


def plane_starts(bits: int, numel: int) -> tuple[dict[int, int], int]:
    """Where planes of fields of `bits` bits begin in their stream, by width, and where the last one ends."""
    starts, end = {}, 0
    for width in plane_widths(bits):
        starts[width] = end
        end += padded(plane_bytes(width, numel))
    return starts, end


def digest(read: ReadBytes, nbytes: int, step: int = 1 << 22) -> str:
    """xxh3-64 of `nbytes` bytes, read in pieces."""
    running = xxhash.xxh3_64()
    for at in range(0, nbytes, step):
        running.update(read(at, min(at + step, nbytes)).data)
    return running.hexdigest()
