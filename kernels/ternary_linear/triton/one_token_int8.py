"""Activations to codes in the registers of a program: the arithmetic of `quantizers`, to the last bit.

Activations come in runs of four, as words of 32 bits: two words of two bf16 or fp16, or four of fp32; an
array has a word of each thread. What two of 16 bits in a word can have done to them at once is: magnitudes
are compared, FP4 of bf16 is rounded. Other steps are fp32, and fp64 where INT4's mean is.

    largest magnitude  of each thread, then of all in one exchange
    mean (INT4)        a run's sum becomes fp64 by moving its bits, which makes it a power of two smaller,
                       denormals too. Added to 2**52 of the unit towards zero it is cut off to the unit
    codes              rounded by adding 1.5 * 2**23, whose last place is worth 1: the lowest byte is the code
    INT4               15ths of the way from -8 to 7: a multiply-add that saturates clips them for nothing
    FP4 of bf16        12 |x| / peak is in the middle of two codes or 1 / 1785 of itself away from it, as both
                       have 8 bits. The 11 of fp16 tell that apart, and allow the factor to be 2**-14 off

Products and sums must not be fused where that is not written: launch with enable_fp_fusion=False.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from neuzip.kernels.device.floats import widened
from neuzip.kernels.device.reduce import of_program, of_program_in, room
from neuzip.kernels.quantizers.activations import SMALLEST, SQRT_7, ZERO_OF_INT4
from neuzip.kernels.quantizers.magnitudes import LAST_UNIT, TOTAL_BITS, UNIT_STEP

KINDS = {"int8": 0, "int4": 1, "fp4": 2, "top_k_int8": 3}
"""How the kernels call the activations."""

INT8, INT4, FP4, TOP_K = (tl.constexpr(n) for n in range(4))
INFINITY = tl.constexpr(0x7F800000)
_SMALLEST, _ROUNDER = tl.constexpr(SMALLEST), tl.constexpr(1.5 * 2.0**23)
_SMALLEST_BITS, _HUGE_BITS = (
    tl.constexpr(struct.unpack("i", struct.pack("f", size))[0]) for size in (SMALLEST, 2.0**100)
)
_FACTOR_INT4, _ZERO_INT4 = tl.constexpr(SQRT_7 / 15), tl.constexpr(ZERO_OF_INT4)
_PER_SQRT_7 = tl.constexpr(1 / struct.unpack("f", struct.pack("f", SQRT_7))[0])
_KEPT_RUNS, _KEPT_SPARING = tl.constexpr(14), tl.constexpr(8)
"""Of a thread, that are widened once if they are added up as well; there are no registers for more, or
fewer programs would run beside each other."""

_LAST_UNIT, _UNIT_STEP = tl.constexpr(LAST_UNIT), tl.constexpr(UNIT_STEP)
_TOTAL_BITS, _TOO_LARGE = tl.constexpr(TOTAL_BITS), tl.constexpr(1 << TOTAL_BITS)
_LOW, _LOW_MASK = tl.constexpr(22), tl.constexpr((1 << 22) - 1)
"""Of a total the lower bits, and those above, are added each by themselves."""


def _ptx(number: float) -> str:
    """A number as PTX has constants of fp32."""
    return "0f" + struct.pack(">f", number).hex()


_ZERO, _OFFSET, _FIFTEEN = _ptx(0), _ptx(ZERO_OF_INT4), _ptx(15)
_ROUND, _ROUND_FROM_8 = _ptx(_ROUNDER.value), _ptx(_ROUNDER.value - 8)


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
def load_words(x, at, words, BEHIND: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """COUNT words, 2 or 4, from BEHIND behind `at` [T] on; 0 from `words` on, unless EVEN.

    Pointers to `at` are made first: what is behind them is then a constant of the load.
    """
    behind = BEHIND + tl.arange(0, COUNT)[None, :]
    pointer = (x.to(tl.pointer_type(tl.int32), bitcast=True) + at)[:, None] + behind
    if EVEN:
        loaded = tl.load(pointer)
    else:
        loaded = tl.load(pointer, mask=at[:, None] + behind < words, other=0)
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
                    _comparing(tl.bfloat16 == DTYPE, cuda_capability_geq(8, 6)), "=r,r,r", [runs[i][w], peak],
                    dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
            else:
                lower = tl.maximum(peak & 0x7FFF, runs[i][w] & 0x7FFF)
                peak = tl.maximum(peak & 0x7FFF0000, runs[i][w] & 0x7FFF0000) | lower
    if tl.float32 != DTYPE:
        peak = tl.maximum(peak & 0x7FFF, (peak >> 16) & 0x7FFF)
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
def _comparing(bf16, of_magnitudes):
    """The larger magnitudes, whatever the signs are then; compute capability 8.0 takes two instructions."""
    kind = "bf16x2" if bf16 else "f16x2"
    if of_magnitudes:
        return f"max.NaN.xorsign.abs.{kind} $0, $1, $2;"
    return f"{{ .reg .b32 size; and.b32 size, $1, 0x7FFF7FFF; max.NaN.{kind} $0, size, $2; }}"


@triton.jit
def _mean(
    runs, inverse, unit, DTYPE: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr, SPARING: tl.constexpr
):
    """The mean magnitude of a token as `magnitudes.mean_by_fours` has it, and whether there is one: scalars.

    inverse: 1 / count; unit: the exponent of the first that is tried, with which hardly a total is too large.
    SPARING: no register keeps what another round would need again; that costs an instruction a word.
    """
    where = room(2, 2, W, ASM)
    turn = tl.full([], 0, tl.int32)
    total = turn.to(tl.int64)
    again = True
    while again:
        sums = _sums(_changed(runs, (unit + 1024) >> 20) if SPARING else runs, unit, DTYPE, ASM)
        low, high = (sums & _LOW_MASK).to(tl.int32), (sums >> _LOW).to(tl.int32)
        over = (sums >> 32).to(tl.int32) >> (_TOTAL_BITS - 32)
        low, high = of_program_in(where, turn & 1, (low, high), 0, W, ASM, over)
        total = (_unsigned(high) << _LOW) + _unsigned(low)
        again = (total >= _TOO_LARGE) & (unit < _LAST_UNIT)
        unit += tl.where(again, _UNIT_STEP, 0)
        turn += 1
    size = ((unit + 127) << 23).to(tl.float32, bitcast=True)
    return total.to(tl.float32) * inverse * size, total < _TOO_LARGE


@triton.jit
def _changed(runs, bits):
    """Words with these bits turned: where they are 0, which the compiler does not know, the same words."""
    changed = ()
    for i in tl.static_range(len(runs)):
        run = ()
        for w in tl.static_range(len(runs[i])):
            run += (runs[i][w] ^ bits,)
        changed += (run,)
    return changed


@triton.jit
def _unsigned(number):
    """An unsigned number in the type int32, as int64."""
    return number.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _sums(runs, unit, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Of each thread the sums of its runs' magnitudes, cut off to 2**unit, added: int64."""
    if ASM:
        # What moving bits divides by is 2**896, the difference of the biases.
        start = (unit + (1023 + 52 - 896)).to(tl.int64) << 52
        begin = tl.zeros(runs[0][0].shape, tl.int64) + start
        first, second = begin.to(tl.float64, bitcast=True), begin.to(tl.float64, bitcast=True)
        for i in tl.static_range(len(runs)):  # by turns, as an addition takes long
            first, second = second, _add_run(first, runs[i], DTYPE)
        sums = first.to(tl.int64, bitcast=True) + second.to(tl.int64, bitcast=True) - 2 * start
    else:
        sums = tl.zeros(runs[0][0].shape, tl.int64)
        units = tl.math.exp2(-unit.to(tl.float64))
        for i in tl.static_range(len(runs)):
            a, b, c, d = _floats(runs[i], DTYPE)
            of_run = (tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))
            cut = tl.where(of_run < float("inf"), of_run.to(tl.float64) * units, 2.0**53)
            sums += tl.minimum(cut, 2.0**53).to(tl.int64)
    return sums


@triton.jit
def _add_run(so_far, run, DTYPE: tl.constexpr):
    """Add the sum of a run's magnitudes to what cuts it off."""
    return tl.inline_asm_elementwise(
        _adding(DTYPE), "=d," + "r," * len(run) + "d", run + (so_far,),  # noqa: RUF005
        dtype=tl.float64, is_pure=True, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _adding(dtype):
    lines = [*_widening(dtype), *(f"abs.f32 x{i}, x{i};" for i in range(4))]
    lines += ["add.rn.f32 x0, x0, x1; add.rn.f32 x2, x2, x3; add.rn.f32 x0, x0, x2;"]
    lines += [".reg .b32 bits; .reg .b64 moved; .reg .f64 wide; mov.b32 bits, x0;"]
    lines += ["mul.wide.u32 moved, bits, 0x20000000; mov.b64 wide, moved;"]
    return " ".join([*lines, f"add.rz.f64 $0, ${words_of_run(dtype) + 1}, wide; }}"])


@triton.constexpr_function
def _widening(dtype):
    """The lines that begin a block, in which x0 to x3 are the activations of a run, $1 and so on, as fp32."""
    lines = ["{ .reg .f32 x0, x1, x2, x3;"]
    if dtype == tl.float32:
        return [*lines, *(f"mov.b32 x{i}, ${i + 1};" for i in range(4))]
    for i, word in enumerate(("$1", "$2")):
        if dtype == tl.bfloat16:
            lines += [f"{{ .reg .b32 t; shl.b32 t, {word}, 16; mov.b32 x{2 * i}, t;"]
            lines += [f"and.b32 t, {word}, 0xFFFF0000; mov.b32 x{2 * i + 1}, t; }}"]
        else:
            lines += [f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.f32.f16 x{2 * i}, l;"]
            lines += [f"cvt.f32.f16 x{2 * i + 1}, h; }}"]
    return lines


@triton.jit
def _all_widened(runs, DTYPE: tl.constexpr):
    """Runs of fp32."""
    wide = ()
    for i in tl.static_range(len(runs)):
        wide += (
            tl.inline_asm_elementwise(
                _widened(DTYPE), "=r,=r,=r,=r,r,r", runs[i], dtype=(tl.int32,) * 4, is_pure=True, pack=1
            ),
        )  # fmt: skip
    return wide


@triton.constexpr_function
def _widened(dtype):
    lines = [line.replace("$2", "$5").replace("$1", "$4") for line in _widening(dtype)]
    return " ".join([*lines, *(f"mov.b32 ${i}, x{i};" for i in range(4)), "}"])


@triton.jit
def _numbers(
    runs, inverse, unit, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    W: tl.constexpr, ASM: tl.constexpr, BY_MATRIX: tl.constexpr, SPARING: tl.constexpr,
):  # fmt: skip
    """A token's runs, what their codes are made with, its scale, NaN where it is not finite, and its peak.

    Codes are made with a factor (for FP4 of other numbers than bf16 what divides; BY_MATRIX, its `_diagonal`)
    and a mask, 0 where the scale is NaN. All are [T], but the peak: bits of its dtype, and 0 for INT4.
    BY_MATRIX, runs of huge tokens and of those next to 0 come back smaller, with a larger factor.
    """
    T: tl.constexpr = runs[0][0].shape[0]
    peak = tl.full([], 0, tl.int32)
    if KIND == INT4:
        size, finite = _mean(runs, inverse, unit, DTYPE, W, ASM, SPARING)
        size, divisor = _divisor(tl.broadcast_to(size, [T]), epsilon, CLAMPED)
        factor = _over(_FACTOR_INT4, divisor, ASM)
        scale = _divided_by_sqrt_7(size)
    else:
        (peak,) = of_program((_largest(runs, DTYPE, ASM),), 1, W, ASM)
        bits = _as_fp32(peak, DTYPE)
        size = tl.broadcast_to(bits.to(tl.float32, bitcast=True), [T])
        finite = bits < INFINITY
        MOST: tl.constexpr = 12 if KIND == FP4 else 127
        if KIND == FP4:
            # With any factor near 1 the products of what is not seen are far below 1/4.
            factor = tl.where(size >= _SMALLEST, size * 0.0625, 1.0)
            if ASM and tl.bfloat16 == DTYPE:
                factor = 0.375 * _reciprocal(factor)
        else:
            size, divisor = _divisor(size, epsilon, CLAMPED)
            factor = _over(127.0, divisor, ASM)
        # Hardly any size takes the long way. As there is one a basic block ends here; otherwise the compiler
        # moves what asks for words, ahead of this, behind the wait for the token: up to 15 % slower.
        if (bits >= _SMALLEST_BITS) & (bits < _HUGE_BITS):
            scale = _divided(size, MOST, ASM)
        else:
            scale = tl.math.div_rn(size, tl.full(size.shape, MOST, tl.float32))
            if KIND == FP4:
                scale = tl.where(size < _SMALLEST, 0.0, scale)
            if BY_MATRIX:  # of huge tokens the factor's lower bits would be denormal; others do not mind
                runs, factor = _lowered(runs), factor * 2.0**64
        if BY_MATRIX:
            factor = _diagonal(factor)
    return runs, (factor, tl.where(finite, -1, 0)), tl.where(finite, scale, float("nan")), peak


@triton.jit
def _lowered(runs):
    """Runs of bf16 times 2**-64."""
    lowered = ()
    for i in tl.static_range(len(runs)):
        run = ()
        for w in tl.static_range(len(runs[i])):
            run += (
                tl.inline_asm_elementwise(
                    "{ .reg .b32 by, zero; mov.b32 by, 0x1F801F80; mov.b32 zero, 0x80008000;"
                    " fma.rn.bf16x2 $0, $1, by, zero; }",
                    "=r,r", [runs[i][w]], dtype=tl.int32, is_pure=True, pack=1,
                ),
            )  # fmt: skip
        lowered += (run,)
    return lowered


@triton.jit
def _diagonal(factor):
    """Two matrices of 8 x 8 bf16 with a factor's upper 8 bits, and the next 8, on the diagonal.

    Thread (r, q) has rows 2 q and 2 q + 1 of column r.
    """
    lane = tl.arange(0, factor.shape[0]) % 32
    r, q = lane // 4, lane % 4
    own = tl.where(r // 2 == q, factor, 0.0)
    upper = own.to(tl.int32, bitcast=True) & -0x10000
    lower = (own - upper.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) & -0x10000
    shift = 16 - r % 2 * 16
    return upper >> shift, lower >> shift


@triton.jit
def _divisor(size, epsilon, CLAMPED: tl.constexpr):
    """A token's size, and what divides by it."""
    if CLAMPED:
        size = tl.maximum(size, epsilon)
        divisor = size
    else:
        divisor = size + epsilon
    return size, divisor


@triton.jit
def _over(OVER: tl.constexpr, divisor, ASM: tl.constexpr):
    """127, or `_FACTOR_INT4`, divided by a size of at least 2**-120; anything if that is infinite or NaN.

    One correction of the reciprocal and one of the quotient round as a division does: tried with all
    divisors, and reciprocals up to 3 units of the last place away. A division would look besides for numbers
    that this is not right for, and all would wait for that.
    """
    if ASM:
        # Of sixteenths, so that none has a denormal reciprocal.
        divisor *= 0.0625
        reciprocal = _reciprocal(divisor)
        reciprocal = tl.math.fma(reciprocal, tl.math.fma(-divisor, reciprocal, 1.0), reciprocal)
        quotient = reciprocal * (OVER * 0.0625)
        result = tl.math.fma(reciprocal, tl.math.fma(-divisor, quotient, OVER * 0.0625), quotient)
    else:
        result = tl.math.div_rn(tl.full(divisor.shape, OVER, tl.float32), divisor)
    return result


@triton.jit
def _divided(size, BY: tl.constexpr, ASM: tl.constexpr):
    """A finite size of at least `SMALLEST` divided by 12 or 127.

    The product with the reciprocal and one correction round as a division does: tried with all floats.
    """
    if ASM:
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
    """Of normal numbers below 2**126, to a unit of the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [number], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _codes_of(
    run, by, DTYPE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, BY_MATRIX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The codes of a run, a byte each in a word, made with what `_numbers` gives."""
    factor, mask = by
    if BY_MATRIX:
        word = tl.inline_asm_elementwise(
            _coding(KIND, True, DTYPE), "=r,r,r,r,r", run + factor,
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM and (KIND != FP4 or tl.bfloat16 == DTYPE):
        word = tl.inline_asm_elementwise(
            _coding(KIND, False, DTYPE), "=r," + "r," * len(run) + "f",
            run + (factor,), dtype=tl.int32, is_pure=True, pack=1,  # noqa: RUF005
        )  # fmt: skip
    else:
        x = _floats(run, DTYPE)
        NARROW: tl.constexpr = ASM and tl.float32 != DTYPE
        word = _lowest_bytes(
            rounded_codes(x[0], factor, KIND, NARROW), rounded_codes(x[1], factor, KIND, NARROW),
            rounded_codes(x[2], factor, KIND, NARROW), rounded_codes(x[3], factor, KIND, NARROW), ASM,
        )  # fmt: skip
    if MASKED:
        word &= mask
    return word


@triton.jit
def quantised(
    runs, inverse, unit, epsilon, DTYPE: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    W: tl.constexpr, ASM: tl.constexpr, IN_PRODUCT: tl.constexpr, SPARING: tl.constexpr,
):  # fmt: skip
    """Of a token, two runs of a thread a turn: codes, two words a turn; scale; a thread's sum of codes; peak.

    IN_PRODUCT: codes are anything where the scale is NaN, as they are multiplied with it. SPARING: of
    registers, for programs beside each other. Epsilon is at least 2**-120.
    """
    ROOM: tl.constexpr = W <= 8 and len(runs) <= (_KEPT_SPARING if SPARING else _KEPT_RUNS)
    WIDENED_TWICE: tl.constexpr = KIND == INT4 and tl.float32 != DTYPE
    KEPT: tl.constexpr = ASM and WIDENED_TWICE and ROOM and (IN_PRODUCT or SPARING)
    OF: tl.constexpr = tl.float32 if KEPT else DTYPE
    if KEPT:
        runs = _all_widened(runs, DTYPE)
    # Fewer instructions, that take longer: a gain where other warps have something else to do meanwhile.
    BY_MATRIX: tl.constexpr = ASM and KIND == FP4 and tl.bfloat16 == DTYPE and IN_PRODUCT
    runs, by, scale, peak = _numbers(
        runs, inverse, unit, epsilon, OF, KIND, CLAMPED, W, ASM, BY_MATRIX, SPARING and not KEPT
    )
    pairs = ()
    summed = tl.zeros([32 * W], tl.int32)
    for i in tl.static_range(0, len(runs), 2):
        first = _codes_of(runs[i], by, OF, KIND, ASM, BY_MATRIX, not IN_PRODUCT)
        second = _codes_of(runs[i + 1], by, OF, KIND, ASM, BY_MATRIX, not IN_PRODUCT)
        summed = sum_of_bytes(second, sum_of_bytes(first, summed, ASM), ASM)
        pairs += ((first, second),)
    return pairs, scale, summed, peak


@triton.constexpr_function
def _coding(kind, by_matrix, dtype):
    """The words of a run to a word of four codes, by the factor of their token, or its `_diagonal`."""
    factor = f"${words_of_run(dtype) + 1}"
    if by_matrix:
        lines = ["{ .reg .f32 x0, x1, x2, x3;", _products_by_matrix()]
    elif kind == INT4:
        lines = [*_widening(dtype), *(f"fma.rn.sat.f32 x{i}, x{i}, {factor}, {_OFFSET};" for i in range(4))]
    else:
        lines = [*_widening(dtype), *(f"mul.rn.f32 x{i}, x{i}, {factor};" for i in range(4))]
    lines += [".reg .b32 a, b;"]
    if kind == FP4:
        # Halves of codes, 6 at the most: steps are 1/2 below 2, then 1, and 2 from 4 on. The mask leaves 2 of
        # those from 2 on, 4 of those from 4 on, of others 2**-14 or 0. Adding 768 times that rounds to steps
        # of 1 and 2, and takes no bit of the others that counts; what is added is taken off again. Adding
        # 768, 0x6200, rounds to steps of 1/2: 0x6200 plus the code.
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


@triton.constexpr_function
def _products_by_matrix():
    """The activations $1 and $2, bf16, times the 16 bits of a factor of which $3 and $4 are the `_diagonal`.

    Words are columns 2 q and 2 q + 1 of rows r and r + 8: thread (r, q) has those of the product as well.
    """
    instruction = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {x0, x1, x2, x3}, {$1, $2}"
    zeros = f"{{{_ZERO}, {_ZERO}, {_ZERO}, {_ZERO}}}"
    return f"{instruction}, {{$3}}, {zeros}; {instruction}, {{$4}}, {{x0, x1, x2, x3}};"


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
        y += _ROUNDER
    elif KIND == INT4:
        # In fp64, as the interpreter does not fuse: where that rounds twice, the code is 0 either way.
        place = x.to(tl.float64) * factor + _ZERO_INT4
        place = tl.clamp(place.to(tl.float32), 0.0, 1.0).to(tl.float64)
        y = (place * 15.0 + (_ROUNDER - 8.0)).to(tl.float32)
    else:
        y = x * factor + _ROUNDER
    return y.to(tl.int32, bitcast=True)


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
def lower_and_upper(lower, upper, ASM: tl.constexpr):
    """The lower halves of the bytes of one word, and the upper halves of those of another."""
    if ASM:
        result = tl.inline_asm_elementwise(  # otherwise it is two instructions, of a mask each
            "lop3.b32 $0, $1, 0x0F0F0F0F, $2, 0xE2;", "=r,r,r", [lower, upper],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = (lower & 0x0F0F0F0F) | (upper & -0x0F0F0F10)
    return result


@triton.jit
def signed_byte(word, B: tl.constexpr):
    """One of four signed bytes."""
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def sum_of_bytes(word, so_far, ASM: tl.constexpr):
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
