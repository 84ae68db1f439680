"""Entropy coding of exponents with range asymmetric numeral systems (rANS).

READ THIS FIRST. Four things surprise:

1. A coded *symbol* is one exponent or a *pair* of neighbouring ones (`Table.group`), each named by its index
   in the table's palette. A pair costs one look-up where two exponents would cost two.
2. A *block* is 16,384 weights coded by 32 *lanes*, 32 rANS states side by side, that share one sequence of
   16-bit words: in every step all lanes decode a symbol, then those lanes whose state has become small each
   take the next word, in lane order. A block can be decoded alone.
3. The encoder runs backwards: it starts at the last step and writes words from the last to the first.
4. A lane's last two symbols are not coded at all: they are the low 16 bits of the state the encoder starts
   from, which a decoder finds there at the end. That makes use of bits which would otherwise be lost.

The invariant between steps is  LOWER <= state < LOWER << 16.

What is too rare for the table is an *escape*: a common symbol takes its place, and the true exponent stands,
with its position, in a list at the end of the block.

| input                                | what happens                                                        |
|--------------------------------------|---------------------------------------------------------------------|
| empty                                | no blocks, no words                                                 |
| length not a multiple of 256         | the last run is filled up with a frequent exponent; `decode` cuts it|
| one exponent only                    | two symbols in the table; a word about every 45,000 steps           |
| more than 256 exponents (fp64)       | the 256 most frequent in the palette, the others escapes            |
| incompressible                       | at most `max_words`; storing it raw is the caller's business        |

The CPU codes in vector registers where they are fast and give the right words: `vector_form`.

Everything after the histogram is integer arithmetic: the same exponents give the same words on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuzip.errors import NeuzipError
from neuzip.kernels.device.compiled import read_only
from neuzip.kernels.float_fields import Bits, FloatFormat

from . import cpu, vector_form
from .model import Table, build_table
from .numbers import BLOCK, ESCAPE_BITS, HEADER_WORDS, LANES, LEFT_BITS, RAW_STEPS, RUN, SCALE

__all__ = [
    "BLOCK", "CorruptStream", "RansEncoded", "Table",
    "build_table", "decode", "decode_floats", "encode", "expected_words", "max_words", "words_of_symbols",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]
Exponents = npt.NDArray[np.unsignedinteger]


class CorruptStream(NeuzipError):
    """Words that no encoder can have written."""


@dataclass(frozen=True)
class RansEncoded:
    """Coded exponents. `words` holds the blocks back to back, `index[b]` the number of words of block b."""

    words: Words
    index: Words


def max_words(numel: int, group: int) -> int:
    """An upper bound on the words that `encode` writes for `numel` exponents."""
    padded = -(-numel // (LANES * RUN)) * LANES * RUN
    blocks = -(-numel // BLOCK)
    return blocks * HEADER_WORDS + padded // group + 2 * numel


def encode(exponents: Exponents, table: Table, scratch: Words | None = None) -> RansEncoded:
    """Code `exponents` (uint8, or uint16 for fp64), whole blocks and perhaps a shorter one at the end.

    The pieces of a longer array, cut at multiples of BLOCK, give the pieces of its words and index.
    `scratch`, of at least `max_words`, saves the time that new memory takes.
    """
    if exponents.ndim != 1 or exponents.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"exponents are a one-dimensional uint8 or uint16 array, not {exponents.dtype}")
    if table.group == 2 and exponents.dtype != np.uint8:
        raise ValueError("pairs are for exponents of at most 8 bits")
    numel = exponents.size
    blocks = -(-numel // BLOCK)
    padded = exponents
    if short := -numel % (LANES * RUN):
        padded = np.concatenate([exponents, np.full(short, table.filler, exponents.dtype)])
    words = np.empty(max_words(numel, table.group), np.uint16) if scratch is None else scratch
    assert words.size >= max_words(numel, table.group)
    index = np.empty(blocks, np.uint16)
    used = cpu.encode(
        table.keys(padded), padded, numel, table.group, table.symbols, table.encoder, words, index,
        vector_form.encodes(table.group, exponents.dtype),
    )  # fmt: skip
    return RansEncoded(words[:used].copy(), index)


def expected_words(table: Table, exponents: Ints, pairs: Ints | None, numel: int) -> int:
    """About how many words `encode` writes for `numel` exponents that are distributed as those counted.

    `exponents` and `pairs` are what `build_table` made the table of; they may count a sample.
    """
    symbols = np.flatnonzero(table.frequencies)
    counts = np.zeros(256)
    if table.group == 1:
        symbols = symbols[symbols < table.palette.size]
        counts[symbols] = exponents[table.palette[symbols]]
    else:
        assert pairs is not None
        symbols = symbols[np.maximum(symbols & 15, symbols >> 4) < table.palette.size]
        counts[symbols] = pairs[table.exponents[symbols]]
    return words_of_symbols(table, counts, int(exponents.sum()), numel)


def words_of_symbols(table: Table, counts: npt.NDArray[np.float64], total: int, numel: int) -> int:
    """About how many words `encode` writes for `numel` exponents, of which `total` were counted.

    counts: how often each of 256 symbols occurs among those. What no symbol stands for is an escape.
    """
    symbols = np.flatnonzero(table.frequencies)
    counts = counts[symbols]
    escapes = max(0.0, total / table.group - float(counts.sum()))
    bits = float((counts * np.log2(SCALE / table.frequencies[symbols])).sum()) + ESCAPE_BITS * escapes
    filler = np.log2(SCALE / int(table.frequencies.max())) / table.group
    words = 0.0
    for blocks, size in ((numel // BLOCK, BLOCK), (1, numel % BLOCK)):
        if size:
            padded = -(-size // (LANES * RUN)) * LANES * RUN
            raw = table.group * LANES * RAW_STEPS / padded
            in_block = (bits / total * size + filler * (padded - size)) * (1 - raw)
            words += blocks * (HEADER_WORDS + max(0.0, in_block - LANES * LEFT_BITS) / 16)
    return round(words)


def decode(
    words: Words,
    index: Words,
    table: Table,
    numel: int,
    exponent_bits: int = 8,
) -> Exponents:
    """Decode `numel` exponents of `exponent_bits` from whole blocks: the inverse of `encode`.

    Reads nothing outside `words`, whatever they hold. Raises CorruptStream when they do not add up.
    """
    starts, counts = _extents(words, index, numel)
    words = read_only(np.ascontiguousarray(words))
    padded = np.empty(-(-numel // (LANES * RUN)) * LANES * RUN, np.uint8 if exponent_bits <= 8 else np.uint16)
    bad = cpu.decode(
        words, starts, counts, numel, exponent_bits, table.group, table.decoder,
        table.exponents, table.keys(padded), padded, (padded[:0], padded[:0]),
        vector_form.decodes(table.group, padded.dtype),
    )  # fmt: skip
    if bad >= 0:
        raise CorruptStream(f"block {bad} is corrupt")
    return padded[:numel]


def decode_floats(
    words: Words, index: Words, table: Table, fields: Bits, fmt: FloatFormat, kept_bits: int, out: Bits
) -> Bits:
    """Decode exponents and merge them with `fields`, sign and `kept_bits` mantissa bits: floats, in `out`.

    Reads nothing outside `words`, whatever they hold. Raises CorruptStream when they do not add up; `out` may
    then hold anything.
    """
    numel = out.size
    assert (fields.size, out.dtype) == (numel, fmt.dtype)
    starts, counts = _extents(words, index, numel)
    words, fields = read_only(np.ascontiguousarray(words)), read_only(fields)
    block = np.empty(BLOCK, fmt.exponent_dtype)
    bad = cpu.decode_floats(
        words, starts, counts, numel, (fmt.exponent_bits, fmt.mantissa_bits),
        table.group, table.decoder, table.exponents, table.keys(block), block, fields, kept_bits, out,
        vector_form.decodes_floats(table.group, fmt, fields.dtype),
    )  # fmt: skip
    if bad >= 0:
        raise CorruptStream(f"block {bad} is corrupt")
    return out


def _extents(words: Words, index: Words, numel: int) -> tuple[Ints, Ints]:
    """Where the words of every block start, and how many they are."""
    blocks = -(-numel // BLOCK)
    if index.size != blocks:
        raise CorruptStream(f"{numel} weights take {blocks} blocks, the index has {index.size}")
    counts = index.astype(np.int64)
    ends = np.cumsum(counts)
    if numel and ends[-1] != words.size:
        raise CorruptStream(f"the index counts {ends[-1]} words, there are {words.size}")
    return ends - counts, counts
