"""Words that hold codes of a fixed width: which bits of which word a slot has, which width is best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuzip.kernels.packed_linear.form import MAX_COLUMNS, SLOTS, TILE_ROWS, TURN

WIDTHS = range(4, 9)
"""Bits that a code may have."""

ESCAPE_BITS = 32
"""Bits of an escape."""

MAX_ESCAPES = (1 << 31) - (1 << 16)
"""Escapes are counted in an int32, and kernels count a little further."""

__all__ = [
    "ESCAPE_BITS",
    "MAX_COLUMNS",
    "MAX_ESCAPES",
    "SLOTS",
    "TILE_ROWS",
    "TURN",
    "WIDTHS",
    "CodeFields",
    "best_width",
    "columns_of_slots",
    "word_count",
]


@dataclass(frozen=True)
class CodeFields:
    """Where the 32 slots of a row that share words have their bits, for codes of `width` bits."""

    width: int

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise ValueError(f"codes have 4 to 8 bits, not {self.width}")

    @property
    def bias(self) -> int:
        """What is added to a code in its field, and the field of a code of 0.

        >>> CodeFields(5).bias
        16
        """
        return 1 << (self.width - 1)

    @property
    def in_half(self) -> int:
        """Fields that lie whole in half a word.

        >>> [CodeFields(width).in_half for width in WIDTHS]
        [4, 3, 2, 2, 2]
        """
        return 16 // self.width

    @property
    def spare(self) -> int:
        """Uppermost bits of half a word that no field of its own has.

        >>> [CodeFields(width).spare for width in WIDTHS]
        [0, 1, 4, 2, 0]
        """
        return 16 - self.in_half * self.width

    @property
    def spare_words(self) -> int:
        """Words that the spare bits are when they are put side by side: of width / spare_words words each.

        >>> [CodeFields(width).spare_words for width in WIDTHS]
        [0, 1, 2, 1, 0]
        """
        return -(-self.spare * self.width // 16)

    def place(self, slot: int) -> tuple[int, int]:
        """The word of a slot, and the lowest bit of its field there. From word `width` on they are spare.

        >>> CodeFields(5).place(2), CodeFields(5).place(3), CodeFields(5).place(31)
        ((0, 5), (0, 21), (5, 16))
        """
        word, field = divmod(slot // 2, self.in_half)
        return word, field * self.width + slot % 2 * 16

    def spare_bits(self, word: int) -> tuple[int, int]:
        """Which spare word has the spare bits of a word, and from which bit of each half on.

        >>> CodeFields(6).spare_bits(0), CodeFields(6).spare_bits(5)
        ((6, 8), (7, 0))
        """
        each = self.width // self.spare_words
        return self.width + word // each, self.spare * (each - 1 - word % each)


def word_count(columns: int) -> int:
    """Groups of 32 slots that a row of so many columns takes."""
    return -(-columns // SLOTS)


def columns_of_slots(columns: int) -> Tensor:
    """The column of each slot of a row (int64), [groups * 32]: by group, then by slot. Some may be beyond."""
    groups = word_count(columns)
    c, slot = torch.arange(groups)[:, None], torch.arange(SLOTS)[None, :]
    turned = c // 4 * TURN + slot // 4 * 16 + slot // 2 % 2 * 8 + c % 4 * 2 + slot % 2
    return torch.where(c < groups // 4 * 4, turned, c * SLOTS + slot).flatten()


def best_width(codes: Tensor) -> int:
    """The width with the least bits of codes and escapes together, for codes (int16).

    >>> best_width(torch.tensor([0, 7, -8] * 100 + [8], dtype=torch.int16))
    4
    """
    costs = {}
    for width in WIDTHS:
        bias = CodeFields(width).bias
        outside = int(((codes < -bias) | (codes >= bias)).sum())
        costs[width] = width * codes.numel() + ESCAPE_BITS * outside
    return min(costs, key=costs.__getitem__)
