"""How often each code of a quantized tensor occurs, in a byte each, and the coder's table that follows.

A tensor of few weights has as many different codes as a large one, so that a table of frequencies would be a
notable share of it. Pairs of codes have the product of the shares of both, or shares of their own.

Codes that spread widely are cut: their low bits are nearly random, and are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from neuzip.compress.pieces import padded
from neuzip.errors import NeuzipError
from neuzip.kernels import rans
from neuzip.kernels.float_fields import Census, plane_bytes
from neuzip.kernels.rans.model import PALETTE, quantised_table
from neuzip.kernels.rans.numbers import LOW_BITS, RARE_BITS

Shares = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

SINGLE, PAIRS, JOINT_PAIRS = 1, 2, 3
"""Forms of a table: of single codes, of pairs by the shares of codes, of pairs by shares of their own."""

HEAD = 4
"""Bytes before the shares: the form, the lowest code in two bytes, and the number of codes less 1."""

LARGEST_CODE_TABLE = HEAD + 256
"""Bytes of a table, at most."""

LARGEST_SHARE = 31 << 15
"""The number that the byte 255 stands for."""

LEAST_BITS = 2
"""Bits of a code, and of what is left of it without low bits, at least."""

FEW = 8
"""Codes of a range that is not cut further."""

SAVED_SHARE = 256
"""Pairs decode faster than single codes, which are coded if that saves a 256th of the bytes."""

STREAM_BYTES = 150
"""About what one more stream takes in the header and the manifest of a file."""


def code_bits(low: int, high: int) -> int:
    """The bits of codes from `low` to `high`: the least that hold them all.

    >>> code_bits(-2, 1), code_bits(0, 2), code_bits(-(1 << 15), 0)
    (2, 3, 16)
    """
    return max(LEAST_BITS, max(high, -1 - low).bit_length() + 1)


@dataclass(frozen=True)
class CodeTable:
    """The table of a quantized tensor as it is stored.

    form    SINGLE, PAIRS or JOINT_PAIRS
    lowest  the first of p numbers that follow each other
    shares  a byte for each of them, or of p * p for each pair: the first number counts faster
    """

    form: int
    lowest: int
    shares: Shares

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return round(self.shares.size**0.5) if self.form == JOINT_PAIRS else self.shares.size

    @cached_property
    def table(self) -> rans.Table:
        """The coder's table. Raises ValueError where all shares are 0."""
        p, shares = self.count, share_values(self.shares)
        if not shares.any():
            raise ValueError("all shares are 0")
        palette = self.lowest + np.arange(p)
        if self.form == SINGLE:
            return quantised_table(1, palette, shares)
        counts = np.zeros((16, 16), np.int64)
        counts[:p, :p] = shares.reshape(p, p) if self.form == JOINT_PAIRS else np.outer(shares, shares)
        return quantised_table(2, palette, counts.reshape(-1))

    @property
    def stored(self) -> npt.NDArray[np.uint8]:
        """The bytes of the table."""
        head = [self.form, self.lowest & 0xFF, self.lowest >> 8, self.count - 1]
        return np.concatenate([np.array(head, np.uint8), self.shares])


def stored_bytes(head: npt.NDArray[np.uint8]) -> int:
    """Bytes of a table that begins with these HEAD bytes. Raises NeuzipError for a form that there is not."""
    form, p = int(head[0]), int(head[3]) + 1
    if form not in (SINGLE, PAIRS, JOINT_PAIRS) or not 2 <= p <= PALETTE[1 if form == SINGLE else 2]:
        raise NeuzipError(f"the stream 'grid' has a table of form {form} with {p} codes")
    return HEAD + (p * p if form == JOINT_PAIRS else p)


def parse_code_table(data: npt.NDArray[np.uint8], bits: int) -> CodeTable:
    """The table in these bytes, of numbers of so many bits. Raises NeuzipError when it breaks a rule."""
    end = stored_bytes(data)
    stored = CodeTable(int(data[0]), int(data[1]) | int(data[2]) << 8, data[HEAD:end].copy())
    if stored.lowest + stored.count > 1 << bits:
        raise NeuzipError(f"the stream 'grid' has a table with codes beyond {bits} bits")
    if stored.form != SINGLE and bits > 8:
        raise NeuzipError(f"the stream 'grid' has a table of pairs, for which {bits} bits are too many")
    try:
        _ = stored.table
    except ValueError as error:
        raise NeuzipError(f"the stream 'grid' has a table that is not valid: {error}") from error
    return stored


def share_values(shares: Shares) -> Ints:
    """The numbers that share bytes stand for: 0 for 0, else of 5 leading bits, from 17 on.

    >>> share_values(np.array([0, 1, 15, 16, 255], np.uint8)).tolist()
    [0, 17, 31, 32, 1015808]
    """
    b = shares.astype(np.int64)
    return np.where(b > 0, (16 + (b & 15)) << (b >> 4), 0)


def share_bytes(counts: Ints) -> Shares:
    """The share bytes of counts, of which at least one is not 0.

    >>> share_bytes(np.array([0, 1, 1000, 500, 10**9])).tolist()
    [0, 1, 1, 1, 255]
    """
    scaled = counts * LARGEST_SHARE // int(counts.max())
    _, length = np.frexp(scaled.astype(np.float64))  # bits of the number: exact below 2^53
    exponent = np.maximum(length.astype(np.int64) - 5, 0)
    leading = (scaled + (1 << exponent >> 1)) >> exponent
    carried = leading == 32
    exponent, leading = exponent + carried, np.where(carried, 16, leading)
    return np.where(counts > 0, np.maximum(exponent << 4 | np.maximum(leading - 16, 0), 1), 0).astype(
        np.uint8
    )


@dataclass(frozen=True)
class CodeCoding:
    """How the codes of a tensor are coded: their low bits raw, the rest with a table; and about the bytes.

    The bytes are those of all streams but for the step and the factors, and of one more stream for low bits.
    """

    low_bits: int
    stored: CodeTable
    nbytes: int


def choose_coding(counted: Census, numel: int) -> CodeCoding:
    """The coding of fewest bytes for `numel` codes, of which `counted` are all or a sample.

    Codes are counted from 0 on. Pairs are taken where they take hardly more.
    """
    codings = list(_codings(counted, numel))
    best = min(codings, key=lambda one: one.nbytes)
    pairs = [one for one in codings if one.stored.form != SINGLE]
    if pairs:
        fast = min(pairs, key=lambda one: one.nbytes)
        if (fast.nbytes - best.nbytes) * SAVED_SHARE <= fast.nbytes:
            return fast
    return best


def _codings(counted: Census, numel: int) -> Iterator[CodeCoding]:
    """A coding for each number of low bits, with each form of table that is possible."""
    counts = counted.exponents
    bits = counts.size.bit_length() - 1
    for low in LOW_BITS:
        if bits - low < LEAST_BITS:
            break
        upper = counts.reshape(-1, 1 << low).sum(1)
        frequent = np.flatnonzero(upper << RARE_BITS >= upper.sum())
        if low and frequent[-1] - frequent[0] < FEW:
            break
        raw = padded(plane_bytes(low, numel)) + STREAM_BYTES if low else 0
        forms = [SINGLE, PAIRS] if bits - low <= 8 and numel > 1 else [SINGLE]
        for form in forms:
            start, stop = _window(upper, int(frequent[0]), int(frequent[-1]) + 1, form)
            stored = CodeTable(form, start, share_bytes(_frequent(upper[start:stop])))
            yield CodeCoding(low, stored, raw + _expected_bytes(stored, upper, None, numel))
        if low == 0 and PAIRS in forms and counted.pairs is not None:
            pairs = counted.pairs.reshape(256, 256)[start:stop, start:stop]
            if pairs.any():
                stored = CodeTable(JOINT_PAIRS, start, share_bytes(_frequent(pairs.reshape(-1))))
                yield CodeCoding(low, stored, _expected_bytes(stored, upper, pairs, numel))


def _frequent(counts: Ints) -> Ints:
    """Counts without those too rare for a table."""
    return np.where(counts << RARE_BITS >= counts.sum(), counts, 0)


def _window(upper: Ints, start: int, stop: int, form: int) -> tuple[int, int]:
    """The numbers of a table among those from `start` to `stop`: the most frequent in a row, two at least."""
    most = PALETTE[1 if form == SINGLE else 2]
    if stop - start > most:
        sums = np.concatenate([[0], np.cumsum(upper[start:stop])])
        start += int(np.argmax(sums[most:] - sums[:-most]))
        stop = start + most
    if stop - start == 1:
        start = min(start, upper.size - 2)
        stop = start + 2
    return start, stop


def _expected_bytes(stored: CodeTable, upper: Ints, pairs: Ints | None, numel: int) -> int:
    """About the bytes of table, index and words. Without `pairs` neighbours count as independent."""
    start, p, total = stored.lowest, stored.count, int(upper.sum())
    inside = upper[start : start + p]
    symbols = np.zeros(256)
    if stored.form == SINGLE:
        symbols[:p] = inside
    else:
        of_pairs = np.outer(inside, inside) / (2 * total) if pairs is None else pairs
        symbols.reshape(16, 16)[:p, :p] = of_pairs
    words = rans.words_of_symbols(stored.table, symbols, total, numel)
    return stored.stored.size + padded(2 * -(-numel // rans.BLOCK)) + padded(2 * words)
