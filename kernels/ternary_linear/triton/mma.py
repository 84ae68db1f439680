"""Matrix instructions of a warp on 8-bit integers and on single bits, for 16 rows and 8 columns.

Thread (r, q) of a warp is lane 4 r + q. It gives words of rows r and r + 8, and of column r; it has the sums
of rows r and r + 8 in columns 2 q and 2 q + 1. Triton's interpreter gets the same, written out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.registers import signed_byte


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, sums, BITS: tl.constexpr, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr):
    """Add to a thread's 4 sums 32 products of bytes; or, with BITS, how many of 256 bits are 1 in both
    operands.

    Bytes of rows are unsigned, those of columns signed. b0 goes with a0 and a1, b1 with a2 and a3.
    """
    if COMPILED:
        result = tl.inline_asm_elementwise(
            _instruction(BITS), "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        l0, r0 = _of_two_columns(a0, b0, BITS, NUM_WARPS)
        l1, r1 = _of_two_columns(a1, b0, BITS, NUM_WARPS)
        l2, r2 = _of_two_columns(a2, b1, BITS, NUM_WARPS)
        l3, r3 = _of_two_columns(a3, b1, BITS, NUM_WARPS)
        result = (sums[0] + l0 + l2, sums[1] + r0 + r2, sums[2] + l1 + l3, sums[3] + r1 + r3)
    return result


@triton.constexpr_function
def _instruction(bits):
    kind = "m16n8k256.row.col.s32.b1.b1.s32.and.popc" if bits else "m16n8k32.row.col.s32.u8.s8.s32"
    return (
        f"mma.sync.aligned.{kind} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
    )


@triton.jit
def _of_two_columns(a, b, BITS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """What one word of a row and one of a column, of all threads, add to two sums of every thread."""
    a, b = tl.reshape(a, [NUM_WARPS, 8, 1, 4]), tl.reshape(b, [NUM_WARPS, 1, 8, 4])
    sums = _ones(a & b) if BITS else _products(a, b)
    left, right = tl.split(tl.reshape(tl.sum(sums, 3), [NUM_WARPS, 8, 4, 2]))
    return tl.reshape(left, [32 * NUM_WARPS]), tl.reshape(right, [32 * NUM_WARPS])


@triton.jit
def _products(a, b):
    """The products of the four bytes of two words, unsigned and signed, added."""
    sums = (a & 0xFF) * signed_byte(b, 0)
    for i in tl.static_range(1, 4):
        sums += ((a >> (8 * i)) & 0xFF) * signed_byte(b, i)
    return sums


@triton.jit
def _ones(word):
    """The number of bits of a word that are 1."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = (word + (word >> 8)) & 0x00FF00FF
    return (word + (word >> 16)) & 0xFF
