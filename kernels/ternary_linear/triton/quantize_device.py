"""Quantisation of a token that a program holds in registers: the codes, scale and sum of `quantizers`, bit
for bit.

The steps are the size of the token (`token_size`: its largest magnitude, or for INT4 its mean), the scale,
the factor, and then four codes at a time in inline PTX:

    INT8         code = round(x * factor). Adding 1.5 * 2**23, whose last place is worth 1, rounds to an
                 integer in the lowest byte of the sum
    INT4         place = saturate(x * factor + 8/15) is where x lies between -8 and 7, from 0 to 1: a
                 multiply-add that saturates clips at no cost. A second one gives round(15 * place - 8)
    FP4 of bf16  12 |x| / peak lies in the middle between two codes, or at least 1/1785 of itself away, as
                 both numbers have 8 significant bits. fp16 has 11, so it tells them apart, although the
                 factor is off by up to 2**-14. Half of the code is rounded in fp16, whose steps fit the grid
                 of E2M1
    FP4 else     a quotient in fp32, with as many corrections as exact rounding needs

Triton's interpreter takes the plain arithmetic beside each piece of PTX. Products and sums must not be fused
where that is not written out: launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from neuzip.kernels.device.reduce import of_program
from neuzip.kernels.quantizers.activations import SMALLEST, SQRT_7, ZERO_OF_INT4
from neuzip.kernels.ternary_linear.triton.registers import (
    floats_of_run,
    lowest_bytes,
    sum_of_bytes,
    widening,
    words_of_run,
)
from neuzip.kernels.ternary_linear.triton.token_size import fp32_bits, largest_magnitude, mean_magnitude

KINDS = {"int8": 0, "int4": 1, "fp4": 2, "top_k_int8": 3}
"""Constants KIND of the kernels for activations."""

INT8, INT4, FP4, TOP_K = (tl.constexpr(n) for n in range(4))
INFINITY = tl.constexpr(0x7F800000)
_SMALLEST, _ROUNDER = tl.constexpr(SMALLEST), tl.constexpr(1.5 * 2.0**23)
_SMALLEST_BITS, _HUGE_BITS = (
    tl.constexpr(struct.unpack("i", struct.pack("f", size))[0]) for size in (SMALLEST, 2.0**100)
)
_FACTOR_INT4, _ZERO_INT4 = tl.constexpr(SQRT_7 / 15), tl.constexpr(ZERO_OF_INT4)
_PER_SQRT_7 = tl.constexpr(1 / struct.unpack("f", struct.pack("f", SQRT_7))[0])


def _ptx(number: float) -> str:
    """A number as PTX has constants of fp32."""
    return "0f" + struct.pack(">f", number).hex()


_OFFSET, _FIFTEEN = _ptx(ZERO_OF_INT4), _ptx(15)
_ROUND, _ROUND_FROM_8 = _ptx(_ROUNDER.value), _ptx(_ROUNDER.value - 8)


@triton.jit
def quantize_runs(
    runs, inverse, unit_exponent, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr, IN_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Quantise a token of which each thread has an even number of runs.

    epsilon     at least 2**-120
    IN_PRODUCT  codes may be anything where the scale is NaN, as they are multiplied with it

    Returns the codes, two words for every two runs; the scale [T]; each thread's sum of codes, int32 [T]; and
    the token's peak, as bits of its dtype.
    """
    factor, mask, scale, peak = _factor_and_scale(
        runs, inverse, unit_exponent, epsilon, DTYPE, KIND, CLAMPED, NUM_WARPS, COMPILED
    )
    pairs = ()
    code_sum = tl.zeros([32 * NUM_WARPS], tl.int32)
    for i in tl.static_range(0, len(runs), 2):
        first = _codes_of_run(runs[i], factor, mask, DTYPE, KIND, COMPILED, not IN_PRODUCT)
        second = _codes_of_run(runs[i + 1], factor, mask, DTYPE, KIND, COMPILED, not IN_PRODUCT)
        code_sum = sum_of_bytes(second, sum_of_bytes(first, code_sum, COMPILED), COMPILED)
        pairs += ((first, second),)
    return pairs, scale, code_sum, peak


@triton.jit
def _factor_and_scale(
    runs, inverse, unit_exponent, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """What codes of a token are made with: a factor, a mask that is 0 where the scale is NaN, scale and peak.

    The scale is NaN where the token is not finite. For FP4 of other numbers than bf16 the factor is a
    divisor. All are [T], but the peak, a scalar: bits of its dtype, and 0 for INT4.
    """
    T: tl.constexpr = runs[0][0].shape[0]
    peak = tl.full([], 0, tl.int32)
    if KIND == INT4:
        size, finite = mean_magnitude(runs, inverse, unit_exponent, DTYPE, NUM_WARPS, COMPILED)
        size, divisor = _divisor(tl.broadcast_to(size, [T]), epsilon, CLAMPED)
        factor = _over(_FACTOR_INT4, divisor, COMPILED)
        scale = _divided_by_sqrt_7(size)
    else:
        (peak,) = of_program((largest_magnitude(runs, DTYPE, COMPILED),), 1, NUM_WARPS, COMPILED)
        bits = fp32_bits(peak, DTYPE)
        size = tl.broadcast_to(bits.to(tl.float32, bitcast=True), [T])
        finite = bits < INFINITY
        MOST: tl.constexpr = 12 if KIND == FP4 else 127
        if KIND == FP4:
            # A token below the smallest peak has codes of 0: with any factor near 1 its products are below
            # 1/4.
            factor = tl.where(size >= _SMALLEST, size * 0.0625, 1.0)
            if COMPILED and tl.bfloat16 == DTYPE:
                factor = 0.375 * _reciprocal(factor)
        else:
            size, divisor = _divisor(size, epsilon, CLAMPED)
            factor = _over(127.0, divisor, COMPILED)
        if (bits >= _SMALLEST_BITS) & (bits < _HUGE_BITS):  # where `_divided` is exact
            scale = _divided(size, MOST, COMPILED)
        else:
            scale = tl.math.div_rn(size, tl.full(size.shape, MOST, tl.float32))
            if KIND == FP4:
                scale = tl.where(size < _SMALLEST, 0.0, scale)
    return factor, tl.where(finite, -1, 0), tl.where(finite, scale, float("nan")), peak


@triton.jit
def _divisor(size, epsilon, CLAMPED: tl.constexpr):
    """The size of a token that its scale is made of, and what its factor divides by."""
    if CLAMPED:
        size = tl.maximum(size, epsilon)
        divisor = size
    else:
        divisor = size + epsilon
    return size, divisor


@triton.jit
def _over(DIVIDEND: tl.constexpr, divisor, COMPILED: tl.constexpr):
    """127, or `_FACTOR_INT4`, divided by a size of at least 2**-120; anything if that is infinite or NaN.

    One correction of the reciprocal and one of the quotient round as a division does: tried with all
    divisors, and with reciprocals up to 3 units of the last place away. A general division would have a
    branch for numbers that this is wrong for.
    """
    if COMPILED:
        # A sixteenth of the divisor, as no such number has a denormal reciprocal.
        divisor *= 0.0625
        reciprocal = _reciprocal(divisor)
        reciprocal = tl.math.fma(reciprocal, tl.math.fma(-divisor, reciprocal, 1.0), reciprocal)
        quotient = reciprocal * (DIVIDEND * 0.0625)
        result = tl.math.fma(reciprocal, tl.math.fma(-divisor, quotient, DIVIDEND * 0.0625), quotient)
    else:
        result = tl.math.div_rn(tl.full(divisor.shape, DIVIDEND, tl.float32), divisor)
    return result


@triton.jit
def _divided(size, BY: tl.constexpr, COMPILED: tl.constexpr):
    """A finite size of at least `SMALLEST` divided by 12 or 127.

    The product with the reciprocal and one correction round as a division does: tried with all floats.
    """
    if COMPILED:
        quotient = size * (1.0 / BY)
        result = tl.math.fma(tl.math.fma(quotient, -1.0 * BY, size), 1.0 / BY, quotient)
    else:
        result = tl.math.div_rn(size, tl.full(size.shape, BY, tl.float32))
    return result


@triton.jit
def _divided_by_sqrt_7(size):
    """A size divided by the square root of 7 as fp32, denormal or not: tried with all floats."""
    return (size.to(tl.float64) * _PER_SQRT_7).to(tl.float32)


@triton.jit
def _reciprocal(number):
    """The reciprocal of a normal number below 2**126, to a unit of the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [number], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _codes_of_run(
    run, factor, mask, DTYPE: tl.constexpr, KIND: tl.constexpr, COMPILED: tl.constexpr, MASKED: tl.constexpr
):
    """The codes of a run, a byte each in a word, made with what `_factor_and_scale` gives."""
    if COMPILED and (KIND != FP4 or tl.bfloat16 == DTYPE):
        word = tl.inline_asm_elementwise(
            _coding(KIND, DTYPE), "=r," + "r," * len(run) + "f", run + (factor,),  # noqa: RUF005
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = floats_of_run(run, DTYPE)
        SHORT: tl.constexpr = COMPILED and tl.float32 != DTYPE
        word = lowest_bytes(
            rounded_codes(x[0], factor, KIND, SHORT), rounded_codes(x[1], factor, KIND, SHORT),
            rounded_codes(x[2], factor, KIND, SHORT), rounded_codes(x[3], factor, KIND, SHORT), COMPILED,
        )  # fmt: skip
    if MASKED:
        word &= mask
    return word


@triton.constexpr_function
def _coding(kind, dtype):
    """PTX that makes four codes in a word of a run and the factor of its token."""
    factor = f"${words_of_run(dtype) + 1}"
    if kind == INT4:
        lines = [*widening(dtype), *(f"fma.rn.sat.f32 x{i}, x{i}, {factor}, {_OFFSET};" for i in range(4))]
    else:
        lines = [*widening(dtype), *(f"mul.rn.f32 x{i}, x{i}, {factor};" for i in range(4))]
    lines += [".reg .b32 a, b;"]
    if kind == FP4:
        # x0 to x3 are halves of codes, 6 at most: steps are 1/2 below 2, then 1, and 2 from 4 on. The mask
        # leaves 2 of numbers from 2 on, 4 of those from 4 on, and 2**-14 or 0 of others. Adding 768 times
        # that rounds to steps of 1 and 2, and changes no bit of the others that counts; then it is subtracted
        # again. Adding 768, which is 0x6200, rounds to steps of 1/2: the sum is 0x6200 plus the code.
        lines += ["cvt.rn.f16x2.f32 a, x1, x0; cvt.rn.f16x2.f32 b, x3, x2; .reg .b32 p, up, down;"]
        lines += ["mov.b32 up, 0x62006200; mov.b32 down, 0xE200E200;"]
        for word in ("a", "b"):
            lines += [f"and.b32 p, {word}, 0x44004400; fma.rn.f16x2 {word}, p, up, {word};"]
            lines += [f"fma.rn.f16x2 {word}, p, down, {word}; add.rn.f16x2 {word}, {word}, up;"]
        return " ".join([*lines, "prmt.b32 $0, a, b, 0x6420; }"])
    if kind == INT4:
        lines += [f"fma.rn.f32 x{i}, x{i}, {_FIFTEEN}, {_ROUND_FROM_8};" for i in range(4)]
    else:
        lines += [f"add.rn.f32 x{i}, x{i}, {_ROUND};" for i in range(4)]
    lines += [".reg .b32 y0, y1, y2, y3;", *(f"mov.b32 y{i}, x{i};" for i in range(4))]
    lines += ["prmt.b32 a, y0, y1, 0x0040; prmt.b32 b, y2, y3, 0x0040; prmt.b32 $0, a, b, 0x5410; }"]
    return " ".join(lines)


@triton.jit
def rounded_codes(x, factor, KIND: tl.constexpr, SHORT: tl.constexpr):
    """int32 whose lowest byte is the code of x, fp32. SHORT: x was bf16 or fp16, and this is compiled.

    FP4 rounds a quotient. That of SHORT numbers lies either exactly in the middle between two codes, where
    the product with the reciprocal and one correction give it exactly, or further away than their error.
    """
    if KIND == FP4:
        if SHORT:
            lift = tl.where(factor < 2.0**-70, 2.0**100, 1.0).to(tl.float32)  # no remainder is denormal
            divisor = factor * lift
            reciprocal = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
            dividend = x * (0.75 * lift)
            y = dividend * reciprocal
            y = tl.math.fma(tl.math.fma(-y, divisor, dividend), reciprocal, y)
        else:
            y = tl.math.div_rn(x * 0.75, factor)
        # Steps are 1 below 4, then 2, and 4 from 8 on; 12 is the most. Tokens below the smallest peak have
        # magnitudes below 1/2.
        power = tl.maximum((y.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True), 2.0)
        y = tl.math.fma(power, -_ROUNDER / 2, tl.math.fma(power, _ROUNDER / 2, y))
        y += _ROUNDER
    elif KIND == INT4:
        # In fp64, as the interpreter does not fuse: where that rounds twice, the code is 0 either way.
        place = x.to(tl.float64) * factor + _ZERO_INT4
        place = tl.clamp(place.to(tl.float32), 0.0, 1.0).to(tl.float64)
        y = (place * 15.0 + (_ROUNDER - 8.0)).to(tl.float32)
    else:
        y = x * factor + _ROUNDER
    return y.to(tl.int32, bitcast=True)
