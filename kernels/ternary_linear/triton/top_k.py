"""Keeps the codes of a token's largest magnitudes: Top-K of BitNet a4.8, for a token held in registers.

The smallest magnitude to keep is found by bisection on bits: each round counts, over all threads of the
program, how many magnitudes reach three numbers. Of magnitudes equal to it, those of the lowest columns are
kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.reduce import of_program_in, reserve
from neuzip.kernels.ternary_linear.triton.registers import sum_of_bytes


@triton.jit
def largest_codes(
    runs, pairs, peak, top_k, DTYPE: tl.constexpr, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr
):
    """Codes of the `top_k` largest magnitudes, and 0 for all others; the sum of each thread's codes.

    The runs of a thread are consecutive, and so are those of neighbouring threads.
    """
    MAGNITUDE: tl.constexpr = 0x7FFFFFFF if tl.float32 == DTYPE else 0x7FFF7FFF
    sizes = ()
    for i in tl.static_range(len(runs)):
        for w in tl.static_range(len(runs[i])):
            sizes += (runs[i][w] & MAGNITUDE,)
    least, larger = _smallest_of_top(sizes, peak, top_k, DTYPE, NUM_WARPS, COMPILED)
    above, equal = _compared(sizes, least, DTYPE)
    earlier = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(equal)):
        earlier += equal[i].to(tl.int32)
    # Equal magnitudes still to keep, by this thread and the later ones.
    left = top_k - larger - (tl.cumsum(earlier, 0) - earlier)
    chosen = ()
    code_sum = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(pairs)):
        both = ()
        for half in tl.static_range(2):
            bytes = tl.zeros(runs[0][0].shape, tl.int32)
            for j in tl.static_range(8 * i + 4 * half, 8 * i + 4 * half + 4):
                wanted = above[j] | (equal[j] & (left > 0))
                left -= equal[j].to(tl.int32)
                bytes |= tl.where(wanted, 0xFF << (8 * (j % 4)) if j % 4 < 3 else -0x1000000, 0)
            both += (pairs[i][half] & bytes,)
            code_sum = sum_of_bytes(both[half], code_sum, COMPILED)
        chosen += (both,)
    return chosen, code_sum


@triton.jit
def _compared(sizes, least, DTYPE: tl.constexpr):
    """Which magnitudes of a thread are above a number, and which are equal to it."""
    above = ()
    equal = ()
    for i in tl.static_range(len(sizes)):
        if tl.float32 == DTYPE:
            above += (sizes[i] > least,)
            equal += (sizes[i] == least,)
        else:
            for half in tl.static_range(2):
                size = (sizes[i] >> (16 * half)) & 0x7FFF
                above += (size > least,)
                equal += (size == least,)
    return above, equal


@triton.jit
def _smallest_of_top(
    sizes, peak, top_k, DTYPE: tl.constexpr, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr
):
    """The largest number, as bits, that at least `top_k` magnitudes reach, and how many are above it.

    Each round tries three numbers between two bounds. The first three are likely ones: half of Gaussian
    numbers are at most a fifth of the peak, and with outliers much less. Later ones are quarters of the
    interval.
    """
    OCTAVE: tl.constexpr = 1 << DTYPE.fp_mantissa_width
    ALL: tl.constexpr = 32 * NUM_WARPS * len(sizes) * (1 if tl.float32 == DTYPE else 2)
    exchange = reserve(3, 2, NUM_WARPS, COMPILED)
    attempt, larger = top_k * 0, top_k * 0
    low, high = top_k * 0, tl.minimum(peak, 0x7FFFFFFE) + 1  # a NaN of fp32 may have all bits
    a, b = tl.maximum(peak - 7 * OCTAVE, 1), tl.maximum(peak - 3 * OCTAVE, 1)
    c = tl.maximum(peak - 2 * OCTAVE, 1)
    while high - low > 1:
        counts = _reaching(sizes, a, b, c, DTYPE)
        if ALL < 1 << 16:
            packed = (counts[0] | (counts[1] << 16), counts[2])
            both, of_c = of_program_in(exchange, attempt & 1, packed, 0, NUM_WARPS, COMPILED)
            of_a, of_b = both & 0xFFFF, (both >> 16) & 0xFFFF
        else:
            of_a, of_b, of_c = of_program_in(exchange, attempt & 1, counts, 0, NUM_WARPS, COMPILED)
        if of_a < top_k:
            high, larger = a, of_a
        elif of_b < top_k:
            low, high, larger = a, b, of_b
        elif of_c < top_k:
            low, high, larger = b, c, of_c
        else:
            low = c
        width = high - low
        a, b = low + tl.maximum(width // 4, 1), low + tl.maximum(width // 2, 1)
        c = low + tl.maximum(width // 2 + width // 4, 1)
        attempt += 1
    return low, larger


@triton.jit
def _reaching(sizes, a, b, c, DTYPE: tl.constexpr):
    """How many magnitudes of a thread reach each of three numbers.

    Two magnitudes in a word: with the bit above each set, it survives the subtraction of a number that is not
    larger. Fields of 5 bits count these bits of 31 words.
    """
    zero = tl.zeros(sizes[0].shape, tl.int32)
    of_a, of_b, of_c = zero, zero, zero
    if tl.float32 == DTYPE:
        for i in tl.static_range(len(sizes)):
            of_a += (sizes[i] >= a).to(tl.int32)
            of_b += (sizes[i] >= b).to(tl.int32)
            of_c += (sizes[i] >= c).to(tl.int32)
    else:
        a, b, c = a * 0x10001, b * 0x10001, c * 0x10001
        for first in tl.static_range(0, len(sizes), 31):
            fields = zero
            for i in tl.static_range(first, min(first + 31, len(sizes))):
                size = sizes[i] | -0x7FFF8000
                left = ((size - a) >> 15) & 0x10001 | ((size - b) >> 10) & 0x200020
                fields += left | ((size - c) >> 5) & 0x4000400
            of_a += (fields & 0x1F) + ((fields >> 16) & 0x1F)
            of_b += ((fields >> 5) & 0x1F) + ((fields >> 21) & 0x1F)
            of_c += ((fields >> 10) & 0x1F) + ((fields >> 26) & 0x1F)
    return of_a, of_b, of_c
