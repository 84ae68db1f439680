"""A tensor as its difference from the same tensor of another checkpoint, the base, and back, exactly.

Differences are those of kernels/delta, sorted by exponents within regions of a PIECE. Their digits of 16
bits (one for BF16) are coded by rANS as exponents are, in blocks of 16,384, each by one of a few tables. A
block in which few digits are not 0 is a list of those, and so an unchanged block takes three bytes. Where
differences are large in all weights, as of F32, `low` bits stand below the digits raw.

`encode` reads both tensors once and holds the differences, as much memory as the tensor has bytes.
`DeltaDecoder` reads any range.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neuzip.compress.pieces import (
    PIECE,
    Map,
    Read,
    ReadStream,
    expect_length,
    padded,
    pieces,
    plane_starts,
)
from neuzip.errors import BUG_OR_MEMORY, NeuzipError
from neuzip.formats.container import Stream, padded_stream
from neuzip.kernels import rans
from neuzip.kernels.delta import Digits, lengths, put_digit, restore, subtract
from neuzip.kernels.float_fields import Bits, FloatFormat, plane_bytes, unpack_fields
from neuzip.kernels.rans.numbers import HEADER_WORDS

from .coded_blocks import LARGEST_TABLE
from .delta_tables import (
    MOST_TABLES,
    SYMBOL_BITS,
    DeltaTables,
    Ints,
    Words,
    blocks_of,
    buckets_of,
    choose_low,
    choose_tables,
    parse_tables,
    table_words,
)

if TYPE_CHECKING:
    import torch

    from neuzip.compress.gpu import Gpu

Choice = npt.NDArray[np.uint8]
Observe = Callable[[Bits, Bits], None]

CHECKED = 1 << 14
"""Blocks that `DeltaDecoder.check` looks at together; of these a PIECE at most are coded."""

AS_FLOAT = FloatFormat("digit", SYMBOL_BITS, 63 - SYMBOL_BITS)
"""What a digit is to a GPU's decoder: the exponent of a float of 64 bits (those of narrower ones may have 8
bits at most) that is positive and has no mantissa."""


@dataclass(frozen=True)
class EncodedDelta:
    """A coded difference. `union` is the bitwise or of all patterns of the new tensor."""

    cut: Digits
    digits: int
    streams: dict[str, Stream]
    union: int

    @property
    def nbytes(self) -> int:
        """What the streams take."""
        return sum(stream.nbytes for stream in self.streams.values())


def encode(
    read: Read, read_base: Read, numel: int, fmt: FloatFormat, parallel: Map, observe: Observe
) -> EncodedDelta | None:
    """Code a tensor of `numel` weights; None if it is its base.

    `observe` is shown all pieces of the tensor and of its base in order, once.
    """
    differences, union, new_union = np.empty(numel, fmt.dtype), 0, 0

    def difference(piece: tuple[int, int]) -> tuple[Bits, Bits, int, int]:
        new, base = read(*piece), read_base(*piece)
        subtracted = subtract(new, base, fmt, differences[slice(*piece)])
        return new, base, subtracted.union, subtracted.new_union

    for new, base, of_piece, of_new in parallel(difference, pieces(numel)):
        observe(new, base)
        union |= of_piece
        new_union |= of_new
    if not union:
        return None
    cut = Digits(fmt.bits, shift=(union & -union).bit_length() - 1)
    measured = parallel(lambda piece: lengths(differences[slice(*piece)], cut.shift), pieces(numel))
    counts = [int(n) for n in sum(measured, np.zeros(65, np.int64))]
    cut = replace(cut, low=choose_low(counts))
    longest = max(length for length, n in enumerate(counts) if n)
    digits = max(1, -(-(longest - cut.low) // SYMBOL_BITS))

    heads: list[Words] = []
    words: list[Words] = []
    choices: list[Choice] = []
    for digit in range(digits):
        tables = choose_tables(differences, cut, digit, parallel)
        heads += [np.array([len(tables.tables)], np.uint16), *map(table_words, tables.tables)]

        def code(
            piece: tuple[int, int], digit: int = digit, tables: DeltaTables = tables
        ) -> tuple[Choice, list[Words]]:
            return _code(cut.take(differences[slice(*piece)], digit), tables)

        for choice, coded in parallel(code, pieces(numel)):
            choices.append(choice)
            words += coded
    streams = {
        "table": padded_stream(heads),
        "index": padded_stream([np.array([block.size for block in words], np.uint16)]),
        "words": padded_stream(words),
        "choice": padded_stream(choices),
    }
    if cut.low:
        planes = cut.take_low(differences).values()
        streams["low"] = Stream([part for plane in planes for part in padded_stream([plane]).parts])
    return EncodedDelta(cut, digits, streams, new_union)


def _code(symbols: Words, tables: DeltaTables) -> tuple[Choice, list[Words]]:
    """Code the blocks of a piece: which table each has, and its words."""
    parts, buckets = blocks_of(symbols), buckets_of(symbols)
    chosen = [None if bucket is None else tables.by_bucket[bucket] for bucket in buckets]
    words = [_listed(part) if number is None else part for part, number in zip(parts, chosen, strict=True)]
    for number in set(chosen) - {None}:
        own = [at for at, its in enumerate(chosen) if its == number]
        coded = rans.encode(np.concatenate([parts[at] for at in own]), tables.tables[number or 0])
        ends = np.cumsum(coded.index.astype(np.int64))
        for at, block in zip(own, np.split(coded.words, ends[:-1]), strict=True):
            words[at] = block
    return np.array([number or 0 for number in chosen], np.uint8), words


def _listed(symbols: Words) -> Words:
    """The digits of a block that are not 0, each after its position."""
    positions = np.flatnonzero(symbols)
    return np.stack([positions.astype(np.uint16), symbols[positions]], axis=1).reshape(-1)


@dataclass(frozen=True)
class _Coded:
    """Blocks of one table: their numbers, words and index."""

    table: rans.Table
    numbers: Ints
    words: Words
    index: Words


@dataclass(frozen=True)
class _Blocks:
    """Some blocks of one digit: those that are coded, by table, and of the others what they list.

    `at` are the positions of listed digits among the weights of all blocks, `values` the digits.
    """

    coded: list[_Coded]
    at: Ints
    values: Words


class DeltaDecoder:
    """Decodes ranges of one tensor from its streams and its base: the inverse of `encode`.

    `length` gives the length of a stream in bytes. Raises NeuzipError when the streams contradict each other.
    """

    def __init__(
        self,
        read_stream: ReadStream,
        length: Callable[[str], int],
        numel: int,
        fmt: FloatFormat,
        cut: Digits,
        digits: int,
        gpu: Gpu | None = None,
    ) -> None:
        self._read_stream = read_stream
        self._numel = numel
        self._fmt = fmt
        self._cut = cut
        self._gpu = gpu
        if cut.width(digits - 1) < 1:
            raise NeuzipError(
                f"a shift of {cut.shift}, {cut.low} low bits and digits up to number {digits - 1} "
                f"are more than {fmt.name} has"
            )
        self._blocks = -(-numel // rans.BLOCK)
        self._planes: dict[int, int] = {}
        if cut.low:
            self._planes, end = plane_starts(cut.low, numel)
            expect_length("low", length("low"), end)
        expect_length("index", length("index"), padded(2 * self._blocks * digits))
        if length("table") > padded((2 + LARGEST_TABLE * MOST_TABLES) * digits):
            raise NeuzipError(f"the stream 'table' has {length('table')} bytes, which are too many")
        self._tables = parse_tables(read_stream("table", 0, length("table")).view("<u2"), cut, digits)
        self._index = read_stream("index", 0, 2 * self._blocks * digits).view("<u2")
        expect_length("choice", length("choice"), padded(self._blocks * digits))
        self._choice = read_stream("choice", 0, self._blocks * digits)
        self._starts = np.zeros(self._index.size + 1, np.int64)
        np.cumsum(self._index, out=self._starts[1:])
        expect_length("words", length("words"), padded(2 * int(self._starts[-1])))

    def read(self, start: int, stop: int, read_base: Read) -> Bits:
        """The bit patterns of weights `start` to `stop`, of which `read_base` gives the base's."""
        if not 0 <= start <= stop <= self._numel:
            raise ValueError(f"weights {start} to {stop} of {self._numel}")
        if start == stop:
            return np.empty(0, self._fmt.dtype)
        # Whole regions: where in one a difference stands depends on all of the base's exponents.
        begin, end = start // PIECE * PIECE, min(-(-stop // PIECE) * PIECE, self._numel)
        first, last = begin // rans.BLOCK, -(-end // rans.BLOCK)
        base = read_base(begin, end)
        if self._gpu is None:
            regions = [(at, min(at + PIECE, end)) for at in range(begin, end, PIECE)]
            parts = [
                restore(base[a - begin : b - begin], self.read_differences(a, b), self._cut.shift, self._fmt)
                for a, b in regions
            ]
            restored = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return restored[start - begin : stop - begin]
        blocks = [self._blocks_of(digit, first, last) for digit in range(len(self._tables))]
        on_gpu = _restore_on(self._gpu, base, blocks, self._read_low(begin, end), self._cut, self._fmt)
        if on_gpu is not None:
            return on_gpu[start - begin : stop - begin]
        # The GPU does not say where: the CPU does, as if it had been the one to find out.
        on_cpu = copy.copy(self)
        on_cpu._gpu = None
        on_cpu.read_differences(begin, end)
        raise NeuzipError(
            f"the words from block {first} on are corrupt on the GPU and not on the CPU",
            BUG_OR_MEMORY,
        )

    def read_differences(self, start: int, stop: int) -> Bits:
        """The zigzagged differences `start` to `stop` in their sorted order, which needs no base."""
        first, last, begin, end = self._extent(start, stop)
        if self._cut.low:
            zigzagged = unpack_fields(self._read_low(begin, end), end - begin, self._cut.low - 1)
            zigzagged = zigzagged.astype(self._fmt.dtype)
        else:
            zigzagged = np.zeros(end - begin, self._fmt.dtype)
        for digit in range(len(self._tables)):
            symbols = self._decode(digit, self._blocks_of(digit, first, last), first, end - begin)
            put_digit(symbols, self._cut.low + SYMBOL_BITS * digit, zigzagged)
        return zigzagged[start - begin : stop - begin]

    def check(self) -> None:
        """Decode what the streams hold, which needs no base. Raises NeuzipError where they break a rule.

        Only coded blocks are decoded, and lists are looked at as they stand: a block in which nothing changed
        takes three bytes for up to 131,072, so the work follows the streams, not what they stand for.
        """
        for digit in range(len(self._tables)):
            of_digit = self._index[digit * self._blocks : (digit + 1) * self._blocks]
            coded = np.flatnonzero(of_digit >= HEADER_WORDS)[:: PIECE // rans.BLOCK]
            cuts = sorted({*coded.tolist(), *range(0, self._blocks, CHECKED), self._blocks})
            for first, last in pairwise(cuts):
                numel = min(last * rans.BLOCK, self._numel) - first * rans.BLOCK
                for part in self._blocks_of(digit, first, last).coded:
                    self._decode_coded(digit, part, first, numel)

    def _extent(self, start: int, stop: int) -> tuple[int, int, int, int]:
        """The blocks of some weights, and the weights of those blocks."""
        if not 0 <= start <= stop <= self._numel:
            raise ValueError(f"weights {start} to {stop} of {self._numel}")
        first, last = start // rans.BLOCK, -(-stop // rans.BLOCK)
        return first, last, first * rans.BLOCK, min(last * rans.BLOCK, self._numel)

    def _read_low(self, begin: int, end: int) -> dict[int, npt.NDArray[np.uint8]]:
        return {
            width: self._read_stream(
                "low", at + begin * width // 8, at + begin * width // 8 + plane_bytes(width, end - begin)
            )
            for width, at in self._planes.items()
        }

    def _blocks_of(self, digit: int, first: int, last: int) -> _Blocks:
        """Blocks `first` to `last` of a digit, taken apart. Raises NeuzipError for a list that is none."""
        before = digit * self._blocks
        counts = self._index[before + first : before + last].astype(np.int64)
        begin, end = (int(self._starts[before + at]) for at in (first, last))
        words = self._read_stream("words", 2 * begin, 2 * end).view("<u2")
        is_coded = counts >= HEADER_WORDS
        choice = self._choice[before + first : before + last]
        beyond = choice >= np.where(is_coded, len(self._tables[digit]), 1)
        if beyond.any():
            raise NeuzipError(f"block {first + int(beyond.argmax())} of digit {digit} has no table")
        coded = []
        for number in np.unique(choice[is_coded]).tolist():
            own = is_coded & (choice == number)
            coded.append(
                _Coded(
                    self._tables[digit][number],
                    np.flatnonzero(own),
                    words if own.all() else words[np.repeat(own, counts)],
                    counts[own].astype(np.uint16),
                )
            )
        listed = words[:0] if is_coded.all() else words[np.repeat(~is_coded, counts)]
        lists = np.where(is_coded, 0, counts)
        if (lists & 1).any():
            block = first + int((lists & 1).argmax())
            raise NeuzipError(f"block {block} of digit {digit}: its list has half an entry")
        positions, values = listed[0::2].astype(np.int64), listed[1::2]
        owners = np.repeat(np.arange(last - first), lists // 2)
        at = owners * rans.BLOCK + positions
        inside = (positions < rans.BLOCK) & (at < self._numel - first * rans.BLOCK)
        rising = np.diff(at, prepend=-1) > 0
        fit = (values > 0) & (values.astype(np.int64) >> self._cut.width(digit) == 0)
        good = inside & rising & fit
        if not good.all():
            block = first + int(owners[good.argmin()])
            raise NeuzipError(
                f"block {block} of digit {digit}: its list has positions or digits out of range"
            )
        return _Blocks(coded, at, values)

    def _decode(self, digit: int, blocks: _Blocks, first: int, numel: int) -> Words:
        """The digits of all `numel` weights of some blocks, the first of which is block `first`."""
        symbols = np.zeros(numel, np.uint16)
        for coded in blocks.coded:
            ranges, decoded = self._decode_coded(digit, coded, first, numel)
            at = 0
            for a, b in ranges:
                symbols[a:b] = decoded[at : at + b - a]
                at += b - a
        symbols[blocks.at] = blocks.values
        return symbols

    def _decode_coded(
        self, digit: int, coded: _Coded, first: int, numel: int
    ) -> tuple[list[tuple[int, int]], Words]:
        """The digits of blocks of one table, side by side, and the ranges of weights that they are."""
        ranges = _ranges(coded.numbers, numel)
        try:
            decoded = rans.decode(
                coded.words, coded.index, coded.table, sum(b - a for a, b in ranges), self._cut.width(digit)
            )
        except rans.CorruptStream as error:
            raise NeuzipError(
                f"the stream 'words', digit {digit}, among the coded blocks from block {first} on: "
                f"{error.message}"
            ) from error
        return ranges, decoded


def _ranges(blocks: npt.NDArray[np.int64], numel: int) -> list[tuple[int, int]]:
    """The weights of some blocks of `numel` weights, neighbours in one range."""
    cuts = [0, *(np.flatnonzero(np.diff(blocks) > 1) + 1).tolist(), blocks.size]
    return [
        (int(blocks[a]) * rans.BLOCK, min((int(blocks[b - 1]) + 1) * rans.BLOCK, numel))
        for a, b in pairwise(cuts)
    ]


def _restore_on(
    gpu: Gpu,
    base: Bits,
    blocks: Sequence[_Blocks],
    low: dict[int, npt.NDArray[np.uint8]],
    cut: Digits,
    fmt: FloatFormat,
) -> Bits | None:
    """Decode whole regions on a GPU and add them to `base`; None where the words are corrupt."""
    import torch

    from neuzip.kernels.delta import ops as torch_ops
    from neuzip.kernels.rans.coded import PATTERNS

    parts: list[npt.NDArray[Any]] = [base, *low.values(), *(c.words for b in blocks for c in b.coded)]
    ends = np.cumsum([padded(part.nbytes) for part in parts]).tolist()
    host = np.zeros(ends[-1], np.uint8)
    for part, end in zip(parts, ends, strict=True):
        host[end - padded(part.nbytes) :][: part.nbytes] = part.view(np.uint8)

    def compute(raw: torch.Tensor) -> torch.Tensor:
        there = iter(
            [raw[end - padded(part.nbytes) :][: part.nbytes] for part, end in zip(parts, ends, strict=True)]
        )
        patterns = next(there).view(PATTERNS[8 * base.itemsize])
        planes = {width: next(there) for width in low}
        fields = torch_ops.unpack_fields(planes, base.size) if planes else None
        errors = torch.zeros(1, dtype=torch.int32, device=raw.device)
        digits = [
            _decode_on(b, [next(there) for _ in b.coded], base.size, cut.width(digit), errors)
            for digit, b in enumerate(blocks)
        ]
        restored = torch_ops.restore(patterns, digits, fields, cut, fmt, PIECE)
        return torch.cat([errors.view(torch.uint8), restored.view(torch.uint8)])

    result = gpu.compute(host, compute)
    return None if result[:4].any() else result[4:].copy().view(base.dtype)


def _decode_on(
    blocks: _Blocks, words: Sequence[torch.Tensor], numel: int, width: int, errors: torch.Tensor
) -> torch.Tensor:
    """The digits of `numel` weights, int32, on the device of `errors`. Marks corrupt ones in `errors`."""
    import torch

    from neuzip.kernels.rans.coded import CodedTensor
    from neuzip.kernels.rans.triton import decode as triton_decode

    device = errors.device
    digits = torch.zeros(numel, dtype=torch.int32, device=device)
    ranges = [_ranges(coded.numbers, numel) for coded in blocks.coded]
    sizes = [sum(b - a for a, b in own) for own in ranges]
    signs = torch.zeros(padded(plane_bytes(1, max(sizes, default=0))), dtype=torch.uint8, device=device)
    tensors = [
        CodedTensor(
            AS_FLOAT, 0, size, coded.table,
            torch.from_numpy(coded.index.view(np.int16)).to(device), own.view(torch.int16), {1: signs},
        )
        for coded, size, own in zip(blocks.coded, sizes, words, strict=True)
    ]  # fmt: skip
    outs = [torch.empty(size, dtype=torch.int64, device=device) for size in sizes]
    errors |= triton_decode.decode(tensors, outs).any() if tensors else 0
    for own, floats in zip(ranges, outs, strict=True):
        decoded, at = (floats >> AS_FLOAT.mantissa_bits).to(torch.int32), 0
        errors |= (decoded >> width).any()
        for a, b in own:
            digits[a:b] = decoded[at : at + b - a]
            at += b - a
    if blocks.at.size:
        values = torch.from_numpy(blocks.values.astype(np.int32)).to(device)
        digits[torch.from_numpy(blocks.at).to(device)] = values
    return digits
