"""One token's codes as bits, and matrix instructions that count where weights have a bit as well.

m16n8k256 of single bits counts, for 16 rows and 8 columns, of 256 bits those that are 1 in both. Weights are
its rows as they come, 2 bits c + 1 each, with nothing masked or shifted. A column is a bit of the codes, at
the lower or at the upper bits of weights, and counts 2**bit or twice that; the sign bit is negative. Codes of
4 bits are 8 columns, so a step of a tile are two instructions; those of 8 bits are four.

    word of a row     16 weights: c + 1 of column 4 j + b at bits 8 b + 2 j and 8 b + 2 j + 1
    word of a column  a bit of the code of column 4 j + b at bit 8 b + 2 j, or at 8 b + 2 j + 1: 0 elsewhere

Thread (r, q) needs column r of four words, and makes codes of half a word: i = r // 2 of the four, and of
that j = h and h + 2 with h = r % 2. It writes the lower halves of these 8 codes as one word, and the upper
halves as another; so each bit has a distance of 4 as it should. Those of h = 1 are rotated by 2: then what
threads 2 i and 2 i + 1 wrote has all bits of a plane where they do not meet, and rotating makes the column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.mma import mma
from neuzip.kernels.ternary_linear.triton.one_token_int8 import lower_and_upper
from neuzip.kernels.ternary_linear.triton.smem_ring import meet

SET_BYTES = 128
"""Of a warp's lower, or upper, halves of codes in a turn."""

_SET_BYTES = tl.constexpr(SET_BYTES)


@triton.constexpr_function
def sets_of(narrow):
    """Halves of codes that are written: the lower ones, and for codes of more than 4 bits the upper ones."""
    return 1 if narrow else 2


def nbytes(warps: int, turns: int, narrow: bool) -> int:
    """Of shared memory for a token's codes."""
    return int(warps * turns * SET_BYTES * sets_of(narrow))


@triton.jit
def room(warp, r, q, W: tl.constexpr, TURNS: tl.constexpr, NARROW: tl.constexpr, ASM: tl.constexpr):
    """Where a thread writes codes, and where it reads them: codes of TURNS turns, of 4 bits if NARROW."""
    OF_WARP: tl.constexpr = TURNS * sets_of(NARROW) * _SET_BYTES
    to = warp * OF_WARP + q * 32 + r * 4
    at = warp * OF_WARP + q * 32
    if not NARROW:
        at += r // 4 * _SET_BYTES
    if ASM:
        base = tl.inline_asm_elementwise(
            _room(W * OF_WARP), "=r,r", [warp], dtype=tl.int32, is_pure=False, pack=1
        )
        to += base
        at += base
    return to, at


@triton.constexpr_function
def _room(nbytes):
    return f"{{ .shared .align 16 .b8 planes[{nbytes}]; mov.u32 $0, planes; }}"


@triton.jit
def put(to, pairs, r, NARROW: tl.constexpr, ASM: tl.constexpr):
    """Write the codes of all turns, two words each; what is returned is what the interpreter has instead."""
    SETS: tl.constexpr = sets_of(NARROW)
    rotation = r % 2 * 2
    kept = ()
    for turn in tl.static_range(len(pairs)):
        first, second = pairs[turn]
        halves = (lower_and_upper(first, second << 4, ASM),)
        if not NARROW:
            halves += (lower_and_upper(first >> 4, second, ASM),)
        for i in tl.static_range(SETS):
            rotated = _rotated(halves[i], rotation, ASM)
            if ASM:
                tl.inline_asm_elementwise(
                    _putting(turn * SETS + i), "=r,r,r", [to, rotated],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
            kept += (rotated,)
    meet(to, ASM)
    return kept


@triton.constexpr_function
def _putting(place):
    return f"st.shared.b32 [$1 + {place * SET_BYTES}], $2; mov.b32 $0, 0;"


@triton.jit
def _rotated(word, by, ASM: tl.constexpr):
    """A word whose bits are moved up by so many, 0 to 31, or down by as many as are negative."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [word, by], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        wide = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        wide = (wide | (wide << 32)) >> (32 - (by & 31)).to(tl.uint64)
        result = wide.to(tl.uint32).to(tl.int32, bitcast=True)
    return result


@triton.jit
def take(at, kept, r, TURN: tl.constexpr, W: tl.constexpr, NARROW: tl.constexpr, ASM: tl.constexpr):
    """A thread's column of the four words of a turn; of codes of 8 bits, at the lower bits of weights."""
    SETS: tl.constexpr = sets_of(NARROW)
    if ASM:
        words = tl.inline_asm_elementwise(
            _taking(TURN * SETS), "=r,=r,=r,=r,=r,=r,=r,=r,r", [at],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = ()
        for i in tl.static_range(8):
            word = _of_thread(kept[TURN * SETS], i, r, W)
            if not NARROW:
                word = tl.where(r < 4, word, _of_thread(kept[TURN * SETS + 1], i, r, W))
            words += (word,)
    plane = r // 2 if NARROW else r % 4
    mine = (r * 0 + 0x11111111) << plane
    others = (r * 0 + 0x11111111) << ((plane + 2) % 4)
    down = plane - r % 2 if NARROW else plane
    columns = ()
    for i in tl.static_range(4):
        both = (words[2 * i] & mine) | (words[2 * i + 1] & others)
        columns += (_rotated(both, -down, ASM),)
    return columns


@triton.constexpr_function
def _taking(place):
    offset = place * SET_BYTES
    return (
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$8 + {offset}];"
        f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$8 + {offset + 16}];"
    )


@triton.jit
def _of_thread(word, R: tl.constexpr, r, W: tl.constexpr):
    """For the interpreter: what the thread (R, q) has, for all (r, q)."""
    only = tl.reshape(tl.where(r == R, word, 0), [W, 8, 4])
    return tl.reshape(tl.broadcast_to(tl.sum(only, 1, keep_dims=True), [W, 8, 4]), [32 * W])


@triton.jit
def nothing(W: tl.constexpr):
    """What is counted of a tile, before the first: two times the four that a thread has of an instruction."""
    zero = tl.zeros([32 * W], tl.int32)
    return (zero, zero, zero, zero), (zero, zero, zero, zero)


@triton.jit
def count(v, u, columns, sums, W: tl.constexpr, NARROW: tl.constexpr, ASM: tl.constexpr):
    """Count the bits of words of rows r and of r + 8, four each, and of a turn's columns.

    Of codes of 4 bits the two instructions count by themselves, so none waits for the other; of 8 bits those
    at the lower bits of weights do, and those at the upper ones.
    """
    c0, c1, c2, c3 = columns
    first, second = sums
    if NARROW:
        first = mma(v[0], u[0], v[1], u[1], c0, c1, first, True, W, ASM)
        second = mma(v[2], u[2], v[3], u[3], c2, c3, second, True, W, ASM)
    else:
        first = mma(v[0], u[0], v[1], u[1], c0, c1, first, True, W, ASM)
        second = mma(v[0], u[0], v[1], u[1], c0 << 1, c1 << 1, second, True, W, ASM)
        first = mma(v[2], u[2], v[3], u[3], c2, c3, first, True, W, ASM)
        second = mma(v[2], u[2], v[3], u[3], c2 << 1, c3 << 1, second, True, W, ASM)
    return first, second


@triton.jit
def of_rows(sums, q, NARROW: tl.constexpr):
    """What a thread has of the products of rows r and r + 8, by what each of its two columns counts."""
    first, second = sums
    results = ()
    for row in tl.static_range(0, 4, 2):
        if NARROW:  # bit q at the lower bits of weights, and at the upper ones
            counted = first[row] + second[row] + 2 * (first[row + 1] + second[row + 1])
            results += (tl.where(q == 3, -counted, counted) << q,)
        else:  # bits 2 q and 2 q + 1
            upper = first[row + 1] + 2 * second[row + 1]
            results += (first[row] + 2 * second[row] + 2 * tl.where(q == 3, -upper, upper) << (2 * q),)
    return results
