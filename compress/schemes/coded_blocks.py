"""Streams `index` and `words`, which exponents of floats and codes of quantized tensors share, and `table`.

A FloatFormat says what is coded, by its name and its number of exponent bits: whole numbers of so many bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from neuzip.compress.pieces import PIECE, ReadStream, expect_length, padded
from neuzip.errors import NeuzipError
from neuzip.formats.container import Stream, padded_stream
from neuzip.kernels import rans
from neuzip.kernels.float_fields import Bits, Census, FloatFormat

Words = npt.NDArray[np.uint16]

TABLE_HEAD = 3
"""The table stream begins with the group and the lengths of palette and frequencies."""

LARGEST_TABLE = 2 * (TABLE_HEAD + 256 + 256)
"""Bytes of a table stream of a full palette and all frequencies."""


class Scratch(threading.local):
    """Memory that a thread uses again for every piece: new memory costs more time than the coding does."""

    exponents: Bits = np.empty(0, np.uint8)
    words: Words = np.empty(0, np.uint16)

    def exponents_for(self, fmt: FloatFormat, numel: int) -> Bits:
        """Room for the exponents of `numel` weights."""
        if self.exponents.size < numel or self.exponents.dtype != fmt.exponent_dtype:
            self.exponents = np.empty(max(numel, PIECE), fmt.exponent_dtype)
        return self.exponents[:numel]

    def words_for(self, numel: int, group: int) -> Words:
        """Room for all words that `numel` weights can take."""
        if self.words.size < rans.max_words(numel, group):
            self.words = np.empty(rans.max_words(max(numel, PIECE), group), np.uint16)
        return self.words


SCRATCH = Scratch()
"""One for each thread."""


def block_streams(index: Sequence[Words], words: Sequence[Words]) -> dict[str, Stream]:
    """The streams of coded blocks, from parts that follow each other."""
    return {"index": padded_stream(index), "words": padded_stream(words)}


def table_stream(table: rans.Table) -> Stream:
    """The stream of a table of exponents."""
    return padded_stream([_table_words(table)])


def expected_block_bytes(counted: Census, numel: int) -> int:
    """About what the streams of `numel` weights take, of which `counted` are all or a sample."""
    exponents = counted.exponents
    table = rans.build_table(exponents, counted.pairs)
    return (
        padded(_table_words(table).nbytes)
        + padded(2 * -(-numel // rans.BLOCK))
        + padded(2 * rans.expected_words(table, exponents, counted.pairs, numel))
    )


class CodedBlocks:
    """The table of one tensor, and where in the stream `words` each of its blocks is.

    `length` gives the length of a stream in bytes. Raises NeuzipError when the streams contradict each other,
    before it takes memory for more than `index`.
    """

    def __init__(
        self, read_stream: ReadStream, length: Callable[[str], int], numel: int, table: rans.Table
    ) -> None:
        self._read_stream = read_stream
        self.table = table
        blocks = -(-numel // rans.BLOCK)
        expect_length("index", length("index"), padded(2 * blocks))
        counts = read_stream("index", 0, length("index")).view("<u2")[:blocks].astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.index = counts.astype(np.uint16)
        expect_length("words", length("words"), padded(2 * int(self._starts[-1])))

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """The bytes of `words` that blocks `first` to `last` take."""
        return 2 * int(self._starts[first]), 2 * int(self._starts[last])

    def words_of(self, first: int, last: int) -> tuple[Words, Words]:
        """The words of blocks `first` to `last`, and how many each of them has."""
        words = self._read_stream("words", *self.extent(first, last)).view("<u2")
        return words, self.index[first:last]


@contextmanager
def naming_block(first: int) -> Iterator[None]:
    """Say of words that are corrupt where they are: among the blocks from block `first` on."""
    try:
        yield
    except rans.CorruptStream as error:
        raise NeuzipError(f"the stream 'words', from block {first} on: {error.message}") from error


def _table_words(table: rans.Table) -> Words:
    head = [table.group, table.palette.size, table.frequencies.size]
    return np.concatenate([np.array(head, np.uint16), table.palette, table.frequencies])


def read_table(read_stream: ReadStream, length: Callable[[str], int], fmt: FloatFormat) -> rans.Table:
    """The table in the stream `table`. Raises NeuzipError when it breaks a rule."""
    nbytes = length("table")
    if nbytes > padded(LARGEST_TABLE):
        raise NeuzipError(f"the stream 'table' has {nbytes} bytes, which are too many")
    return parse_table(read_stream("table", 0, nbytes).view("<u2"), fmt)


def parse_table(words: Words, fmt: FloatFormat) -> rans.Table:
    """The table of a stream; raises NeuzipError when it breaks a rule."""
    group, n_palette, n_frequencies = (int(w) for w in words[:TABLE_HEAD]) if words.size >= 3 else (0, 0, 0)
    end = TABLE_HEAD + n_palette + n_frequencies
    if words.size * 2 != padded(2 * end):
        raise NeuzipError("the stream 'table' does not have the length that it states")
    palette, frequencies = words[TABLE_HEAD : TABLE_HEAD + n_palette], words[TABLE_HEAD + n_palette : end]
    try:
        table = rans.Table(group, palette, frequencies)
    except ValueError as error:
        raise NeuzipError(f"the stream 'table' is not valid: {error}") from error
    if int(palette[-1]) >> fmt.exponent_bits:
        raise NeuzipError(f"the stream 'table' has exponents that {fmt.name} does not")
    if group == 2 and fmt.exponent_bits > 8:
        raise NeuzipError(f"the stream 'table' has pairs, which {fmt.name} is too wide for")
    return table
