"""Blocks as every decoder on a GPU begins them, in Triton: their words, and the states of their lanes.

L is the number of threads of a program. All states are uint32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.coded import WORDS_END
from neuzip.kernels.rans.numbers import HEADER_WORDS, LANES
from neuzip.kernels.rans.triton.ring import refilled

_LANES, _HEADER, _C_WORDS_END = (tl.constexpr(v) for v in (LANES, HEADER_WORDS, WORDS_END))


@triton.jit
def load_u16(pointers, mask):
    """Words as uint32; 0 where the mask is false."""
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32)


@triton.jit
def refill(x, p, words, limit, L: tl.constexpr, COMPILED: tl.constexpr):
    """Lanes whose state is small take the next words of the block, in the order of the lanes: state and `p`.

    In PTX for what Triton has no words for: which lanes of the warp need a word, and how many lower ones do.
    """
    if COMPILED:
        x, p = tl.inline_asm_elementwise(
            """{
            .reg .pred need, there;
            .reg .b32 ballot, lower, at, word, filled, all;
            .reg .b64 address;
            setp.lo.u32 need, $2, 65536;
            vote.sync.ballot.b32 ballot, need, 0xffffffff;
            mov.u32 lower, %lanemask_lt;
            and.b32 lower, lower, ballot;
            popc.b32 at, lower;
            add.s32 at, at, $3;
            setp.lt.and.s32 there, at, $5, need;
            mad.wide.s32 address, at, 2, $4;
            mov.b32 word, 0;
            @there ld.global.u16 word, [address];
            prmt.b32 filled, $2, word, 0x1054;
            selp.b32 $0, filled, $2, need;
            popc.b32 all, ballot;
            add.s32 $1, $3, all;
            }""",
            "=r,=r,r,r,l,r", [x, p, words.to(tl.int64), limit],
            dtype=(tl.uint32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        x, p = refilled(x, p, words, limit, L)
    return x, p


@triton.jit
def begin_blocks(inp, starts, counts, own, block, lane, L: tl.constexpr):
    """Words of blocks, whether they are enough, escapes, where these begin, states, and words taken."""
    start = tl.load(starts + block)
    count = tl.load(counts + block)
    # Where the index has run far beyond the words, what is left is very negative, and must not wrap.
    count = tl.maximum(tl.minimum(count, (tl.load(own + _C_WORDS_END) - start) // 2), 0).to(tl.int32)
    words = (inp + start).to(tl.pointer_type(tl.uint16))
    whole = count >= _HEADER
    escapes = tl.load(words, mask=whole, other=0).to(tl.int32)
    limit = count - 2 * escapes
    whole = whole & (limit >= _HEADER)
    limit = tl.where(whole, limit, 0)
    x = load_u16(words + 1 + lane, whole) | (load_u16(words + 1 + _LANES + lane, whole) << 16)
    return words, whole, escapes, limit, x, tl.full([L], _HEADER, tl.int32)


@triton.jit
def load_escapes(words, limit, number, escapes, in_block):
    """Escapes of a number in their blocks: whether there are any, where, and what; whether one is misplaced.

    They begin at word `limit`. A misplaced one is beyond the weights `in_block`, or not behind the last.
    """
    there = number < escapes
    entry = limit + 2 * number
    where = load_u16(words + entry, there).to(tl.int32)
    before = load_u16(words + entry - 2, there & (number > 0)).to(tl.int32)
    symbol = load_u16(words + entry + 1, there)
    misplaced = there & ((where >= in_block) | ((number > 0) & (where <= before)))
    return there & (where < in_block), where, symbol, misplaced
