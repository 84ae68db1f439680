"""What `float_fields` means, in plain Python integers: slow, and obvious enough to trust."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from . import FloatFormat, largest_finite, plane_widths


def split(bits: Sequence[int], fmt: FloatFormat, kept_bits: int) -> tuple[list[int], dict[int, bytes]]:
    """Exponents and planes of `bits`."""
    exponents = [(v >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1) for v in bits]
    fields = [field(v, fmt, kept_bits) for v in bits]
    planes = {}
    left = 1 + kept_bits
    for width in plane_widths(1 + kept_bits):
        left -= width
        whole = sum(((f >> left) & ((1 << width) - 1)) << (i * width) for i, f in enumerate(fields))
        planes[width] = whole.to_bytes((len(bits) * width + 7) // 8, "little")
    return exponents, planes


def field(v: int, fmt: FloatFormat, kept_bits: int) -> int:
    """Sign and `kept_bits` leading mantissa bits of one pattern."""
    sign = v >> (fmt.bits - 1)
    mantissa = v & ((1 << fmt.mantissa_bits) - 1)
    return sign << kept_bits | mantissa >> (fmt.mantissa_bits - kept_bits)


def round_mantissa(v: int, fmt: FloatFormat, kept_bits: int) -> int:
    """The nearest pattern with `kept_bits` mantissa bits, by exact distances; ties to the even pattern."""
    drop = fmt.mantissa_bits - kept_bits
    sign = v >> (fmt.bits - 1) << (fmt.bits - 1)
    magnitude = v ^ sign
    below = magnitude >> drop << drop
    candidates = [c for c in (below, below + (1 << drop)) if c <= largest_finite(fmt)]
    exact = value(magnitude, fmt)
    return sign | min(candidates, key=lambda c: (abs(value(c, fmt) - exact), (c >> drop) & 1))


def value(magnitude: int, fmt: FloatFormat) -> Fraction:
    """The number that a non-negative finite pattern stands for, up to the format's constant power of two."""
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    if exponent == 0:
        return Fraction(2 * mantissa)
    return Fraction((mantissa + (1 << fmt.mantissa_bits)) << exponent)
