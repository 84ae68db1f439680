"""The first bytes of a sparse delta, and the layout that it belongs to: section 16 of SPEC.md."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from neuzip.errors import FormatError

MAGIC = b"nzdelta\x01"
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8s6Q")

MOST_BLOCKS = (1 << 31) - 1
MOST_WORDS = 8576
"""Words that a block has at most: of 4,096 weights of 64 bits that all change by large differences."""

HIGHEST_NUMBER = (1 << 63) - 1

TensorRow = tuple[str, str, tuple[int, ...]]
"""Name, dtype as in safetensors, and shape of a tensor."""


@dataclass(frozen=True)
class SparseDeltaHeader:
    """What the first bytes of a sparse delta say.

    number   of the state that the delta gives; that of the state before is smaller by 1
    start    digest of the state before
    end      digest of the state that the delta gives
    layout   digest of the layout
    blocks   number of descriptors, of 4 bytes each
    words    number of words behind them, of 4 bytes each
    """

    number: int
    start: int
    end: int
    layout: int
    blocks: int
    words: int

    @property
    def nbytes(self) -> int:
        """The bytes of the whole delta."""
        return HEADER_BYTES + 4 * (self.blocks + self.words)

    def encode(self) -> bytes:
        """The first HEADER_BYTES bytes."""
        fields = _FIELDS.pack(MAGIC, self.number, self.start, self.end, self.layout, self.blocks, self.words)
        return fields + xxhash.xxh3_64_digest(fields)[::-1]

    @classmethod
    def decode(cls, head: bytes, name: str) -> SparseDeltaHeader:
        """Read the first bytes of the delta called `name`. Raises FormatError where they break a rule."""
        if len(head) < HEADER_BYTES:
            raise FormatError(name, f"has {len(head)} bytes, and a sparse delta has at least {HEADER_BYTES}")
        fields, checksum = head[: _FIELDS.size], head[_FIELDS.size : HEADER_BYTES]
        if not fields.startswith(MAGIC):
            raise FormatError(name, "is no sparse delta of version 1", field="magic")
        if xxhash.xxh3_64_digest(fields)[::-1] != checksum:
            raise FormatError(name, "its first 64 bytes are damaged", field="hash")
        header = cls(*_FIELDS.unpack(fields)[1:])
        if not 1 <= header.number <= HIGHEST_NUMBER:
            raise FormatError(name, f"{header.number} is the number of no state", field="number")
        if header.blocks > MOST_BLOCKS or header.words > MOST_WORDS * header.blocks:
            raise FormatError(name, f"{header.blocks} blocks with {header.words} words are too many")
        return header


def layout_document(tensors: Sequence[TensorRow]) -> bytes:
    """The layout of tensors, which are in the order of their names.

    >>> layout_document([("a.weight", "BF16", (2, 3))])
    b'[["a.weight","BF16",[2,3]]]'
    """
    rows = [[name, dtype, list(shape)] for name, dtype, shape in tensors]
    return json.dumps(rows, separators=(",", ":")).encode()


def layout_digest(tensors: Sequence[TensorRow]) -> int:
    """The digest of a layout."""
    return xxhash.xxh3_64_intdigest(layout_document(tensors))


def delta_name(number: int) -> str:
    """The name of the file of a delta in a folder.

    >>> delta_name(7)
    '00000007.delta'
    """
    return f"{number:08}.delta"
