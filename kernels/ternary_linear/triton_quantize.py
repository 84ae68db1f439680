"""Activations to codes and scales, in Triton: the quantisers of `kernels.quantizers`, to the last bit.

What the codes are made with are a few numbers of the token, the same for all its activations (`_numbers`).
They need the largest magnitude, INT4 the mean as well, which is taken in the same fixed point as
`quantizers.magnitudes` does, so that the order of additions is free.

Rounding is by adding 1.5 * 2**23, whose last place is worth 1: the sum is rounded to nearest, halves to even,
and its lowest byte is the code. Products and sums must not be fused for that: launch with
enable_fp_fusion=False.

    layout of codes    rows         int8 [tokens, padded]
                       fragments    int8 [padded / 256, p, j / 2, 8 blocks, q, j % 2, b, 4]: of each token, in
                                    steps of 256, codes 4 j to 4 j + 3 of word 4 q + 2 p + b
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.gpu import early_launches
from neuzip.kernels.quantizers.activations import EPSILON, SMALLEST, SQRT_7
from neuzip.kernels.quantizers.magnitudes import SUM_BITS
from neuzip.kernels.triton_floats import widened

from .weight import STEP, steps_of

KINDS = {"int8": 0, "int4": 1, "fp4": 2, "top_k_int8": 3}
"""How the kernels call the activations."""

INT8, INT4, FP4, TOP_K = (tl.constexpr(n) for n in range(4))
_SUM_BITS, _INFINITY = tl.constexpr(SUM_BITS), tl.constexpr(0x7F800000)
_SMALL = tl.constexpr((127 - 60) << 23)  # 2**-60
_SQRT_7, _SMALLEST, _ROUNDER = tl.constexpr(SQRT_7), tl.constexpr(SMALLEST), tl.constexpr(1.5 * 2.0**23)


def quantize(
    x: torch.Tensor, activation: str, kept: int, clamped: bool, blocks: int = 0, start_next: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales fp32 [tokens] and sums of codes int32 [tokens] of x [tokens, in], contiguous.

    Codes are zeros from `in` up to a multiple of 256. They come as rows, or for 8 `blocks` tokens as
    fragments; what stands there for tokens that x has not is anything. `start_next`: the next kernel may
    start before x is there. It waits for this one to read what this one writes; what it reads earlier has to
    be complete. Whoever calls holds LAUNCHING, and the device is the current one.
    """
    tokens, columns = x.shape
    padded = steps_of(columns) * STEP
    codes = torch.empty(8 * blocks or tokens, padded, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    total = torch.empty(tokens, dtype=torch.int32, device=x.device)
    block = max(STEP, triton.next_power_of_2(columns))
    compiled = isinstance(_quantize_kernel, triton.JITFunction)
    early = compiled and early_launches(x.device)
    each = 256 if activation == "int4" else 512  # activations of a warp
    _quantize_kernel[(tokens,)](
        codes, scale, total, x, columns, padded, 8 * blocks, kept, EPSILON,
        KIND=KINDS[activation], CLAMPED=clamped, CEIL_LOG2=(columns - 1).bit_length(), BLOCK=block,
        FRAGMENTS=blocks > 0, START_NEXT=start_next, EARLY=early, ASM=compiled,
        num_warps=min(32, max(1, block // each)), launch_pdl=early, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, total


@triton.jit
def magnitude_bits(x):
    """|x| as integers in the same order: those of infinities and NaNs are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def fixed_unit(peak_bits, CEIL_LOG2: tl.constexpr):
    """The power of two that magnitudes are multiplied with to be added as int64, and its inverse: fp64."""
    finite = tl.where(peak_bits < _INFINITY, peak_bits, 0)
    wide = finite.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(finite == 0, 0, (wide >> 52) - 1022)
    power = _SUM_BITS - CEIL_LOG2 - exponent
    return ((1023 + power) << 52).to(tl.float64, bitcast=True), ((1023 - power) << 52).to(
        tl.float64, bitcast=True
    )


@triton.jit
def fixed_point(x, peak_bits, unit, inverse_unit, FAST: tl.constexpr):
    """Magnitudes in fixed point, cut off: int64; too large by the second result if FAST.

    FAST, for tokens of more than 512 activations: below 2**52 of the units are cut off by adding 2**52 of
    them in fp64, towards zero, as conversions of 64 bits are slow. fp32 becomes fp64, 2**896 times as small,
    by moving its bits, right for normal numbers only; so small tokens are lifted by 2**100 first, and in
    others denormals are below the unit.
    """
    if FAST:
        lift = tl.where(peak_bits < _SMALL, 2.0**100, 1.0).to(tl.float32)
        ceiling = inverse_unit * 2.0**-844 * lift.to(tl.float64)
        added = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; .reg .f64 wide; shr.u32 high, $1, 3; shl.b32 low, $1, 29;"
            " mov.b64 wide, {low, high}; add.rz.f64 wide, wide, $2; mov.b64 $0, wide; }",
            "=l,r,d", [(tl.abs(x) * lift).to(tl.int32, bitcast=True), ceiling],
            dtype=tl.int64, is_pure=True, pack=1,
        )  # fmt: skip
        excess = ceiling.to(tl.int64, bitcast=True)
    else:
        added = (tl.abs(x).to(tl.float64) * unit).to(tl.int64)
        excess = tl.zeros([], tl.int64)
    return added, excess


@triton.jit
def numbers(peak_bits, total, inverse_unit, columns, epsilon, KIND: tl.constexpr, CLAMPED: tl.constexpr):
    """What a token's codes are made with, fp32, and its scale, NaN where an activation is not finite.

    total, inverse_unit  of INT4: the sum of the magnitudes in fixed point, and what it is multiplied with
    """
    size = peak_bits.to(tl.float32, bitcast=True)
    if KIND == FP4:
        seen = size >= _SMALLEST
        factor = tl.where(seen, size * 0.0625, 1.0)
        scale = tl.where(seen, tl.math.div_rn(size, 12.0), 0.0)
    else:
        most = 127.0
        if KIND == INT4:
            size = (total.to(tl.float64) * inverse_unit / columns).to(tl.float32)
            most = _SQRT_7
        if CLAMPED:
            size = tl.maximum(size, epsilon)
            divisor = size
        else:
            divisor = size + epsilon
        most = tl.full([], most, tl.float32)
        factor = tl.math.div_rn(most, divisor)
        scale = tl.math.div_rn(size, most)
    return factor, tl.where(peak_bits < _INFINITY, scale, float("nan"))


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
            reciprocal = tl.math.div_rn(tl.full([], 1.0, tl.float32), divisor)
            dividend = x * (0.75 * lift)
            y = dividend * reciprocal
            y = tl.math.fma(tl.math.fma(-y, divisor, dividend), reciprocal, y)
        else:
            y = tl.math.div_rn(x * 0.75, tl.broadcast_to(factor, x.shape))
        # Steps are 1 below 4, then 2, and 4 from 8 on; 12 is the most. Tokens not seen are all below 1/2.
        power = tl.maximum((y.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True), 2.0)
        y = tl.math.fma(power, -_ROUNDER / 2, tl.math.fma(power, _ROUNDER / 2, y))
    else:
        y = x * factor
        if KIND == INT4:
            y = tl.clamp(y, -8.0, 7.0)
    return (y + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def _pairs(size):
    """Magnitudes of 15 bits, [R, C], two in a number, with a bit above each: [R, C / 2]."""
    first, second = tl.split(tl.reshape(size, [size.shape[0], size.shape[1] // 2, 2]))
    return first | (second << 16) | -0x7FFF8000


@triton.jit
def _reaching(size, pairs, least, LOW: tl.constexpr, COUNT: tl.constexpr):
    """How many magnitudes reach `least` with 1 to COUNT, at most 3, in the bits from LOW on: 20 bits each.

    Of pairs, the bits above them are left of a subtraction. They are counted in 5 bits in a row of 16, in
    10 in 32 rows, so that one number is added up where there would be three.
    """
    if pairs is None:
        each = tl.zeros(size.shape, tl.int64)
        for j in tl.static_range(COUNT):
            each += (size >= (least | ((j + 1) << LOW))).to(tl.int64) << (20 * j)
    else:
        left = tl.zeros(pairs.shape, tl.int32)
        for j in tl.static_range(COUNT):
            above = (pairs - (least | ((j + 1) << LOW)) * 0x10001) >> (15 - 5 * j)
            left |= above & (0x10001 << (5 * j))
        both = tl.sum(left, 1)
        of_row = (both & 0x7FFF) + ((both >> 16) & 0x7FFF)
        wider = (of_row & 0x1F) | ((of_row & 0x3E0) << 5) | ((of_row & 0x7C00) << 10)
        ROWS: tl.constexpr = 32 if wider.shape[0] > 32 else wider.shape[0]
        of_rows = tl.sum(tl.reshape(wider, [wider.shape[0] // ROWS, ROWS]), 1).to(tl.int64)
        each = (of_rows & 0x3FF) | ((of_rows & 0xFFC00) << 10) | ((of_rows & 0x3FF00000) << 20)
    return tl.sum(each)


@triton.jit
def _next_bits(size, pairs, least, kept, LOW: tl.constexpr, COUNT: tl.constexpr):
    """`least` with bits from LOW on, of which COUNT is the largest number, as large as `kept` allow."""
    counts = _reaching(size, pairs, least, LOW, COUNT)
    for j in tl.static_range(COUNT):
        reached = ((counts >> (20 * j)) & 0xFFFFF) >= kept
        least += reached.to(tl.int32) << LOW
    return least


@triton.jit
def _largest(size, kept, BITS: tl.constexpr):
    """Which magnitudes, integers of 15 or 31 bits, are the `kept` largest: of equals, the first."""
    pairs = _pairs(size) if BITS == 15 else None
    # The largest number that `kept` of them reach: its first bit, then two at a time.
    least = _next_bits(size, pairs, kept * 0, kept, BITS - 1, 1)
    for low in tl.static_range(BITS - 3, -1, -2):
        least = _next_bits(size, pairs, least, kept, low, 3)
    equal = (size == least).to(tl.int32)
    of_row = tl.sum(equal, 1)
    earlier = (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(equal, 1) - equal
    wanted = kept - tl.sum((size > least).to(tl.int32))
    return (size > least) | ((equal != 0) & (earlier < wanted))


@triton.jit(do_not_specialize=["kept"])
def _quantize_kernel(
    codes_ptr, scale_ptr, total_ptr, x_ptr, columns, padded, fragment_tokens, kept, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, CEIL_LOG2: tl.constexpr, BLOCK: tl.constexpr,
    FRAGMENTS: tl.constexpr, START_NEXT: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A token a program.

    It is loaded anew for every use, from the first-level cache: with all of it in registers, fewer programs
    would run side by side. Other policies keep the compiler from making one load of them.
    """
    if EARLY and START_NEXT:
        cuda.gdc_launch_dependents()
    if EARLY:
        cuda.gdc_wait()
    if EARLY and not START_NEXT:
        cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    # Codes of fragments are stored four at a time: loaded so, no thread has to ask another.
    TOGETHER: tl.constexpr = 4 if FRAGMENTS else 16
    some, i = tl.arange(0, BLOCK // TOGETHER), tl.arange(0, TOGETHER)[None, :]
    k = some[:, None] * TOGETHER + i
    inside = k < columns
    at = x_ptr + token.to(tl.int64) * columns + k
    size = magnitude_bits(widened(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last")))
    peak = tl.max(size)
    total, inverse = tl.zeros([], tl.int64), tl.zeros([], tl.float64)
    if KIND == INT4:
        unit, inverse = fixed_unit(peak, CEIL_LOG2)
        FAST: tl.constexpr = ASM and CEIL_LOG2 >= 10
        x = widened(tl.load(at, mask=inside & (peak < _INFINITY), other=0.0))
        sizes, excess = fixed_point(x, peak, unit, inverse, FAST)
        total = tl.sum(sizes) - BLOCK * excess
    factor, scale = numbers(peak, total, inverse, columns, epsilon, KIND, CLAMPED)
    NARROW: tl.constexpr = ASM and x_ptr.dtype.element_ty != tl.float32
    x = widened(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"))
    codes = rounded_codes(x, factor, KIND, NARROW).to(tl.int8)
    wanted = inside & (peak < _INFINITY)
    if KIND == TOP_K:
        if x_ptr.dtype.element_ty == tl.float32:
            wanted &= _largest(size, kept, 31)
        else:  # in its own 16 bits, which have the same order
            own = tl.load(at, mask=inside, other=0.0)
            wanted &= _largest(own.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, kept, 15)
    codes = tl.where(wanted, codes, 0)
    if FRAGMENTS:
        # Words 4 q + 2 p + b of a step, codes 4 j to 4 j + 3: where instruction (p, j) of thread q has them.
        j, b, p, q, step = some % 4, some // 4 % 2, some // 8 % 2, some // 16 % 4, some // 64
        piece, place = 4 * step + 2 * p + j // 2, 16 * q + 8 * (j % 2) + 4 * b
        target = ((piece * fragment_tokens + token) * 64 + place)[:, None] + i
        tl.store(codes_ptr + target, codes, mask=k < padded)
    else:
        tl.store(codes_ptr + token.to(tl.int64) * padded + k, codes, mask=k < padded)
    tl.store(scale_ptr + token, scale)
    tl.store(total_ptr + token, tl.sum(codes.to(tl.int32)))
