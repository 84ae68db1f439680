"""Activations to codes in the registers of a program: the arithmetic of `quantizers`, to the last bit.

Activations come in runs of four, as words of 32 bits: two words of two bf16 or fp16, or four of fp32; an
array has a word of each thread. What two of 16 bits in a word can have done to them at once is: magnitudes
are compared, INT4 is clipped, FP4 of bf16 is rounded. Other steps are fp32.

    largest magnitude  of each thread, then of all in one exchange
    mean (INT4)        magnitudes become fp64 by moving their bits, which makes them a power of two smaller,
                       denormals too. Added to 2**52 of the unit towards zero they are cut off to the unit.
                       Sums are exchanged with the largest, as if that were one for which most units are right
    codes              rounded by adding 1.5 * 2**23, whose last place is worth 1: its lowest byte is the code
    FP4 of bf16        12 |x| / peak is in the middle of two codes or 1 / 1785 of itself away from it, as both
                       have 8 bits. The 11 of fp16 tell that apart, and fp32 errs by less

Products and sums must not be fused where that is not written: launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from functools import cache

import triton
import triton.language as tl

from neuzip.kernels.quantizers.activations import SMALLEST, SQRT_7
from neuzip.kernels.quantizers.magnitudes import SPAN, USUAL
from neuzip.kernels.triton_floats import widened
from neuzip.kernels.triton_sums import of_program, of_program_in, room

KINDS = {"int8": 0, "int4": 1, "fp4": 2, "top_k_int8": 3}
"""How the kernels call the activations."""

INT8, INT4, FP4, TOP_K = (tl.constexpr(n) for n in range(4))
INFINITY, _SPAN = tl.constexpr(0x7F800000), tl.constexpr(SPAN)
_USUAL = tl.constexpr(USUAL + 126)  # as fp32 has the exponents of what is below
_SQRT_7, _SMALLEST, _ROUNDER = tl.constexpr(SQRT_7), tl.constexpr(SMALLEST), tl.constexpr(1.5 * 2.0**23)
_MOST_INT4, _LEAST_INT4 = tl.constexpr(7 / SQRT_7), tl.constexpr(-8 / SQRT_7)
_LOW, _LOW_MASK = tl.constexpr(22), tl.constexpr((1 << 22) - 1)
"""Of a sum of magnitudes the lower bits, and those above, are added each by themselves."""

_LOW_BITS, _HIGH_BITS = tl.constexpr((1023 + 52) << 52), tl.constexpr((1023 + 52 + _LOW.value) << 52)
_LOW_AND_HIGH = tl.constexpr(2.0**52 + 2.0 ** (52 + _LOW.value))
"""2**52 and 2**74 as fp64, which have 32 bits of an integer as their lowest; and the sum of both."""


@cache
def inverse_of(count: int) -> tuple[int, int]:
    """The bits of two fp64 whose sum is 1 / count: a multiply-add with them divides sums of magnitudes.

    Right to the last bit: a numerator has 53 bits and count 17, so no quotient is nearly between two fp64.
    """
    nearest = 1 / count
    rest = float(Fraction(1, count) - Fraction(nearest)) or -0.0  # whose bits are no int32
    return _bits(nearest), _bits(rest)


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


@triton.constexpr_function
def words_of_run(dtype):
    """Words of four activations."""
    return 4 if dtype == tl.float32 else 2


@triton.jit
def four(tile):
    """The columns of [T, 4]."""
    T: tl.constexpr = tile.shape[0]
    even, odd = tl.split(tl.reshape(tile, [T, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_words(x, at, words, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """COUNT words, 2 or 4, from `at` [T] on; 0 from `words` on, unless EVEN."""
    where = at[:, None] + tl.arange(0, COUNT)[None, :]
    pointer = x.to(tl.pointer_type(tl.int32), bitcast=True) + where
    if EVEN:
        loaded = tl.load(pointer)
    else:
        loaded = tl.load(pointer, mask=where < words, other=0)
    if COUNT == 4:
        result = four(loaded)
    else:
        result = tl.split(loaded)
    return result


@triton.jit
def _floats(run, DTYPE: tl.constexpr):
    """The four as fp32."""
    if tl.float32 == DTYPE:
        result = (
            run[0].to(tl.float32, bitcast=True), run[1].to(tl.float32, bitcast=True),
            run[2].to(tl.float32, bitcast=True), run[3].to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:
        result = (
            _half(run[0], DTYPE), _half(run[0] >> 16, DTYPE), _half(run[1], DTYPE), _half(run[1] >> 16, DTYPE)
        )  # fmt: skip
    return result


@triton.jit
def _half(word, DTYPE: tl.constexpr):
    """What the lower 16 bits are, as fp32."""
    return widened(word.to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def _largest(runs, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The largest magnitude of each thread, as bits of its dtype; infinities and NaNs are the largest."""
    peak = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(runs)):
        for w in tl.static_range(len(runs[i])):
            if tl.float32 == DTYPE:
                peak = tl.maximum(peak, runs[i][w] & 0x7FFFFFFF)
            elif ASM:
                peak = tl.inline_asm_elementwise(
                    _comparing(tl.bfloat16 == DTYPE), "=r,r,r", [runs[i][w], peak],
                    dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
            else:
                lower = tl.maximum(peak & 0x7FFF, runs[i][w] & 0x7FFF)
                peak = tl.maximum(peak & 0x7FFF0000, runs[i][w] & 0x7FFF0000) | lower
    if tl.float32 != DTYPE:
        peak = tl.maximum(peak & 0x7FFF, peak >> 16)
    return peak


@triton.jit
def _as_fp32(bits, DTYPE: tl.constexpr):
    """The bits of fp32 of what has these bits in another dtype."""
    if tl.float32 == DTYPE:
        result = bits
    else:
        result = _half(bits, DTYPE).to(tl.int32, bitcast=True)
    return result


@triton.constexpr_function
def _comparing(bf16):
    kind = "bf16x2" if bf16 else "f16x2"
    return f"{{ .reg .b32 size; and.b32 size, $1, 0x7FFF7FFF; max.NaN.{kind} $0, size, $2; }}"


@triton.jit
def _largest_and_mean(
    runs, inverse, rest, DTYPE: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):
    """The largest magnitude of a token, as the bits of fp32, and the mean as `magnitudes.mean` has it.

    inverse and rest: see `inverse_of`. Compiled, magnitudes are added as for most tokens, while the largest
    is looked for; where that is wrong they are added once more.
    """
    own = _largest(runs, DTYPE, ASM)
    if ASM:
        where = room(3, 2, W, ASM)
        above, right, again = tl.full([], 0, tl.int32), tl.full([], _USUAL, tl.int32), True
        peak, low, high = above, above, above
        while again:  # once or twice; the code of a branch would be in the way of those that do not take it
            above = right
            own_sums = _sums(runs, own * 0 + above, DTYPE, BITS, ASM)
            second = (above != _USUAL).to(tl.int32)
            peak, low, high = of_program_in(where, second, (own, own_sums[0], own_sums[1]), 1, W, ASM)
            peak = _as_fp32(peak, DTYPE)
            right = _exponent_above(peak, DTYPE)
            # Whether that is the usual one, in fewer steps.
            again = (above == _USUAL) & (tl.abs(2 * (peak >> 23) - (2 * _USUAL - _SPAN + 1)) >= _SPAN)
    else:
        (peak,) = of_program((own,), 1, W, ASM)
        peak = _as_fp32(peak, DTYPE)
        above = _exponent_above(peak, DTYPE)
        low, high = _sums(runs, above, DTYPE, BITS, ASM)
        low, high = of_program((low, high), 0, W, ASM)
    low = (low.to(tl.uint32, bitcast=True).to(tl.int64) | _LOW_BITS).to(tl.float64, bitcast=True)
    high = (high.to(tl.uint32, bitcast=True).to(tl.int64) | _HIGH_BITS).to(tl.float64, bitcast=True)
    total = (high - _LOW_AND_HIGH) + low
    unit = _power_of_two(above - BITS)
    left = unit * rest.to(tl.float64, bitcast=True)
    nearest = unit * inverse.to(tl.float64, bitcast=True)
    # The interpreter rounds the product too; for all sums that there are its fp32 is the same.
    return peak, tl.math.fma(total, nearest, total * left).to(tl.float32)


@triton.jit
def _exponent_above(peak, DTYPE: tl.constexpr):
    """Of the power of two that `magnitudes.unit` takes for a peak, with these bits: its exponent, and 126."""
    # None is smaller than that of the smallest normal number: there all denormals are multiples of the unit.
    SMALLEST: tl.constexpr = 113 if tl.float16 == DTYPE else 1
    FROM: tl.constexpr = _USUAL + 20 * _SPAN  # above all exponents
    return FROM - ((FROM - tl.maximum(peak >> 23, SMALLEST)) & -_SPAN)


@triton.jit
def _power_of_two(exponent):
    """fp64, for an exponent and 126."""
    return ((exponent + (1023 - 126)).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _sums(runs, above, DTYPE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The magnitudes of each thread, cut off BITS below the exponent `above`, added: lower and upper bits."""
    if ASM:
        # What moving bits divides by is 2**896, the difference of the biases; for fp16 2**1008.
        AWAY: tl.constexpr = 1008 if tl.float16 == DTYPE else 896
        start = (above + (1023 - 126 - BITS + 52 - AWAY)).to(tl.int64) << 52
        begin = start.to(tl.float64, bitcast=True)
        shifts = _shifts(above, DTYPE)
        pair = begin, begin
        pairs = pair, pair, pair, pair  # as an addition takes long
        for i in tl.static_range(len(runs)):
            for w in tl.static_range(len(runs[i])):
                added = _add_magnitudes(pairs[0][0], pairs[0][1], runs[i][w], shifts, DTYPE)
                pairs = (pairs[1], pairs[2], pairs[3], added)
        sums = -8 * start
        for i in tl.static_range(4):
            sums += pairs[i][0].to(tl.int64, bitcast=True) + pairs[i][1].to(tl.int64, bitcast=True)
    else:
        unit = _power_of_two(above - BITS)
        sums = tl.zeros(runs[0][0].shape, tl.int64)
        for i in tl.static_range(len(runs)):
            x = _floats(runs[i], DTYPE)
            for w in tl.static_range(4):
                # Of what is not finite there is no mean.
                finite = tl.where(tl.abs(x[w]) < float("inf"), tl.abs(x[w]), 0.0)
                sums += (finite.to(tl.float64) / unit).to(tl.int64)
    return (sums & _LOW_MASK).to(tl.int32), (sums >> _LOW).to(tl.int32)


@triton.jit
def _add_magnitudes(first, second, word, shifts, DTYPE: tl.constexpr):
    """Add the magnitudes of a word to two sums that cut them off."""
    if tl.float32 == DTYPE:
        second, first = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; .reg .f64 wide; mul.lo.u32 low, $2, $5; shr.u32 high, $2, $6;"
            " and.b32 high, high, 0x0FFFFFFF; mov.b64 wide, {low, high}; add.rz.f64 $0, $3, wide;"
            " mov.f64 $1, $4; }",
            "=&d,=&d,r,d,d,r,r", [word, first, second, shifts[0], shifts[1]],
            dtype=(tl.float64, tl.float64), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            _adding(tl.bfloat16 == DTYPE), "=&d,=&d,r,d,d,r,r", [word, first, second, shifts[0], shifts[1]],
            dtype=(tl.float64, tl.float64), is_pure=True, pack=1,
        )  # fmt: skip
    return first, second


@triton.constexpr_function
def _adding(bf16):
    kept = "0x0FFFE000" if bf16 else "0x01FFFC00"
    lines = ["{ .reg .b32 low, high; .reg .f64 wide; mov.b32 low, 0;"]
    for i, moved in enumerate(("mul.lo.u32 high, $2, $5;", "shr.u32 high, $2, $6;")):
        lines += [f"{moved} and.b32 high, high, {kept}; mov.b64 wide, {{low, high}};"]
        lines += [f"add.rz.f64 ${i}, ${3 + i}, wide;"]
    return " ".join([*lines, "}"])


@triton.jit
def _shifts(above, DTYPE: tl.constexpr):
    """What words are multiplied with and shifted by, to be moved.

    They are registers that depend on what a loop changes: or all that is moved would be kept in registers.
    """
    return tl.inline_asm_elementwise(
        _shifting(DTYPE), "=r,=r,r", [above], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.constexpr_function
def _shifting(dtype):
    left, right = {tl.float32: (29, 3), tl.bfloat16: (13, 3), tl.float16: (10, 6)}[dtype]
    return (
        f"{{ .reg .b32 nothing; shr.u32 nothing, $2, 31; add.u32 $0, nothing, {1 << left};"
        f" add.u32 $1, nothing, {right}; }}"
    )


@triton.jit
def _numbers(
    runs, inverse, rest, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    BITS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What a token's codes are made with, and its scale, NaN where an activation is not finite: [T] each.

    The former are the factor (for FP4 what divides), the largest and smallest activation that INT4 tells
    apart, as a pair of 16 bits each, and a mask of codes, 0 where the scale is NaN.
    """
    each = tl.zeros(runs[0][0].shape, tl.int32)
    if KIND == INT4:
        peak, mean = _largest_and_mean(runs, inverse, rest, DTYPE, BITS, W, ASM)
        mean += each.to(tl.float32)
    else:
        (peak,) = of_program((_largest(runs, DTYPE, ASM),), 1, W, ASM)
        peak = _as_fp32(peak, DTYPE)
    peak += each
    size = peak.to(tl.float32, bitcast=True)
    most_x, least_x = peak, peak
    if KIND == FP4:
        seen = size >= _SMALLEST
        scale = tl.where(seen, tl.math.div_rn(size, tl.full(size.shape, 12.0, tl.float32)), 0.0)
        if ASM and tl.bfloat16 == DTYPE:
            factor = tl.math.div_rn(tl.full(size.shape, 12.0, tl.float32), tl.where(seen, size, 1.0))
            factor = tl.where(seen, factor, 0.0)
        else:
            factor = tl.where(seen, size * 0.0625, 1.0)
    else:
        most = tl.full(size.shape, 127.0, tl.float32)
        if KIND == INT4:
            size = mean
            most = tl.full(size.shape, _SQRT_7, tl.float32)
        factor, scale, divisor = factor_and_scale(size, most, epsilon, CLAMPED)
        if KIND == INT4 and ASM and tl.float32 != DTYPE:
            most_x = _pair(divisor * _MOST_INT4, DTYPE)
            least_x = _pair(divisor * _LEAST_INT4, DTYPE)
    finite = peak < INFINITY
    return (factor, most_x, least_x, tl.where(finite, -1, 0)), tl.where(finite, scale, float("nan"))


@triton.jit
def factor_and_scale(size, most, epsilon, CLAMPED: tl.constexpr):
    """What multiplies activations and codes, and what `most` was divided by, for the size of a token."""
    if CLAMPED:
        size = tl.maximum(size, epsilon)
        divisor = size
    else:
        divisor = size + epsilon
    return tl.math.div_rn(most, divisor), tl.math.div_rn(size, most), divisor


@triton.jit
def _pair(value, DTYPE: tl.constexpr):
    """Twice a number, rounded to 16 bits, in a word."""
    return tl.inline_asm_elementwise(
        _pairing(tl.bfloat16 == DTYPE), "=r,f", [value], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.constexpr_function
def _pairing(bf16):
    return f"cvt.rn.{'bf16x2' if bf16 else 'f16x2'}.f32 $0, $1, $1;"


@triton.jit
def _codes_of(run, by, DTYPE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """The codes of a run, a byte each in a word, made with what `_numbers` gives."""
    factor, most_x, least_x, mask = by
    if ASM and tl.float32 != DTYPE and (KIND != FP4 or tl.bfloat16 == DTYPE):
        word = tl.inline_asm_elementwise(
            _coding(KIND == INT4, KIND == FP4, tl.bfloat16 == DTYPE), "=r,r,r,f,r,r",
            [run[0], run[1], factor, most_x, least_x], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = _floats(run, DTYPE)
        NARROW: tl.constexpr = ASM and tl.float32 != DTYPE
        word = _lowest_bytes(
            rounded_codes(x[0], factor, KIND, NARROW), rounded_codes(x[1], factor, KIND, NARROW),
            rounded_codes(x[2], factor, KIND, NARROW), rounded_codes(x[3], factor, KIND, NARROW), ASM,
        )  # fmt: skip
    return word & mask


@triton.jit
def quantised(
    runs, inverse, rest, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    BITS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Of a token, two runs of a thread a turn: codes, two words a turn; scale; a thread's sum of codes."""
    by, scale = _numbers(runs, inverse, rest, epsilon, DTYPE, KIND, CLAMPED, BITS, W, ASM)
    pairs = ()
    summed = tl.zeros([32 * W], tl.int32)
    for i in tl.static_range(0, len(runs), 2):
        first, second = _codes_of(runs[i], by, DTYPE, KIND, ASM), _codes_of(runs[i + 1], by, DTYPE, KIND, ASM)
        summed = _sum_of_bytes(second, _sum_of_bytes(first, summed, ASM), ASM)
        pairs += ((first, second),)
    return pairs, scale, summed


@triton.constexpr_function
def _coding(int4, fp4, bf16):
    """Two words of two numbers of 16 bits to a word of four codes, by the factor of their token."""
    lines = ["{ .reg .b32 a, b; .reg .f32 x0, x1, x2, x3;"]
    words = "$1", "$2"
    if int4:
        kind = "bf16x2" if bf16 else "f16x2"
        lines += [f"min.{kind} a, $1, $4; max.{kind} a, a, $5; min.{kind} b, $2, $4; max.{kind} b, b, $5;"]
        words = "a", "b"
    if bf16:
        for i, word in enumerate(words):
            lines += [f"{{ .reg .b32 t; shl.b32 t, {word}, 16; mov.b32 x{2 * i}, t;"]
            lines += [f"and.b32 t, {word}, 0xFFFF0000; mov.b32 x{2 * i + 1}, t; }}"]
    else:
        for i, word in enumerate(words):
            lines += [f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.f32.f16 x{2 * i}, l;"]
            lines += [f"cvt.f32.f16 x{2 * i + 1}, h; }}"]
    lines += [f"mul.rn.f32 x{i}, x{i}, $3;" for i in range(4)]
    if fp4:
        # Steps are 1 below 4, then 2, and 4 from 8 on; 12 is the most. With p the power of two below, at
        # least 2, adding 768 p rounds to p / 2; what is left is 1536, 0x6600, plus the code.
        lines += ["cvt.rn.f16x2.f32 a, x1, x0; cvt.rn.f16x2.f32 b, x3, x2; .reg .b32 p, up, down, two, most;"]
        lines += ["mov.b32 two, 0x40004000; mov.b32 up, 0x62006200; mov.b32 down, 0xE200E200;"]
        lines += ["mov.b32 most, 0x66006600;"]
        for word in ("a", "b"):
            lines += [
                f"and.b32 p, {word}, 0x7C007C00; max.f16x2 p, p, two; fma.rn.f16x2 {word}, p, up, {word};"
            ]
            lines += [f"fma.rn.f16x2 p, p, down, most; add.rn.f16x2 {word}, {word}, p;"]
        return " ".join([*lines, "prmt.b32 $0, a, b, 0x6420; }"])
    lines += [f"add.rn.f32 x{i}, x{i}, 0f4B400000;" for i in range(4)]
    lines += [".reg .b32 y0, y1, y2, y3;", *(f"mov.b32 y{i}, x{i};" for i in range(4))]
    lines += ["prmt.b32 a, y0, y1, 0x0040; prmt.b32 b, y2, y3, 0x0040; prmt.b32 $0, a, b, 0x5410; }"]
    return " ".join(lines)


@triton.jit
def rounded_codes(x, factor, KIND: tl.constexpr, NARROW: tl.constexpr):
    """int32 whose lowest byte is the code of x, fp32. NARROW: x was of 16 bits, and this is compiled.

    FP4 rounds a quotient. That of NARROW numbers is either on the middle between two codes, and then the
    product with the reciprocal and one correction give it exactly, or further from it than they err.
    """
    if KIND == FP4:
        if NARROW:
            lift = tl.where(factor < 2.0**-70, 2.0**100, 1.0).to(tl.float32)  # no remainder is lost
            divisor = factor * lift
            reciprocal = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
            dividend = x * (0.75 * lift)
            y = dividend * reciprocal
            y = tl.math.fma(tl.math.fma(-y, divisor, dividend), reciprocal, y)
        else:
            y = tl.math.div_rn(x * 0.75, factor)
        # Steps are 1 below 4, then 2, and 4 from 8 on; 12 is the most. Tokens not seen are all below 1/2.
        power = tl.maximum((y.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True), 2.0)
        y = tl.math.fma(power, -_ROUNDER / 2, tl.math.fma(power, _ROUNDER / 2, y))
    else:
        y = x * factor
        if KIND == INT4:
            y = tl.clamp(y, -8.0, 7.0)
    return (y + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _lowest_bytes(b0, b1, b2, b3, ASM: tl.constexpr):
    """The lowest bytes of four int32 in one."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = (b0 & 0xFF) | (b1 & 0xFF) << 8 | (b2 & 0xFF) << 16 | (b3 & 0xFF) << 24
    return word


@triton.jit
def signed_byte(word, B: tl.constexpr):
    """One of four signed bytes."""
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def _sum_of_bytes(word, so_far, ASM: tl.constexpr):
    """The sum of 4 signed bytes, added to another."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, word * 0 + 0x01010101, so_far],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = so_far
        for i in tl.static_range(4):
            result += signed_byte(word, i)
    return result
