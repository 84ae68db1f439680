"""Operands of products with packed weights by the matrix instruction of a warp group, in Triton.

A program has W warps, each with a tile of 16 rows of the weights, of which it unpacks 128 columns at a time.
Thread (r, q) of a warp has word q of four, of rows r and r + 8: what is unpacked stays where the instruction
wants it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.packed_linear.triton.words import (
    HIGH_PLANES_BF16,
    HIGH_PLANES_F16,
    load_words,
    weights_of,
)


@triton.jit
def load_tile(words, tile, c, r, LOW: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of each plane of rows r and r + 8 of a tile."""
    P: tl.constexpr = LOW + (HIGH_PLANES_F16 if HALF else HIGH_PLANES_BF16)
    return load_words(words, tile * (P * C * 16) + c * 16 + r * 2, c < C, P, C, EVEN)


@triton.jit
def load_columns(pairs_of_x, turn, M, C: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr):
    """The 128 columns of x of a turn, as they lie: pairs [BM, 64]."""
    m, k = tl.arange(0, BM)[:, None], turn * 64 + tl.arange(0, 64)[None, :]
    inside = (m < M) if EVEN else (m < M) & (k < 16 * C)
    return tl.load(pairs_of_x + (m * (16 * C) + k), mask=inside, other=0)


@triton.jit
def in_order(pairs, turn, C: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr):
    """Columns of x in the order of the instructions: [128, BM]. Words that are no turn hold 32 neighbours."""
    if C % 4 != 0:
        # q, g, half of an instruction
        parts = tl.permute(tl.reshape(pairs, [BM, 4, 8, 2]), (0, 2, 3, 1))
        pairs = tl.where(turn == C // 4, tl.reshape(parts, [BM, 64]), pairs)
    return tl.trans(tl.reshape(_pair(pairs, HALF), [BM, 128]))


@triton.jit
def unpacked(
    a, b, far_a, far_b, base4, LOW: tl.constexpr, HALF: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr
):
    """The weights of W tiles, [16 W, 128], from the words of rows r and r + 8.

    Each thread has what the instruction wants of it, so nothing moves between threads.
    """
    groups = ()
    for g in tl.static_range(8):
        a0, a2 = weights_of(a, far_a, base4, LOW, HALF, g, COMPILED)
        a1, a3 = weights_of(b, far_b, base4, LOW, HALF, g, COMPILED)
        groups += (fragment(a0, a1, a2, a3, HALF),)
    return tile_of(groups, W)


@triton.jit
def fragment(a0, a1, a2, a3, HALF: tl.constexpr):
    """What a thread gives to one instruction, four pairs, as numbers: [T, 2, 2, 2]."""
    first = tl.join(_pair(a0, HALF), _pair(a1, HALF))
    return tl.join(first, tl.join(_pair(a2, HALF), _pair(a3, HALF)))


@triton.jit
def tile_of(fragments, W: tl.constexpr):
    """The weights of W tiles, [16 W, 128], from the fragments of eight instructions."""
    # warp, r, q, of a pair, row r or r + 8, half of an instruction, g
    tile = tl.reshape(_all_eight(fragments), [W, 8, 4, 2, 2, 2, 8])
    return tl.reshape(tl.permute(tile, (0, 4, 1, 6, 5, 2, 3)), [16 * W, 128])


@triton.jit
def _all_eight(groups):
    """Eight arrays as one, with three last axes of 2: the bits of their numbers."""
    even = tl.join(tl.join(groups[0], groups[4]), tl.join(groups[2], groups[6]))
    odd = tl.join(tl.join(groups[1], groups[5]), tl.join(groups[3], groups[7]))
    return tl.join(even, odd)


@triton.jit
def _pair(pattern, HALF: tl.constexpr):
    """The two weights in an int32: [T, 2]."""
    low, high = (pattern & 0xFFFF).to(tl.uint16), ((pattern >> 16) & 0xFFFF).to(tl.uint16)
    both = tl.join(low, high)
    return both.to(tl.float16, bitcast=True) if HALF else both.to(tl.bfloat16, bitcast=True)
