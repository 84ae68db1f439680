"""What the decoder on a GPU takes: a coded tensor in torch's tensors. Triton is not needed to hold one.

Floats are coded exponents, beside planes of signs and mantissas. Weights on a grid are coded codes, and the
grid says what they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.dtypes import names_for, pattern_dtypes
from neuzip.kernels.float_fields import FloatFormat, plane_bytes, plane_widths
from neuzip.kernels.grid import Grid

from . import CorruptStream
from .model import Table
from .numbers import BLOCK, LOW_BITS, RUN

Ints = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Bytes. Planes begin at multiples of it, and may be read up to the next: as they lie in a container."""

PATTERNS = pattern_dtypes()
"""Dtypes of bit patterns in torch, by their bits."""

TOGETHER = 8
"""Parts that a launch takes at most."""

GRID_FORMATS = names_for("ans")
"""Formats of weights on a grid that the decoder writes, by their names in safetensors."""

# What a launch for weights on a grid is compiled for, as bits of a number, which is 0 for floats.
ON_GRID, COLUMN_FACTORS, CROSSING_ROWS = 1, 2, 4

MAX_ROW = (1 << 31) - 2 * BLOCK
"""Weights of a row of which the decoder counts columns in 32 bits."""


class Kind(NamedTuple):
    """What a launch is compiled for.

    kept_bits: mantissa bits, on a grid the low bits of codes. block_size: 0 without a normaliser. grid: 0 for
    floats, or ON_GRID with COLUMN_FACTORS, and CROSSING_ROWS where a lane's 8 weights may be in several rows.
    """

    fmt: FloatFormat
    kept_bits: int
    group: int
    block_size: int
    grid: int = 0


# Columns of the descriptors, a row for every tensor. Positions are bytes after two base addresses.
OUT, WORDS_END, NUMEL, NORMALISER, TENSOR, PLANES = range(6)
WIDTHS = (32, 16, 8, 4, 2, 1)

# Of weights on a grid: positions of factors, whether rows have any, the bits of the step, weights of a row,
# bits of a code, what codes in the table count from, and weights before the first block.
ROW_FACTORS, COLUMN_FACTORS_AT, HAS_ROWS, STEP, ROW_WEIGHTS, CODE_BITS, LOWEST, BEGIN = range(
    PLANES + len(WIDTHS), PLANES + len(WIDTHS) + 8
)
COLUMNS = BEGIN + 1

# More columns of a part's row, by which positions are after the memory that it is in: bytes before the row
# itself, where the arrays of its tensor are, its first and last full block.
ROW, STARTS, COUNTS, TABLES, FIRST, LAST = range(COLUMNS, COLUMNS + 6)

POSITIONS = (WORDS_END, NORMALISER, ROW_FACTORS, COLUMN_FACTORS_AT, *range(PLANES, PLANES + len(WIDTHS)))
"""Columns that say where streams are."""


@dataclass(frozen=True)
class CodedGrid:
    """What codes of a tensor stand for: weights of rows of `row_weights`, the tensor's last dimension.

    `grid` has its factor bytes on the device. A code has `code_bits` bits, low bits not counted. `begin`:
    weights of the tensor before those that are coded, a multiple of BLOCK.
    """

    grid: Grid
    row_weights: int
    code_bits: int
    begin: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.code_bits <= 16:
            raise CorruptStream(f"codes of {self.code_bits} bits")
        if self.row_weights < 1 or self.begin % BLOCK:
            raise CorruptStream(f"rows of {self.row_weights} weights, from weight {self.begin} on")

    @property
    def bits(self) -> int:
        """What a launch is compiled for: see `Kind`."""
        return grid_bits(self.row_weights, has_columns=self.grid.columns is not None)

    def with_factors(self, factor_bytes: Sequence[torch.Tensor]) -> CodedGrid:
        """This grid with its factor bytes elsewhere: those of rows, of columns or of both in this order."""
        others = iter(factor_bytes)
        rows, columns = (None if old is None else next(others) for old in (self.grid.rows, self.grid.columns))
        return replace(self, grid=replace(self.grid, rows=rows, columns=columns))

    def require_factors(self, numel: int) -> None:
        """Raise CorruptStream where factors for `numel` weights are missing or too few."""
        rows, columns = self.grid.rows, self.grid.columns
        needed = -(-(self.begin + numel) // self.row_weights)
        if rows is not None and (rows.dtype != torch.uint8 or rows.numel() < needed):
            raise CorruptStream(f"{rows.numel()} row factors for {needed} rows")
        if columns is None:
            return
        if columns.dtype != torch.uint8 or columns.numel() < self.row_weights:
            raise CorruptStream(f"{columns.numel()} column factors for rows of {self.row_weights} weights")
        if columns.data_ptr() % RUN:
            raise CorruptStream(f"column factors do not begin at a multiple of {RUN} bytes")


def grid_bits(row_weights: int, *, has_columns: bool) -> int:
    """The number `Kind.grid` of weights on a grid; `has_columns` says whether columns have factors."""
    crossing = row_weights % RUN != 0 or row_weights > MAX_ROW
    return ON_GRID | (COLUMN_FACTORS if has_columns else 0) | (CROSSING_ROWS if crossing else 0)


def require_row(table: Table) -> None:
    """Raise CorruptStream for a table whose codes do not follow each other, or with a symbol without meaning.

    Tables of codes are so, and an entry of the decoder's table says how far a code is from the first.
    """
    symbols, size = np.flatnonzero(table.frequencies), table.palette.size
    places = symbols if table.group == 1 else np.concatenate([symbols & 15, symbols >> 4])
    if int(places.max()) >= size or int(table.palette[-1]) - int(table.palette[0]) != size - 1:
        raise CorruptStream("a table whose codes do not follow each other")


@dataclass(frozen=True)
class CodedTensor:
    """What the decoder needs of one tensor. All its torch tensors are one-dimensional and on one device.

    `index` and `words` are int16 with the bits of uint16; `words` is filled up to a multiple of 16 bytes at
    most. On a GPU, pieces of 16 bytes are read, so the memory of `words` goes on to the end of the last
    piece, as any allocation of CUDA does; what is beyond `words` there counts as 0. `planes` are uint8, by
    width, aligned to 16 bytes and filled up to a multiple of 16. `normaliser` is uint8, one a block of
    `block_size` weights. Weights on a grid have a `grid`, and in place of kept bits the
    low bits of codes, which are raw in a plane: 0, 1, 2, 4 or 8.
    """

    fmt: FloatFormat
    kept_bits: int
    numel: int
    table: Table
    index: torch.Tensor
    words: torch.Tensor
    planes: dict[int, torch.Tensor] = field(default_factory=dict)
    normaliser: torch.Tensor | None = None
    block_size: int | None = None
    grid: CodedGrid | None = None

    def __post_init__(self) -> None:
        if self.index.numel() != -(-self.numel // BLOCK):
            raise CorruptStream(f"the index has {self.index.numel()} entries for {self.numel} weights")
        if self.grid is None and not 0 <= self.kept_bits <= self.fmt.mantissa_bits:
            raise CorruptStream(f"{self.fmt.name} has no {self.kept_bits} mantissa bits")
        if self.index.dtype != torch.int16 or self.words.dtype != torch.int16:
            raise CorruptStream("index and words are int16")
        if self.grid is not None:
            if self.fmt.name not in GRID_FORMATS or self.normaliser is not None:
                raise CorruptStream(f"weights of {self.fmt.name} on a grid, or with a normaliser")
            if self.kept_bits not in LOW_BITS or self.planes.keys() != set(self.widths):
                raise CorruptStream(f"codes with {self.kept_bits} low bits in planes {sorted(self.planes)}")
            require_row(self.table)
            self.grid.require_factors(self.numel)
        for width in self.widths:
            needed = -(-plane_bytes(width, self.numel) // ALIGNMENT) * ALIGNMENT
            plane = self.planes.get(width)
            if plane is None or plane.numel() < needed or plane.data_ptr() % ALIGNMENT:
                raise CorruptStream(f"the plane of {width} bits is too short or not aligned")
        if self.block_size is not None:
            if self.block_size < RUN or self.block_size & (self.block_size - 1):
                raise CorruptStream(f"a block size of {self.block_size}")
            if self.normaliser is None or self.normaliser.numel() < -(-self.numel // self.block_size):
                raise CorruptStream("the normaliser is too short")

    @cached_property
    def descriptor(self) -> Ints:
        """What the decoder's kernels read of the tensor, int64 [COLUMNS].

        Positions are addresses, and those of what a tensor does not have are 0. OUT and TENSOR are 0 too.
        """
        row = np.zeros(COLUMNS, np.int64)
        row[WORDS_END], row[NUMEL] = self.words.data_ptr() + 2 * self.words.numel(), self.numel
        row[NORMALISER] = 0 if self.normaliser is None else self.normaliser.data_ptr()
        for width in self.widths:
            row[PLANES + WIDTHS.index(width)] = self.planes[width].data_ptr()
        if self.grid is not None:
            own = self.grid.grid
            row[ROW_FACTORS] = 0 if own.rows is None else own.rows.data_ptr()
            row[COLUMN_FACTORS_AT] = 0 if own.columns is None else own.columns.data_ptr()
            row[HAS_ROWS], row[STEP] = own.rows is not None, np.float32(own.step).view(np.int32)
            row[ROW_WEIGHTS], row[CODE_BITS] = self.grid.row_weights, self.grid.code_bits
            row[LOWEST], row[BEGIN] = int(self.table.palette[0]), self.grid.begin
        return row

    @cached_property
    def extent(self) -> Ints:
        """Where words are, and their bytes, where the index is, and blocks and full blocks: int64 [5]."""
        words, index, full = self.words, self.index, self.numel // BLOCK
        return np.array(
            [words.data_ptr(), 2 * words.numel(), index.data_ptr(), index.numel(), full], np.int64
        )

    @cached_property
    def kind(self) -> Kind:
        """What a launch is compiled for."""
        grid = 0 if self.grid is None else self.grid.bits
        return Kind(self.fmt, self.kept_bits, self.table.group, self.block_size or 0, grid)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the planes."""
        if self.grid is not None:
            return (self.kept_bits,) if self.kept_bits else ()
        return plane_widths(1 + self.kept_bits)


def raise_if_corrupt(errors: torch.Tensor, names: Sequence[str]) -> None:
    """Wait for the device; raise CorruptStream with the name of the first tensor that `errors` marks."""
    for name, mark in zip(names, errors.tolist(), strict=True):
        if mark:
            raise CorruptStream(f"the words of {name!r} are corrupt")


@dataclass(frozen=True)
class CodedPart:
    """Blocks of a tensor that lie somewhere with all that is known of them: full ones, and the ragged last.

    `row` is its descriptor there, int64, and all that a launch is given.
    """

    kind: Kind
    row: torch.Tensor
    full: int
    ragged: bool


@dataclass(frozen=True)
class ChosenLaunch:
    """A launch that decodes parts of the items in a list on the device: see `decode_chosen_kernel`.

    base: uint8, where positions count from. rows: int64 [items, parts, 2]. places: int64 [parts]. programs:
    int32 [programs of a slot, 2].
    """

    kind: Kind
    ragged: bool
    warps: int
    base: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    programs: torch.Tensor
