"""Codes of quantized weights to streams and back, and weights to codes and back.

    index, words  the codes, plus half of what E bits can count, without low bits: coded as exponents are
    low           low bits of codes that spread widely: a plane
    grid          the step as fp32, then a factor byte a row, then a factor byte a column, then the table

Both directions work in pieces of a few million weights, on the CPU. This module loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from neuzip.compress.pieces import PIECE, Map, Read, ReadStream, expect_length, padded, pieces
from neuzip.compress.prepared import Codes
from neuzip.errors import BUG_OR_MEMORY, NeuzipError
from neuzip.formats.container import Stream, padded_stream
from neuzip.formats.records import Loss
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels import rans
from neuzip.kernels.dtypes import pattern_dtypes, torch_dtype
from neuzip.kernels.float_fields import (
    Bits,
    Census,
    FloatFormat,
    cpu,
    non_finite,
    pack_low_bits,
    plane_bytes,
    unpack_fields,
)
from neuzip.kernels.float_fields.values import largest_value, to_float64
from neuzip.kernels.grid import Grid, OutOfRange, Spread
from neuzip.kernels.rans.coded import CodedGrid

from .code_tables import (
    HEAD,
    LARGEST_CODE_TABLE,
    CodeCoding,
    CodeTable,
    choose_coding,
    code_bits,
    parse_code_table,
    stored_bytes,
)
from .coded_blocks import SCRATCH, CodedBlocks, block_streams, naming_block
from .lossless import OnGpu
from .truncated import WIDENED, ErrorSums, NonFinite

STEP_BYTES = 4
"""Bytes of the step, at the beginning of the stream `grid`."""


def code_format(bits: int) -> FloatFormat:
    """What codes of so many bits are to the coder of exponents: floats that have only an exponent."""
    return FloatFormat(f"a code of {bits} bits", bits, 0)


def shifted(codes: Codes, bits: int) -> Bits:
    """Codes as the numbers from 0 to 2^bits - 1 that are coded in their place."""
    wide = codes.view(np.uint16) + np.uint16(1 << (bits - 1))  # modulo 2^16
    return np.asarray(wide, code_format(bits).exponent_dtype)


def count(shifted_codes: Bits, bits: int) -> Census:
    """How often each shifted code occurs, and each pair of neighbours if they have at most 8 bits."""
    is_wide = bits > 8
    pairs = np.zeros(1 if is_wide else 1 << 16, np.int64)
    single = np.zeros(1 << bits, np.int64)
    cpu.census(shifted_codes, bits, 0, not is_wide, pairs, single)
    return Census(None if is_wide else pairs, single, 0)


@dataclass(frozen=True)
class QuantizedCodes:
    """Codes of a tensor, and what they restore to, compared with the original."""

    codes: Codes
    grid: Grid
    original: str
    restored: str
    loss: Loss

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return code_bits(int(self.codes.min()), int(self.codes.max()))

    def coding(self, parallel: Map) -> CodeCoding:
        """How the codes are coded."""
        bits, codes = self.bits, self.codes
        parts = parallel(lambda piece: count(shifted(codes[slice(*piece)], bits), bits), pieces(codes.size))
        counted = next(parts)
        for part in parts:
            counted += part
        return choose_coding(counted, codes.size)

    def streams(self, coding: CodeCoding, parallel: Map) -> dict[str, Stream]:
        """The streams of codes and grid."""
        bits, codes, low = self.bits, self.codes, coding.low_bits
        table, upper = coding.stored.table, code_format(bits - low)

        def code(piece: tuple[int, int]) -> tuple[rans.RansEncoded, npt.NDArray[np.uint8]]:
            whole = shifted(codes[slice(*piece)], bits)
            symbols = (whole >> whole.dtype.type(low)).astype(upper.exponent_dtype, copy=False)
            encoded = rans.encode(symbols, table, SCRATCH.words_for(symbols.size, table.group))
            return encoded, pack_low_bits(whole, low) if low else np.empty(0, np.uint8)

        coded = list(parallel(code, pieces(codes.size)))
        streams = block_streams([part.index for part, _ in coded], [part.words for part, _ in coded])
        if low:
            streams["low"] = padded_stream([plane for _, plane in coded])
        return {**streams, "grid": padded_stream([grid_bytes(self.grid, coding.stored)])}


def quantize(
    read: Read, info: TensorInfo, fmt: FloatFormat, grid: Grid, codes: Codes | None, parallel: Map
) -> QuantizedCodes:
    """A tensor on a grid: with these flat `codes`, or rounded to nearest.

    Raises NonFinite for infinities and NaNs, OutOfRange for a step that is too small for the weights or too
    large for their dtype.
    """
    dtype = torch_dtype(info.dtype)
    target = np.empty(info.numel, np.int16) if codes is None else codes

    def one(piece: tuple[int, int]) -> tuple[Bits, Bits, ErrorSums]:
        start, stop = piece
        bits = read(start, stop)
        if non_finite(bits, fmt).any():
            raise NonFinite
        if codes is None:
            rounded = grid.codes_between(as_floats(bits, dtype), start, info.shape)
            target[start:stop] = rounded.numpy()
        restored = values(target[start:stop], grid, start, info)
        return bits, restored, ErrorSums.between(bits, restored, fmt)

    error, hashes = ErrorSums(), (xxhash.xxh3_64(), xxhash.xxh3_64())
    for bits, restored, part in parallel(one, pieces(info.numel)):
        error += part
        hashes[0].update(bits.data)
        hashes[1].update(restored.data)
    quantized = QuantizedCodes(target, grid, hashes[0].hexdigest(), hashes[1].hexdigest(), error.ternary_loss)
    require_finite_values(grid, quantized.bits, fmt)
    return quantized


def spread_of(read: Read, info: TensorInfo, fmt: FloatFormat) -> Spread:
    """The spread of the rows and columns of a tensor."""
    spread = Spread(info.numel, columns_of(info))
    for piece in pieces(info.numel):
        bits = read(*piece)
        for start in range(0, bits.size, WIDENED):
            spread.add(to_float64(bits[start : start + WIDENED], fmt))
    return spread


def as_floats(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Bit patterns seen as a flat tensor; read-only ones are copied."""
    patterns = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(patterns.view(np.uint8)).view(dtype)


def values(codes: Codes, grid: Grid, start: int, info: TensorInfo) -> Bits:
    """The bit patterns of the weights from `start` on that have these codes."""
    of = codes if codes.flags.writeable else codes.copy()
    floats = grid.values_between(torch.from_numpy(of), start, info.shape, torch_dtype(info.dtype))
    patterns = floats.view(pattern_dtypes()[8 * floats.element_size()]).numpy()
    return patterns.view(f"<u{patterns.itemsize}")


def columns_of(info: TensorInfo) -> int:
    """The last dimension of a tensor, which has one factor each: 1 for a tensor without dimensions."""
    return info.shape[-1] if info.shape else 1


def require_finite_values(grid: Grid, bits: int, fmt: FloatFormat) -> None:
    """Raise OutOfRange where a code of so many bits could stand for a value that the dtype does not have."""
    limit = min(largest_value(fmt), float(np.finfo(np.float32).max))
    if grid.largest_step * 2 ** (bits - 1) > limit:
        raise OutOfRange(
            f"codes of {bits} bits with steps up to {grid.largest_step:.6g} go beyond the largest {fmt.name}",
            "take a smaller step",
        )


def grid_bytes(grid: Grid, table: CodeTable) -> npt.NDArray[np.uint8]:
    """The stream `grid`, without its padding."""
    step = np.array([grid.step], "<f4").view(np.uint8)
    factors = [t.cpu().numpy() for t in (grid.rows, grid.columns) if t is not None]
    return np.concatenate([step, *factors, table.stored])


def grid_length(info: TensorInfo, *, rows: bool, columns: bool) -> int:
    """Bytes of the stream `grid` before the table: of the step and the factors."""
    width = columns_of(info)
    return STEP_BYTES + (info.numel // width if rows else 0) + (width if columns else 0)


def expected_bytes(counted: Census, info: TensorInfo, *, rows: bool, columns: bool) -> int:
    """About the bytes of all streams of a tensor, of whose shifted codes `counted` are all or a sample."""
    coding = choose_coding(counted, info.numel)
    return coding.nbytes + padded(grid_length(info, rows=rows, columns=columns))


def parse_grid(
    data: npt.NDArray[np.uint8], info: TensorInfo, bits: int, *, rows: bool, columns: bool
) -> tuple[Grid, CodeTable]:
    """The grid and the table in a stream `grid`; `bits` are those of a code without its low bits.

    Raises NeuzipError for its length, its step and its table.
    """
    start = grid_length(info, rows=rows, columns=columns)
    if data.size < padded(start + HEAD):
        raise NeuzipError(f"the stream 'grid' has {data.size} bytes, which are too few for a table")
    expect_length("grid", data.size, padded(start + stored_bytes(data[start : start + HEAD])))
    step = float(data[:STEP_BYTES].view("<f4")[0])
    end = STEP_BYTES + (info.numel // columns_of(info) if rows else 0)
    of_rows = torch.from_numpy(data[STEP_BYTES:end].copy()) if rows else None
    of_columns = torch.from_numpy(data[end:start].copy()) if columns else None
    try:
        grid = Grid(step, of_rows, of_columns)
    except NeuzipError as error:
        raise NeuzipError(f"the stream 'grid': {error.message}") from error
    return grid, parse_code_table(data[start:], bits)


class QuantizedDecoder:
    """Decodes ranges of one quantized tensor.

    `length` gives the length of a stream in bytes. With `on_gpu` values are decoded there. `low_bits` of the
    `bits` of a code are stored raw. Raises NeuzipError when the streams contradict each other, before it
    takes memory for more than `index` and `grid`.
    """

    def __init__(
        self,
        read_stream: ReadStream,
        length: Callable[[str], int],
        info: TensorInfo,
        fmt: FloatFormat,
        bits: int,
        low_bits: int,
        *,
        rows: bool,
        columns: bool,
        on_gpu: OnGpu | None = None,
    ) -> None:
        self._info, self._bits, self._fmt, self._on_gpu = info, bits, fmt, on_gpu
        self._low, self._read_stream = low_bits, read_stream
        most = padded(grid_length(info, rows=rows, columns=columns) + LARGEST_CODE_TABLE)
        if length("grid") > most:
            raise NeuzipError(f"the stream 'grid' has {length('grid')} bytes, which are too many")
        if low_bits:
            expect_length("low", length("low"), padded(plane_bytes(low_bits, info.numel)))
        stored = read_stream("grid", 0, length("grid"))
        self.grid, table = parse_grid(stored, info, bits - low_bits, rows=rows, columns=columns)
        self.blocks = CodedBlocks(read_stream, length, info.numel, table.table)
        try:
            require_finite_values(self.grid, bits, fmt)
        except OutOfRange as error:
            raise NeuzipError(f"the stream 'grid': {error.message}") from error

    def codes(self, start: int, stop: int) -> Codes:
        """The codes of weights `start` to `stop`."""
        if not 0 <= start <= stop <= self._info.numel:
            raise ValueError(f"weights {start} to {stop} of {self._info.numel}")
        if start == stop:
            return np.empty(0, np.int16)
        first, last = start // rans.BLOCK, -(-stop // rans.BLOCK)
        begin, end = first * rans.BLOCK, min(last * rans.BLOCK, self._info.numel)
        words, index = self.blocks.words_of(first, last)
        with naming_block(first):
            symbols = rans.decode(words, index, self.blocks.table, end - begin, self._bits - self._low)
        wide = np.asarray(symbols, np.uint16)
        if self._low:
            plane = self._read_stream("low", *self._low_extent(begin, end))
            wide = wide << np.uint16(self._low) | unpack_fields(
                {self._low: plane}, end - begin, self._low - 1
            )
        wide = wide[start - begin : stop - begin]
        return np.asarray((wide - np.uint16(1 << (self._bits - 1))).view(np.int16))  # modulo 2^16

    def _low_extent(self, begin: int, end: int) -> tuple[int, int]:
        """The bytes of `low` that the codes of weights `begin` to `end` take, from a whole block on."""
        start = begin * self._low // 8
        return start, start + plane_bytes(self._low, end - begin)

    def read(self, start: int, stop: int) -> Bits:
        """The bit patterns of weights `start` to `stop`."""
        if self._on_gpu is not None and start < stop:
            return self._read_on(self._on_gpu, start, stop)
        return self._read_here(start, stop)

    def _read_here(self, start: int, stop: int) -> Bits:
        out = np.empty(stop - start, self._fmt.dtype)
        for at in range(start, stop, PIECE):
            end = min(at + PIECE, stop)
            out[at - start : end - start] = values(self.codes(at, end), self.grid, at, self._info)
        return out

    def _read_on(self, on: OnGpu, start: int, stop: int) -> Bits:
        first, last = start // rans.BLOCK, -(-stop // rans.BLOCK)
        begin, end = first * rans.BLOCK, min(last * rans.BLOCK, self._info.numel)
        ranges: dict[str | int, tuple[str, int, int]] = {"words": ("words", *self.blocks.extent(first, last))}
        if self._low:
            ranges[self._low] = ("low", *self._low_extent(begin, end))
        decoded = on.gpu.decode(
            self._fmt, self._low, self.blocks.table, self.blocks.index[first:last], end - begin, ranges,
            on.fill, grid=CodedGrid(self.grid, columns_of(self._info), self._bits - self._low, begin),
        )  # fmt: skip
        if decoded is None:  # the GPU does not say where; the CPU does
            self._read_here(begin, end)
            raise NeuzipError(
                f"the words from block {first} on are corrupt on the GPU and not on the CPU", BUG_OR_MEMORY
            )
        return decoded[start - begin : stop - begin]
