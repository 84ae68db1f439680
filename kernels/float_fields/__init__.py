"""A float taken apart: its exponent in one array, its sign and leading mantissa bits in another.

A weight of any float format is the integer

    sign (1 bit) | exponent (E bits) | mantissa (M bits)

`split` keeps the exponent whole and the sign with the `kept_bits` leading mantissa bits as one field of
w = 1 + kept bits. The field goes to planes of 32, 16, 8, 4, 2 and 1 bits, the binary digits of w, so that
every k packs without waste and no field of a plane straddles a machine word:

    bf16, kept 7:  w = 8         plane 8:  s mmmmmmm
    bf16, kept 2:  w = 3 = 2+1   plane 2:  s m         plane 1:  m
    fp16, kept 10: w = 11        plane 8:  s mmmmmmm   plane 2:  m m   plane 1: m

The widest plane holds the leading bits. Planes narrower than a byte fill it from the lowest bit up.

Arrays are one-dimensional and unsigned: the bit patterns, never float values. NaN payloads, both zeros and
denormals are patterns like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuzip.kernels.device.compiled import read_only
from neuzip.kernels.dtypes import DTYPES, names_for

from . import cpu

Bits = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class FloatFormat:
    """The widths of a float's fields, in bits. `finite` says that no exponent is reserved for infinities."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite: bool = False

    @property
    def bits(self) -> int:
        """Width of the whole float in bits."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer type that holds one bit pattern (little-endian, as on disk)."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def exponent_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer type that holds one exponent."""
        return np.dtype(np.uint8 if self.exponent_bits <= 8 else np.uint16)


FORMATS: dict[str, FloatFormat] = {
    name: FloatFormat(name, DTYPES[name].exponent_bits, DTYPES[name].mantissa_bits, DTYPES[name].is_finite)
    for name in names_for("lossless")
}
"""The formats that are coded, by their names in safetensors."""


def plane_widths(width: int) -> tuple[int, ...]:
    """Widths of the planes of a field of `width` bits, widest first: the binary digits of `width`.

    >>> plane_widths(11)
    (8, 2, 1)
    """
    if not 1 <= width <= 63:
        raise ValueError(f"a field has 1 to 63 bits, not {width}")
    return tuple(p for p in (32, 16, 8, 4, 2, 1) if width & p)


def plane_bytes(plane: int, numel: int) -> int:
    """Bytes that a plane of `plane` bits takes for `numel` weights; the last byte is filled up with zeros.

    >>> plane_bytes(1, 9)
    2
    """
    return (numel * plane + 7) // 8


@dataclass(frozen=True)
class Census:
    """What a tensor is made of, gathered in one pass: the coder's model comes from here.

    `pairs[e0 | e1 << 8]` counts neighbours (weights 2i and 2i+1), or is None for formats with more than 8
    exponent bits; `single[e]` counts the exponents of weights without a neighbour. `mantissa_union` is the
    bitwise or of all mantissas. Censuses of consecutive pieces of even length add up to that of the whole.
    """

    pairs: npt.NDArray[np.int64] | None
    single: npt.NDArray[np.int64]
    mantissa_union: int

    def __add__(self, other: Census) -> Census:
        pairs = None if self.pairs is None or other.pairs is None else self.pairs + other.pairs
        return Census(pairs, self.single + other.single, self.mantissa_union | other.mantissa_union)

    @property
    def exponents(self) -> npt.NDArray[np.int64]:
        """How often each exponent occurs."""
        if self.pairs is None:
            return self.single
        exponents = np.zeros(256, np.int64)
        cpu.marginals(self.pairs, exponents)
        return np.asarray(self.single + exponents[: self.single.size])

    def kept_bits(self, fmt: FloatFormat) -> int:
        """Leading mantissa bits that any weight uses: fp32 that was bf16 once needs 7 of its 23."""
        union = self.mantissa_union
        if union == 0:
            return 0
        return fmt.mantissa_bits - ((union & -union).bit_length() - 1)


def census(bits: Bits, fmt: FloatFormat) -> Census:
    """Count exponents and exponent pairs of `bits` and unite its mantissas."""
    bits = _checked(bits, fmt)
    wide = fmt.exponent_bits > 8
    pairs = np.zeros(1 if wide else 1 << 16, np.int64)
    single = np.zeros(1 << fmt.exponent_bits, np.int64)
    union = cpu.census(bits, fmt.exponent_bits, fmt.mantissa_bits, not wide, pairs, single)
    return Census(None if wide else pairs, single, int(union))


Planes = dict[int, npt.NDArray[np.uint8]]


def empty_planes(numel: int, kept_bits: int) -> Planes:
    """Planes for the fields of `numel` weights, to be filled."""
    return {width: np.empty(plane_bytes(width, numel), np.uint8) for width in plane_widths(1 + kept_bits)}


def split(
    bits: Bits, fmt: FloatFormat, kept_bits: int, exponents: Bits | None = None, planes: Planes | None = None
) -> tuple[Bits, Planes]:
    """Take floats apart: their exponents, and the planes of sign and `kept_bits` leading mantissa bits.

    The other mantissa bits are dropped: they must be zero for the split to be lossless. The results go into
    `exponents` and `planes` where those are given.
    """
    bits = _checked(bits, fmt)
    _check_kept(kept_bits, fmt)
    exponents = np.empty(bits.size, fmt.exponent_dtype) if exponents is None else exponents
    planes = empty_planes(bits.size, kept_bits) if planes is None else planes
    dtype, widths = _field_dtype(1 + kept_bits), plane_widths(1 + kept_bits)
    whole = widths == (8 * dtype.itemsize,)
    fields = planes[widths[0]].view(dtype) if whole else np.empty(bits.size, dtype)
    cpu.split(bits, fmt.exponent_bits, fmt.mantissa_bits, kept_bits, exponents, fields)
    left = 1 + kept_bits
    for width in () if whole else widths:
        left -= width
        if width >= 8:
            cpu.take_plane(fields, left, planes[width].view(f"<u{width // 8}"))
        else:
            cpu.pack_plane(fields, left, width, planes[width])
    return exponents, planes


def merge(exponents: Bits, planes: Planes, fmt: FloatFormat, kept_bits: int) -> Bits:
    """Put floats together again: the inverse of `split`, with zeros for the mantissa bits not kept."""
    _check_kept(kept_bits, fmt)
    numel = exponents.size
    bits = np.empty(numel, fmt.dtype)
    fields = read_only(unpack_fields(planes, numel, kept_bits))
    cpu.merge(np.ascontiguousarray(exponents), fields, fmt.exponent_bits, fmt.mantissa_bits, kept_bits, bits)
    return bits


def unpack_fields(planes: Planes, numel: int, kept_bits: int) -> Bits:
    """The fields of sign and mantissa of `numel` weights, from their planes."""
    widths, dtype = plane_widths(1 + kept_bits), _field_dtype(1 + kept_bits)
    for width in widths:
        if planes[width].size != plane_bytes(width, numel):
            raise ValueError(f"plane {width} has {planes[width].size} bytes for {numel} weights")
    if widths == (dtype.itemsize * 8,):
        return np.ascontiguousarray(planes[widths[0]]).view(dtype)
    fields = np.zeros(numel, dtype)
    for width in widths:
        plane = read_only(np.ascontiguousarray(planes[width]))
        if width >= 8:
            cpu.put_plane(plane.view(f"<u{width // 8}"), width, fields)
        else:
            cpu.unpack_plane(plane, width, fields)
    return fields


def pack_low_bits(numbers: Bits, width: int) -> npt.NDArray[np.uint8]:
    """The plane of the `width` lowest bits of numbers: 1, 2, 4 or 8."""
    if width == 8:
        return numbers.astype(np.uint8)
    plane = np.empty(plane_bytes(width, numbers.size), np.uint8)
    cpu.pack_plane(numbers, 0, width, plane)
    return plane


def round_mantissa(bits: Bits, fmt: FloatFormat, kept_bits: int) -> Bits:
    """Round to `kept_bits` mantissa bits: to nearest, ties to even, into the exponent, never to infinity.

    Infinities and NaNs are not for this function: it rounds them like numbers.
    Source: NeuZip (arXiv 2410.20650), section 2.2, without the reference code's round-half-up and overflow.
    """
    bits = _checked(bits, fmt)
    _check_kept(kept_bits, fmt)
    drop = fmt.mantissa_bits - kept_bits
    if drop == 0:
        return np.asarray(bits.copy())
    out = np.empty(bits.size, fmt.dtype)
    cpu.round_mantissa(bits, drop, largest_finite(fmt) >> drop << drop, fmt.bits - 1, out)
    if fmt.name.endswith("FNUZ"):
        out[out == 1 << (fmt.bits - 1)] = 0  # these formats have one zero; -0 is their NaN
    return out


def largest_finite(fmt: FloatFormat) -> int:
    """The bit pattern of the largest finite number of a format."""
    top = (1 << (fmt.bits - 1)) - 1
    if fmt.name == "F8_E4M3":
        return top - 1  # S.1111.111 is NaN, and there is no infinity
    if fmt.finite:
        return top  # the fnuz forms keep only the pattern of -0 for NaN
    return top - (1 << fmt.mantissa_bits)


def non_finite(bits: Bits, fmt: FloatFormat) -> npt.NDArray[np.bool_]:
    """Which of `bits` are infinities or NaNs."""
    sign = 1 << (fmt.bits - 1)
    beyond: npt.NDArray[np.bool_] = (bits & fmt.dtype.type(sign - 1)) > largest_finite(fmt)
    return beyond | (bits == sign) if fmt.name.endswith("FNUZ") else beyond


def _field_dtype(width: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if width <= 8 * size))


def _checked(bits: Bits, fmt: FloatFormat) -> Bits:
    if bits.ndim != 1 or bits.dtype != fmt.dtype:
        raise ValueError(
            f"{fmt.name} takes a one-dimensional {fmt.dtype} array, not {bits.ndim}-d {bits.dtype}"
        )
    return np.ascontiguousarray(bits)


def _check_kept(kept_bits: int, fmt: FloatFormat) -> None:
    if not 0 <= kept_bits <= fmt.mantissa_bits:
        raise ValueError(f"{fmt.name} has 0 to {fmt.mantissa_bits} mantissa bits to keep, not {kept_bits}")
