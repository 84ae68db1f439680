"""Rotated heads in groups, and their centers, in Triton: the bits that `quantizers` and `centers` give."""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.quantizers import block_width
from neuzip.kernels.quantizers.kv_groups import SCALE_UNIT

_UNIT = tl.constexpr(SCALE_UNIT)


def group_width(heads: Heads) -> int:
    """Numbers that share a scale."""
    return heads.group or heads.width


def turn_width(heads: Heads) -> int:
    """Numbers that the rotation of a head mixes; 1 in the plain form."""
    return 1 if heads.group is None else block_width(heads.width)


@triton.constexpr_function
def power_of_two(count):
    """The least power of two that is not less than a constant."""
    return 1 << (count - 1).bit_length()


@triton.jit
def turned(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURN: tl.constexpr):
    """Blocks of TURN columns of x, fp32 [ROWS, COLUMNS], times the Hadamard matrix over sqrt(TURN).

    TURN is a power of two up to 256. The transform is its own inverse.
    """
    for level in tl.static_range(8):
        if 1 << level < TURN:
            pairs = tl.reshape(x, [ROWS * COLUMNS >> (level + 1), 2, 1 << level])
            one, other = tl.split(tl.trans(pairs, 0, 2, 1))
            x = tl.reshape(tl.trans(tl.join(one + other, one - other), 0, 2, 1), [ROWS, COLUMNS])
    if TURN > 1:
        x = x * TURN**-0.5
    return x


@triton.jit
def scale_of_byte(byte):
    """The fp32 number that a scale byte, int32, stands for."""
    return (byte << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * _UNIT


@triton.jit
def partner_of(columns, PATH: tl.constexpr):
    """The channel with which each one turns: `arguments.path_constants`."""
    BEGIN: tl.constexpr = PATH[1]
    PAIRS: tl.constexpr = PATH[2]
    APART: tl.constexpr = PATH[3]
    place = columns - BEGIN
    is_first = place // APART % 2 == 0
    turns = (place >= 0) & (place < 2 * PAIRS)
    return tl.where(turns, tl.where(is_first, columns + APART, columns - APART), columns)


@triton.jit
def block_of(place, PATH: tl.constexpr):
    """The block of centers in which a token lies; -1 before the first token of a text, where `place` is 0."""
    BLOCK: tl.constexpr = PATH[0]
    return (tl.maximum(place, -1) + BLOCK) // BLOCK - 1


@triton.jit
def center_at(center, partner, table_ptr, block, last_block, columns, real, width):
    """The center in a block, fp32 as `columns`: `center` and that of the partners, turned by its angle."""
    row = table_ptr + tl.minimum(tl.maximum(block, 0), last_block).to(tl.int64) * (2 * width)
    cosine = tl.load(row + columns, mask=real, other=0.0)
    sine = tl.load(row + width + columns, mask=real, other=0.0)
    return center * cosine + partner * sine


@triton.jit
def loaded_center(center_ptr, table_ptr, block, last_block, columns, real, width, PATH: tl.constexpr):
    """`center_at` of a center in memory."""
    center = tl.load(center_ptr + columns, mask=real, other=0.0)
    partner = tl.load(center_ptr + partner_of(columns, PATH), mask=real, other=0.0)
    return center_at(center, partner, table_ptr, block, last_block, columns, real, width)


@triton.jit
def centers_of_rows(
    center, partner, table_ptr, place, begin, last_block, columns, real, WIDTH: tl.constexpr,
    PATH: tl.constexpr,
):  # fmt: skip
    """The center in the block of each token, fp32 [ROWS, COLUMNS]; ROWS is at most the tokens of a block.

    `place` [ROWS] counts from the first token of a text, and `begin` is the first of them. Tokens before the
    text, with negative places, get any number.
    """
    BLOCK: tl.constexpr = PATH[0]
    block = tl.maximum(begin, 0) // BLOCK
    one = center_at(center, partner, table_ptr, block, last_block, columns, real, WIDTH)
    other = center_at(center, partner, table_ptr, block + 1, last_block, columns, real, WIDTH)
    return tl.where((place >= (block + 1) * BLOCK)[:, None], other[None, :], one[None, :])
