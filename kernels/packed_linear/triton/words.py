"""What products with packed weights load, in Triton: words, far words, escapes, and the weights in them.

Thread (r, q) of a warp has rows r and r + 8 of a tile, and word q of four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import float_of, side_by_side
from neuzip.kernels.packed_linear.form import PackedLayout
from neuzip.kernels.packed_linear.tensor import format_of
from neuzip.kernels.packed_linear.triton.slots import (
    as_start,
    count_below,
    high_bytes,
    low_bytes,
    slot_of_escape,
)

_F16 = PackedLayout(format_of(torch.float16), 8)
_BF16 = PackedLayout(format_of(torch.bfloat16), 8)
HIGH_PLANES_F16 = tl.constexpr(_F16.planes - 8)
HIGH_PLANES_BF16 = tl.constexpr(_BF16.planes - 8)


@triton.jit
def _plane(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of rows r and r + 8."""
    two = words + (at + P * C * 16)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(two) if EVEN else tl.load(two, mask=inside[:, None], other=0))


@triton.jit
def load_words(words, at, inside, P: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """A word of each of P planes: those of row r, and those of row r + 8."""
    a = ()
    b = ()
    for p in tl.static_range(P):
        one, other = _plane(words, at, inside, p, C, EVEN)
        a += (one,)
        b += (other,)
    return a, b


@triton.jit
def load_record(index, c, inside, EVEN: tl.constexpr):
    """Which rows of a word's pair have a far word, as bits, and where their far words begin."""
    two = (index + c // 2 * 2)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(two) if EVEN else tl.load(two, mask=inside[:, None], other=0))


@triton.jit
def load_far(far, record, c, r, COMPILED: tl.constexpr):
    """The far words of rows r and r + 8, 0 where there is none."""
    mask, start = record
    bit = c % 2 * 16 + 2 * r
    at = far + start + count_below(mask, bit, COMPILED)
    own, next_own = (mask >> bit) & 1, (mask >> (bit + 1)) & 1
    return tl.load(at, mask=own != 0, other=0), tl.load(at + own, mask=next_own != 0, other=0)


@triton.jit
def weights_of(
    words, far, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, COMPILED: tl.constexpr
):
    """Slots 4 G and 4 G + 1, and the next two, of a row."""
    low = low_bytes(words, LOW, G)
    high = high_bytes(words, far, base4, LOW, HALF, G)
    return side_by_side(low, high, COMPILED)


@triton.jit
def load_escape(escapes, at, stop, base, shift, scale, HALF: tl.constexpr):
    """How far a weight is from what stands in its slot, its position, and whether there is one."""
    there = at < stop
    entry = tl.load(escapes + at, mask=there, other=0)
    off = float_of(entry >> 16, HALF)
    off -= float_of(slot_of_escape((entry >> 16) & 0xFFFF, base, shift, HALF), HALF) * scale
    return tl.where(there, off, 0.0), entry & 0xFFFF, there


@triton.jit
def escapes_of_row(row_start, row, own):
    """Which escapes of a row a thread begins with, and where they end."""
    return as_start(tl.load(row_start + row)) + own, as_start(tl.load(row_start + row + 1))


@triton.jit
def gather_x(x, column, there, M, C, BM: tl.constexpr):
    """x of the escape of each thread: [T, BM]."""
    m = tl.arange(0, BM)[None, :]
    return tl.load(x + (m * (32 * C) + column[:, None]), mask=there[:, None] & (m < M), other=0.0)
