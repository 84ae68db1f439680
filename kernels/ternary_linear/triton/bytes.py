"""One token's codes as bytes, and matrix instructions on 8-bit integers.

For cards that count no bits, and for long tokens: their codes stay in registers. m16n8k32 multiplies c + 1 of
16 rows, 0 to 2 for codes c of weights, with a token's codes in one of 8 columns. The 8 instructions of a tile
in a turn, (p, j), take the codes 4 j to 4 j + 3 of words 2 p and 2 p + 1 of each thread, and what is asked
for stands in column 4 p + j of their own sums: so thread (r, q) needs the activations of one of the 8 only,
and no two threads have the same. As an instruction has sums of its own, no bits have to be shifted: they are
4**j times too large, which a shift of the sums repairs. Nor is the last of four codes masked: what the others
add to its sums stands in the same column of theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.mma import mma


@triton.jit
def nothing(W: tl.constexpr):
    """The sums of the 8 instructions, of which a thread has 4 each, before the first."""
    zero = tl.zeros([32 * W], tl.int32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    return sums


@triton.jit
def multiply(v, u, codes, sums, W: tl.constexpr, ASM: tl.constexpr):
    """Add the products of words of rows r and of r + 8, four each, with a thread's codes of a turn."""
    added = ()
    for g in tl.static_range(8):
        mask = 0x03030303 << (2 * (g % 4)) if g % 4 < 3 else -1
        added += (
            mma(
                v[g // 4 * 2] & mask, u[g // 4 * 2] & mask, v[g // 4 * 2 + 1] & mask,
                u[g // 4 * 2 + 1] & mask, codes[0], codes[1], sums[g], False, W, ASM,
            ),
        )  # fmt: skip
    return added


@triton.jit
def of_rows(sums, q):
    """Of sums g column g counts, of which thread q has 2 q and 2 q + 1: what it has of rows r and r + 8."""
    top, bottom = tl.zeros_like(q), tl.zeros_like(q)
    for c in tl.static_range(4):
        top = tl.where(q == c, _unscaled(sums, 0, c), top)
        bottom = tl.where(q == c, _unscaled(sums, 2, c), bottom)
    return top, bottom


@triton.jit
def _unscaled(sums, ROW: tl.constexpr, C: tl.constexpr):
    """What the instructions 2 C and 2 C + 1 give together, of rows r or (ROW 2) r + 8."""
    even, odd = sums[2 * C][ROW], sums[2 * C + 1][ROW + 1]
    if C % 2 == 1:  # the last of four, and all others
        odd -= sums[2 * C][ROW + 1] + sums[2 * C - 1][ROW + 1] + sums[2 * C - 2][ROW + 1]
    return (even >> (4 * (C % 2))) + (odd >> (4 * (C % 2) + 2))
