"""What the decoder on a GPU takes: a coded tensor in torch's tensors. Triton is not needed to hold one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuzip.kernels.dtypes import pattern_dtypes
from neuzip.kernels.float_fields import FloatFormat, plane_bytes, plane_widths

from . import CorruptStream
from .model import Table
from .numbers import BLOCK, RUN

ALIGNMENT = 16
"""Bytes. Planes begin at multiples of it, and may be read up to the next: as they lie in a container."""

PATTERNS = pattern_dtypes()
"""Dtypes of bit patterns in torch, by their bits."""

TOGETHER = 8
"""Parts that a launch takes at most."""

Kind = tuple[FloatFormat, int, int, int]
"""What a launch is compiled for: format, mantissa bits, group, block size or 0."""

# Columns of the descriptors, a row for every tensor. Positions are bytes after two base addresses.
OUT, WORDS_END, NUMEL, NORMALISER, TENSOR, PLANES = range(6)
WIDTHS = (32, 16, 8, 4, 2, 1)
COLUMNS = PLANES + len(WIDTHS)

# More columns of a part's row, by which positions are after the memory that it is in: bytes before the row
# itself, where the arrays of its tensor are, its first and last full block.
ROW, STARTS, COUNTS, TABLES, FIRST, LAST = range(COLUMNS, COLUMNS + 6)


@dataclass(frozen=True)
class CodedTensor:
    """What the decoder needs of one tensor. All its torch tensors are one-dimensional and on one device.

    `index` and `words` are int16 with the bits of uint16; `words` is filled up to a multiple of 16 bytes at
    most. `planes` are uint8, by width, aligned to 16 bytes and filled up to a multiple of 16. `normaliser` is
    uint8, one a block of `block_size` weights.
    """

    fmt: FloatFormat
    kept_bits: int
    numel: int
    table: Table
    index: torch.Tensor
    words: torch.Tensor
    planes: dict[int, torch.Tensor]
    normaliser: torch.Tensor | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.index.numel() != -(-self.numel // BLOCK):
            raise CorruptStream(f"the index has {self.index.numel()} entries for {self.numel} weights")
        if not 0 <= self.kept_bits <= self.fmt.mantissa_bits:
            raise CorruptStream(f"{self.fmt.name} has no {self.kept_bits} mantissa bits")
        if self.index.dtype != torch.int16 or self.words.dtype != torch.int16:
            raise CorruptStream("index and words are int16")
        for width in plane_widths(1 + self.kept_bits):
            needed = -(-plane_bytes(width, self.numel) // ALIGNMENT) * ALIGNMENT
            plane = self.planes.get(width)
            if plane is None or plane.numel() < needed or plane.data_ptr() % ALIGNMENT:
                raise CorruptStream(f"the plane of {width} bits is too short or not aligned")
        if self.block_size is not None:
            if self.block_size < RUN or self.block_size & (self.block_size - 1):
                raise CorruptStream(f"a block size of {self.block_size}")
            if self.normaliser is None or self.normaliser.numel() < -(-self.numel // self.block_size):
                raise CorruptStream("the normaliser is too short")

    @property
    def kind(self) -> Kind:
        """What a launch is compiled for."""
        return self.fmt, self.kept_bits, self.table.group, self.block_size or 0


def raise_if_corrupt(errors: torch.Tensor, names: Sequence[str]) -> None:
    """Wait for the device; raise CorruptStream with the name of the first tensor that `errors` marks."""
    corrupt = torch.nonzero(errors).flatten().tolist()
    if corrupt:
        raise CorruptStream(f"the words of {names[corrupt[0]]!r} are corrupt")


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
