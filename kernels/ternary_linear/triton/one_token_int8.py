"""Multiplies one token by bytes: matrix instructions on 8-bit integers, for codes that stay in registers.

This serves GPUs whose matrix instructions do not count bits, and long tokens, whose codes would leave too
little shared memory for words. m16n8k32 multiplies 16 rows of c + 1 (0 to 2 for the codes c of weights) with
8 columns.

A K block of a tile takes 8 instructions, (p, j): each has the codes 4 j to 4 j + 3 of words 2 p and 2 p + 1
of every thread. There is one token and there are 8 columns, so instruction g = 4 p + j has accumulators of
its own, in which only column g counts. That has three advantages:

    a thread needs the codes of only one instruction, that of its own column, and no two threads have the same
    weights are masked but not shifted: sums that are 4**j times too large are shifted once, at the end
    the last of four codes is not masked either: what the others add to its sums is known, and subtracted
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.mma import mma


@triton.jit
def no_sums(NUM_WARPS: tl.constexpr):
    """Sums of the 8 instructions, of which a thread has 4 each, before the first step."""
    zero = tl.zeros([32 * NUM_WARPS], tl.int32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    return sums


@triton.jit
def multiply(v, u, codes, sums, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr):
    """Add the products of words v of rows r and u of rows r + 8, four each, with a thread's codes."""
    added = ()
    for g in tl.static_range(8):
        mask = 0x03030303 << (2 * (g % 4)) if g % 4 < 3 else -1
        added += (
            mma(
                v[g // 4 * 2] & mask, u[g // 4 * 2] & mask, v[g // 4 * 2 + 1] & mask,
                u[g // 4 * 2 + 1] & mask, codes[0], codes[1], sums[g], False, NUM_WARPS, COMPILED,
            ),
        )  # fmt: skip
    return added


@triton.jit
def of_rows(sums, q):
    """A thread's part of the products of rows r and r + 8: column g of the sums g."""
    top, bottom = tl.zeros_like(q), tl.zeros_like(q)
    for c in tl.static_range(4):
        top = tl.where(q == c, _unscaled(sums, 0, c), top)
        bottom = tl.where(q == c, _unscaled(sums, 2, c), bottom)
    return top, bottom


@triton.jit
def _unscaled(sums, ROW: tl.constexpr, C: tl.constexpr):
    """The sum of instructions 2 C and 2 C + 1, for rows r (ROW 0) or r + 8 (ROW 2)."""
    even, odd = sums[2 * C][ROW], sums[2 * C + 1][ROW + 1]
    if C % 2 == 1:  # the last of four, unmasked: subtract the others
        odd -= sums[2 * C][ROW + 1] + sums[2 * C - 1][ROW + 1] + sums[2 * C - 2][ROW + 1]
    return (even >> (4 * (C % 2))) + (odd >> (4 * (C % 2) + 2))
