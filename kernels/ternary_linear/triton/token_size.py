"""The largest magnitude of a token, and its mean: over all threads of a program that holds it in registers.

    largest    each thread's by comparing words of two numbers at once, then one exchange between threads
    mean       in fixed point, as `quantizers.magnitudes.mean_by_fours` defines it, so that the order of
               additions does not matter. The sum of a run becomes fp64 by moving its bits, which divides it
               by 2**896, denormals too. Adding it, rounded towards zero, to 2**52 units cuts it off to the
               unit

A total that does not fit is seen by all threads; they then add up again with a larger unit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from neuzip.kernels.device.reduce import of_program_in, reserve
from neuzip.kernels.quantizers.magnitudes import LAST_UNIT, TOTAL_BITS, UNIT_STEP
from neuzip.kernels.ternary_linear.triton.registers import floats_of_run, lower_half, widening, words_of_run

_LAST_UNIT, _UNIT_STEP = tl.constexpr(LAST_UNIT), tl.constexpr(UNIT_STEP)
_TOTAL_BITS, _TOO_LARGE = tl.constexpr(TOTAL_BITS), tl.constexpr(1 << TOTAL_BITS)
_LOW, _LOW_MASK = tl.constexpr(22), tl.constexpr((1 << 22) - 1)
"""Lower bits of a total, 22 of its 44: they and the upper ones are added each as int32."""


@triton.jit
def largest_magnitude(runs, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """The largest magnitude of each thread, as bits of its dtype; infinities and NaNs are the largest."""
    peak = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(runs)):
        for w in tl.static_range(len(runs[i])):
            if tl.float32 == DTYPE:
                peak = tl.maximum(peak, runs[i][w] & 0x7FFFFFFF)
            elif COMPILED:
                peak = tl.inline_asm_elementwise(
                    _larger_pair(tl.bfloat16 == DTYPE, cuda_capability_geq(8, 6)), "=r,r,r",
                    [runs[i][w], peak], dtype=tl.int32, is_pure=True, pack=1,
                )  # fmt: skip
            else:
                lower = tl.maximum(peak & 0x7FFF, runs[i][w] & 0x7FFF)
                peak = tl.maximum(peak & 0x7FFF0000, runs[i][w] & 0x7FFF0000) | lower
    if tl.float32 != DTYPE:
        peak = tl.maximum(peak & 0x7FFF, (peak >> 16) & 0x7FFF)
    return peak


@triton.constexpr_function
def _larger_pair(bf16, has_xorsign):
    """PTX of the larger magnitudes of two pairs, signs aside: one instruction, or two where it is missing."""
    kind = "bf16x2" if bf16 else "f16x2"
    if has_xorsign:
        return f"max.NaN.xorsign.abs.{kind} $0, $1, $2;"
    return f"{{ .reg .b32 size; and.b32 size, $1, 0x7FFF7FFF; max.NaN.{kind} $0, size, $2; }}"


@triton.jit
def fp32_bits(bits, DTYPE: tl.constexpr):
    """A number given by its bits in a dtype, as bits of fp32."""
    if tl.float32 == DTYPE:
        result = bits
    else:
        result = lower_half(bits, DTYPE).to(tl.int32, bitcast=True)
    return result


@triton.jit
def mean_magnitude(
    runs, inverse, unit_exponent, DTYPE: tl.constexpr, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr
):
    """The mean magnitude of a token, and whether there is one (it is finite): scalars.

    inverse        1 / number of activations
    unit_exponent  log2 of the unit to try first, with which hardly any total is too large
    """
    exchange = reserve(2, 2, NUM_WARPS, COMPILED)
    attempt = tl.full([], 0, tl.int32)
    total = attempt.to(tl.int64)
    again = True
    while again:
        sums = _sums(runs, unit_exponent, DTYPE, COMPILED)
        low, high = (sums & _LOW_MASK).to(tl.int32), (sums >> _LOW).to(tl.int32)
        over = (sums >> 32).to(tl.int32) >> (_TOTAL_BITS - 32)
        low, high = of_program_in(exchange, attempt & 1, (low, high), 0, NUM_WARPS, COMPILED, over)
        total = (_unsigned(high) << _LOW) + _unsigned(low)
        again = (total >= _TOO_LARGE) & (unit_exponent < _LAST_UNIT)
        unit_exponent += tl.where(again, _UNIT_STEP, 0)
        attempt += 1
    size = ((unit_exponent + 127) << 23).to(tl.float32, bitcast=True)
    return total.to(tl.float32) * inverse * size, total < _TOO_LARGE


@triton.jit
def _unsigned(number):
    """An unsigned number in the type int32, as int64."""
    return number.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _sums(runs, unit_exponent, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of each thread's runs of magnitudes, each run's cut off to 2**unit_exponent: int64."""
    if COMPILED:
        # Moving bits divides by 2**896, the difference of the biases.
        start = (unit_exponent + (1023 + 52 - 896)).to(tl.int64) << 52
        begin = tl.zeros(runs[0][0].shape, tl.int64) + start
        first, second = begin.to(tl.float64, bitcast=True), begin.to(tl.float64, bitcast=True)
        for i in tl.static_range(len(runs)):  # two sums by turns, to hide the latency of an fp64 addition
            first, second = second, _add_run(first, runs[i], DTYPE)
        sums = first.to(tl.int64, bitcast=True) + second.to(tl.int64, bitcast=True) - 2 * start
    else:
        sums = tl.zeros(runs[0][0].shape, tl.int64)
        units = tl.math.exp2(-unit_exponent.to(tl.float64))
        for i in tl.static_range(len(runs)):
            a, b, c, d = floats_of_run(runs[i], DTYPE)
            of_run = (tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))
            cut = tl.where(of_run < float("inf"), of_run.to(tl.float64) * units, 2.0**53)
            sums += tl.minimum(cut, 2.0**53).to(tl.int64)
    return sums


@triton.jit
def _add_run(total, run, DTYPE: tl.constexpr):
    """A total, fp64, plus the sum of a run's magnitudes, cut off by the total's last place."""
    return tl.inline_asm_elementwise(
        _adding(DTYPE), "=d," + "r," * len(run) + "d", run + (total,),  # noqa: RUF005
        dtype=tl.float64, is_pure=True, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _adding(dtype):
    lines = [*widening(dtype), *(f"abs.f32 x{i}, x{i};" for i in range(4))]
    lines += ["add.rn.f32 x0, x0, x1; add.rn.f32 x2, x2, x3; add.rn.f32 x0, x0, x2;"]
    lines += [".reg .b32 bits; .reg .b64 moved; .reg .f64 wide; mov.b32 bits, x0;"]
    lines += ["mul.wide.u32 moved, bits, 0x20000000; mov.b64 wide, moved;"]
    return " ".join([*lines, f"add.rz.f64 $0, ${words_of_run(dtype) + 1}, wide; }}"])
