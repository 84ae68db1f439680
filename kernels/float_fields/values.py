"""Bit patterns as numbers, and back: for error measures and for the block normaliser.

numpy has no bf16 and no fp8. Everything is exact except the one rounding each function names.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import Bits, FloatFormat, cpu, largest_finite

_NATIVE = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def to_float64(bits: Bits, fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """The numbers that patterns stand for, exactly. NaN and infinity for the patterns that are."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        if fmt.name == "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if fmt.name in _NATIVE:
            return bits.view(_NATIVE[fmt.name]).astype(np.float64)
    return _fp8_values(fmt)[bits]


Sums = tuple[float, float, int, float, float]


def error_sums(
    original: npt.NDArray[np.float64],
    restored: npt.NDArray[np.float64],
    before: Sums = (0.0, 0.0, 0, 0.0, 0.0),
) -> Sums:
    """How far `restored` is from `original`, both finite: what the errors of a tensor are made of.

    The largest |relative error|, the sum of its squares, the number of non-zero originals, and the sums of
    the squares of differences and originals. Added from first to last: every machine gets the same sums.
    They go on from those of the numbers `before`.
    """
    return cpu.error_sums(original, restored, before)  # type: ignore[no-any-return]


def scale(bits: Bits, factors: npt.NDArray[np.float64], fmt: FloatFormat, divide: bool = False) -> Bits:
    """Patterns times (or divided by) `factors`, in fp32 (fp64 for F64), rounded to nearest even."""
    if fmt.name == "F64":
        values = bits.view(np.float64)
        with np.errstate(all="ignore"):
            return (values / factors if divide else values * factors).view(np.uint64)
    if fmt.name not in ("BF16", "F16", "F32"):
        raise ValueError(f"{fmt.name} is too coarse to be scaled")
    wide = (bits.astype(np.uint32) << 16).view(np.float32) if fmt.name == "BF16" else None
    values32 = bits.view(_NATIVE[fmt.name]).astype(np.float32) if wide is None else wide
    f = factors.astype(np.float32)
    with np.errstate(all="ignore"):  # what hostile files hold, and underflow
        result = values32 / f if divide else values32 * f
        if fmt.name == "F16":
            return result.astype(np.float16).view(np.uint16)
    pattern: Bits = result.view(np.uint32)
    if fmt.name == "F32":
        return pattern
    return np.asarray((pattern + np.uint32(0x7FFF) + (pattern >> 16 & 1)) >> 16, np.uint16)


def _fp8_values(fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """The numbers of all 256 patterns of an fp8 format."""
    p = np.arange(256)
    exponent = p >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1
    mantissa = (p & (1 << fmt.mantissa_bits) - 1) / 2**fmt.mantissa_bits
    bias = 2 ** (fmt.exponent_bits - 1) - (0 if fmt.name.endswith("FNUZ") else 1)
    values: npt.NDArray[np.float64] = np.where(
        exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias)
    ) * np.where(p >> 7, -1.0, 1.0)
    if fmt.name.endswith("FNUZ"):
        values[0x80] = np.nan
    elif fmt.name == "F8_E4M3":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
        values[0xFC] = -np.inf
    return values


def largest_value(fmt: FloatFormat) -> float:
    """The largest finite number of a format."""
    return float(to_float64(np.array([largest_finite(fmt)], fmt.dtype), fmt)[0])


def normal_fp32(number: float) -> float | None:
    """A number rounded to fp32; None unless that is a positive, normal number.

    >>> normal_fp32(0.1), normal_fp32(1e-39), normal_fp32(float("nan"))
    (0.10000000149011612, None, None)
    """
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    limits = np.finfo(np.float32)
    return rounded if limits.tiny <= rounded <= limits.max else None
