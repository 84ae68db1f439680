"""The difference of two tensors of floats: small where one grew out of the other.

Bit patterns are put in the order of the numbers that they stand for, so that neighbouring floats are
neighbouring integers: a pattern x of b bits becomes

    f(x) = x                    up to 2^(b - 1), the pattern of -0
    f(x) = 2^(b - 1) - x        above, modulo 2^b

which is its own inverse. The difference f(new) - f(base), modulo 2^b, counts the floats between the two.
As integers that end in `shift` zeros every one, and with signs moved to the lowest bit (0, -1, 1, -2 become
0, 1, 2, 3), differences are what rANS codes: see compress/schemes/delta_coding.py.

They stand in the order of the exponents that the base has, those of equal exponents as they came: by how many
floats a step of training moves a weight depends on its size, and so neighbours are alike.

Arrays are one-dimensional and unsigned. NaN payloads and both zeros are patterns like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuzip.kernels.float_fields import Bits, FloatFormat, plane_bytes, plane_widths
from neuzip.kernels.float_fields.cpu import pack_plane, take_plane

from . import cpu

__all__ = ["Digits", "Subtracted", "lengths", "put_digit", "restore", "subtract", "sums"]


@dataclass(frozen=True)
class Subtracted:
    """Differences modulo 2^b, sorted, and the bitwise or of all of them and of all that is new."""

    differences: Bits
    union: int
    new_union: int


def subtract(new: Bits, base: Bits, fmt: FloatFormat, out: Bits | None = None) -> Subtracted:
    """f(new) - f(base), sorted by the exponents of `base`, in `out` if that is given."""
    if new.shape != base.shape or new.dtype != base.dtype or new.ndim != 1:
        raise ValueError(f"{new.dtype} {new.shape} and {base.dtype} {base.shape} have no difference")
    out = np.empty(new.size, new.dtype) if out is None else out
    union, new_union = cpu.subtract(
        np.ascontiguousarray(new), np.ascontiguousarray(base), fmt.exponent_bits, fmt.mantissa_bits, out
    )
    return Subtracted(out, int(union), int(new_union))


def lengths(differences: Bits, shift: int) -> npt.NDArray[np.int64]:
    """How many zigzagged differences have 0, 1, ... 64 bits."""
    counts = np.zeros(65, np.int64)
    cpu.lengths(differences, shift, counts)
    return counts


@dataclass(frozen=True)
class Digits:
    """How a difference is cut up: without its `shift` last zeros, zigzagged, in `low` raw bits below digits.

    Digit j are the bits from low + 16 j on, 16 of them or as many as are left.
    """

    bits: int
    shift: int = 0
    low: int = 0

    def width(self, digit: int) -> int:
        """The bits of a digit; 0 or less if there is no such digit."""
        return min(16, self.bits - self.shift - self.low - 16 * digit)

    def take(self, differences: Bits, digit: int) -> npt.NDArray[np.uint16]:
        """One digit of every difference."""
        out = np.empty(differences.size, np.uint16)
        cpu.take(differences, self.shift, self.low + 16 * digit, 0xFFFF, out)
        return out

    def take_low(self, differences: Bits) -> dict[int, npt.NDArray[np.uint8]]:
        """The planes of the `low` lowest bits, by width: as `float_fields` packs fields."""
        fields = np.empty(differences.size, differences.dtype)
        cpu.take(differences, self.shift, 0, (1 << self.low) - 1, fields)
        planes, left = {}, self.low
        for width in plane_widths(self.low):
            left -= width
            planes[width] = np.empty(plane_bytes(width, fields.size), np.uint8)
            if width >= 8:
                take_plane(fields, left, planes[width].view(f"<u{width // 8}"))
            else:
                pack_plane(fields, left, width, planes[width])
        return planes


def sums(digits: npt.NDArray[np.uint16], block: int) -> npt.NDArray[np.int64]:
    """For every block how many digits are not 0, and how many bits these have in all: int64 [blocks, 2]."""
    counts = np.empty((-(-digits.size // block), 2), np.int64)
    cpu.sums(digits, block, counts)
    return counts


def put_digit(digits: npt.NDArray[np.unsignedinteger], at: int, zigzagged: Bits) -> None:
    """Put digits into the bits of `zigzagged` from `at` on, which are 0."""
    cpu.put_digit(digits, at, zigzagged)


def restore(base: Bits, zigzagged: Bits, shift: int, fmt: FloatFormat) -> Bits:
    """The patterns that differ from `base` by these: the inverse of `subtract`."""
    if base.shape != zigzagged.shape or base.dtype != zigzagged.dtype:
        raise ValueError(f"{zigzagged.dtype} {zigzagged.shape} cannot be added to {base.dtype} {base.shape}")
    out = np.empty(base.size, base.dtype)
    cpu.restore(np.ascontiguousarray(base), zigzagged, shift, fmt.exponent_bits, fmt.mantissa_bits, out)
    return out
