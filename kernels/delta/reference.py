"""Differences of floats as they are defined, in Python's integers."""

from __future__ import annotations

from collections.abc import Sequence

from neuzip.kernels.float_fields import FloatFormat


def ordered(x: int, bits: int) -> int:
    """f: a float's pattern in the order of the numbers, modulo 2^bits, or back again."""
    half = 1 << (bits - 1)
    return x if x <= half else (half - x) % (1 << bits)


def zigzag(v: int) -> int:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return 2 * v if v >= 0 else -2 * v - 1


def unzigzag(z: int) -> int:
    """The inverse of `zigzag`."""
    return -(z + 1) // 2 if z & 1 else z // 2


def order(base: Sequence[int], fmt: FloatFormat) -> list[int]:
    """The numbers of the weights in the order of their exponents, equal ones as they came."""
    exponents = [x >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1) for x in base]
    return sorted(range(len(base)), key=exponents.__getitem__)


def differences(new: Sequence[int], base: Sequence[int], fmt: FloatFormat, shift: int) -> list[int]:
    """The zigzagged differences of bit patterns, sorted; `shift` zeros must end each of them."""
    bits = fmt.bits
    half, zigzagged = 1 << (bits - 1), []
    for a, b in ((new[i], base[i]) for i in order(base, fmt)):
        d = (ordered(a, bits) - ordered(b, bits) + half) % (1 << bits) - half
        assert d % (1 << shift) == 0
        zigzagged.append(zigzag(d >> shift))
    return zigzagged


def restore(base: Sequence[int], zigzagged: Sequence[int], fmt: FloatFormat, shift: int) -> list[int]:
    """The inverse of `differences`."""
    bits, restored = fmt.bits, [0] * len(base)
    for i, z in zip(order(base, fmt), zigzagged, strict=True):
        restored[i] = ordered((ordered(base[i], bits) + (unzigzag(z) << shift)) % (1 << bits), bits)
    return restored
