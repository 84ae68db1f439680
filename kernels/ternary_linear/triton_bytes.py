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

from .triton_codes import signed_byte


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, sums, W: tl.constexpr, ASM: tl.constexpr):
    """m16n8k32 of unsigned weights and signed activations, four a word; returns the thread's 4 sums."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        l0, r0 = _products(a0, b0, W)
        l1, r1 = _products(a1, b0, W)
        l2, r2 = _products(a2, b1, W)
        l3, r3 = _products(a3, b1, W)
        result = (sums[0] + l0 + l2, sums[1] + r0 + r2, sums[2] + l1 + l3, sums[3] + r1 + r3)
    return result


@triton.jit
def _products(a, b, W: tl.constexpr):
    """For the interpreter: what 8 rows and 8 columns, 16 products each, add to two sums of every thread."""
    sums = tl.zeros([W, 8, 8, 4], tl.int32)
    for i in tl.static_range(4):
        mine = tl.reshape((a >> (8 * i)) & 0xFF, [W, 8, 1, 4])
        sums += mine * tl.reshape(signed_byte(b, i), [W, 1, 8, 4])
    left, right = tl.split(tl.reshape(tl.sum(sums, 3), [W, 8, 4, 2]))
    return tl.reshape(left, [32 * W]), tl.reshape(right, [32 * W])


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
                u[g // 4 * 2 + 1] & mask, codes[0], codes[1], sums[g], W, ASM,
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
