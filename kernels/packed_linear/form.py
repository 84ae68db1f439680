"""The packed form of a tensor: its window, its words and its escapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SLOTS = 32  # weights that share words: the signs of 32 fill one
PLANES = 8 + 2 + 1  # words of low bytes, codes and signs for 32 weights: 11 bits each
FARTHEST = 3  # the largest distance below the base that a 2-bit code can say
MAX_COLUMNS = 1 << 16  # an escape names its column in 16 bits


@dataclass(frozen=True)
class Window:
    """The exponents that codes can say: 2 base - 6 + parity to 2 base + 1 + parity.

    Bases end early enough that no code leads below zero, and with parity 1 earlier still: there the halves of
    the lowest exponents are not what their patterns say, nor is the pattern below infinity half of it.
    """

    base: int
    parity: int

    def __post_init__(self) -> None:
        if self.parity not in (0, 1) or not FARTHEST + self.parity <= self.base <= 127 - self.parity:
            raise ValueError(f"no window has base {self.base} and parity {self.parity}")

    @property
    def shift(self) -> int:
        """What is taken from a pattern before it is packed, modulo 2**16."""
        return self.parity << 7

    @property
    def exponents(self) -> range:
        """The exponents inside."""
        lowest = 2 * (self.base - FARTHEST) + self.parity
        return range(lowest, lowest + 2 * (FARTHEST + 1))


@dataclass(frozen=True)
class Packed:
    """A bf16 tensor [out, in] in fixed width; the module's docstring says what the words hold.

    words          uint32 [out, PLANES, lane_words]
    row_start      int32 [out + 1]: the escapes of row r are row_start[r] to row_start[r + 1]
    escape_columns uint16 [escapes], ascending in each row
    escape_highs   uint8 [escapes]: sign and upper 7 exponent bits of the shifted pattern
    """

    shape: tuple[int, int]
    window: Window
    words: npt.NDArray[np.uint32]
    row_start: npt.NDArray[np.int32]
    escape_columns: npt.NDArray[np.uint16]
    escape_highs: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        out, _ = self.shape
        assert self.words.shape == (out, PLANES, self.lane_words)
        assert self.row_start.shape == (out + 1,)
        assert self.escape_columns.shape == self.escape_highs.shape == (self.escapes,)

    @property
    def lane_words(self) -> int:
        """Words of a plane of one row: the columns between two slots of one word."""
        return lane_words(self.shape[1])

    @property
    def escapes(self) -> int:
        """Weights outside the window."""
        return int(self.row_start[-1])

    @property
    def nbytes(self) -> int:
        """Bytes in memory, escapes and row starts included."""
        arrays = (self.words, self.row_start, self.escape_columns, self.escape_highs)
        return sum(array.nbytes for array in arrays)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight; 0 for a tensor without weights."""
        numel = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / numel if numel else 0.0


def lane_words(columns: int) -> int:
    """Words of a plane that hold a row of `columns` weights.

    >>> [lane_words(columns) for columns in (0, 1, 32, 33, 4096)]
    [0, 1, 1, 2, 128]
    """
    return -(-columns // SLOTS)


def best_window(exponents: npt.NDArray[np.int64]) -> Window:
    """The window with the fewest escapes for `exponents[e]` weights of exponent e.

    Of equals, parity 0 comes first, then the lowest base: its stand-ins are the smallest.
    """
    inside = np.concatenate([[0], np.cumsum(exponents)])
    windows = [Window(base, parity) for parity in (0, 1) for base in range(3 + parity, 128 - parity)]
    return max(windows, key=lambda w: int(inside[w.exponents.stop] - inside[w.exponents.start]))
