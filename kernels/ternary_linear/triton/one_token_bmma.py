"""Multiplies one token bit by bit: matrix instructions that count the bits set in both operands.

m16n8k256 of single bits takes 16 rows and 8 columns of 256 bits, and counts for each pair those that are 1 in
both. Rows are words of weights as they come: 16 weights of 2 bits c + 1 (0 to 2), nothing masked or shifted.
A column holds one bit of each of the token's codes, where weights have their lower bit, or where they have
their upper bit. Its counts are worth 2**bit, or twice that; those of the sign bit are negative. Codes of 4
bits make 8 columns, so 16 x 256 weights take two instructions; codes of 8 bits take four.

    word of a row     16 weights: c + 1 of column 4 j + b at bits 8 b + 2 j and 8 b + 2 j + 1
    word of a column  a bit of the code of column 4 j + b at bit 8 b + 2 j, or at 8 b + 2 j + 1; 0 elsewhere

The codes become columns by way of shared memory. Thread (r, q) needs column r of four words. It makes the
codes of half a word: word i = r // 2 of the four, and of that j = h and h + 2 with h = r % 2. It writes the
lower halves of these 8 codes as one word, and the upper halves as another, so that equal bits are 4 apart, as
in a column. Words of h = 1 are rotated by 2: then the words of threads 2 i and 2 i + 1 have all bits of a
plane, none at the same place, and a rotation of both together makes the column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.mma import mma
from neuzip.kernels.ternary_linear.triton.registers import lower_and_upper
from neuzip.kernels.ternary_linear.triton.smem_ring import warp_sync

SET_BYTES = 128
"""Bytes of the lower, or of the upper, halves of a warp's codes in one step."""

_SET_BYTES = tl.constexpr(SET_BYTES)


@triton.constexpr_function
def sets_of(int4):
    """Sets of half codes in shared memory: the lower halves, and for codes of 8 bits the upper ones."""
    return 1 if int4 else 2


def nbytes(warps: int, steps: int, int4: bool) -> int:
    """Bytes of shared memory for the codes of a token."""
    return int(warps * steps * SET_BYTES * sets_of(int4))


@triton.jit
def make_planes(
    warp, r, q, NUM_WARPS: tl.constexpr, STEPS: tl.constexpr, INT4_CODES: tl.constexpr, COMPILED: tl.constexpr
):
    """Addresses in new shared memory for codes of STEPS steps: where a thread writes and where it reads."""
    OF_WARP: tl.constexpr = STEPS * sets_of(INT4_CODES) * _SET_BYTES
    to = warp * OF_WARP + q * 32 + r * 4
    at = warp * OF_WARP + q * 32
    if not INT4_CODES:
        at += r // 4 * _SET_BYTES
    if COMPILED:
        base = tl.inline_asm_elementwise(
            _declare_planes(NUM_WARPS * OF_WARP), "=r,r", [warp], dtype=tl.int32, is_pure=False, pack=1
        )
        to += base
        at += base
    return to, at


@triton.constexpr_function
def _declare_planes(nbytes):
    return f"{{ .shared .align 16 .b8 planes[{nbytes}]; mov.u32 $0, planes; }}"


@triton.jit
def put(to, pairs, r, INT4_CODES: tl.constexpr, COMPILED: tl.constexpr):
    """Write the codes of all steps, two words each. Returns the interpreter's substitute for that memory."""
    PLANE_SETS: tl.constexpr = sets_of(INT4_CODES)
    rotation = r % 2 * 2
    stored = ()
    for step in tl.static_range(len(pairs)):
        first, second = pairs[step]
        half_codes = (lower_and_upper(first, second << 4, COMPILED),)
        if not INT4_CODES:
            half_codes += (lower_and_upper(first >> 4, second, COMPILED),)
        for i in tl.static_range(PLANE_SETS):
            rotated = _rotated(half_codes[i], rotation, COMPILED)
            if COMPILED:
                tl.inline_asm_elementwise(
                    _store_ptx(step * PLANE_SETS + i), "=r,r,r", [to, rotated],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
            stored += (rotated,)
    warp_sync(to, COMPILED)
    return stored


@triton.constexpr_function
def _store_ptx(place):
    return f"st.shared.b32 [$1 + {place * SET_BYTES}], $2; mov.b32 $0, 0;"


@triton.jit
def _rotated(word, by, COMPILED: tl.constexpr):
    """A word rotated up by 0 to 31 bits, or down where that number is negative."""
    if COMPILED:
        result = tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [word, by], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        wide = word.to(tl.uint32, bitcast=True).to(tl.uint64)
        wide = (wide | (wide << 32)) >> (32 - (by & 31)).to(tl.uint64)
        result = wide.to(tl.uint32).to(tl.int32, bitcast=True)
    return result


@triton.jit
def take(
    at,
    stored,
    r,
    STEP: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    INT4_CODES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """A thread's column of the four words of a step; of 8-bit codes that at the lower bits of weights."""
    PLANE_SETS: tl.constexpr = sets_of(INT4_CODES)
    if COMPILED:
        words = tl.inline_asm_elementwise(
            _load_ptx(STEP * PLANE_SETS), "=r,=r,=r,=r,=r,=r,=r,=r,r", [at],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = ()
        for i in tl.static_range(8):
            word = _of_thread(stored[STEP * PLANE_SETS], i, r, NUM_WARPS)
            if not INT4_CODES:
                word = tl.where(r < 4, word, _of_thread(stored[STEP * PLANE_SETS + 1], i, r, NUM_WARPS))
            words += (word,)
    plane = r // 2 if INT4_CODES else r % 4
    mine = (r * 0 + 0x11111111) << plane
    others = (r * 0 + 0x11111111) << ((plane + 2) % 4)
    down = plane - r % 2 if INT4_CODES else plane
    columns = ()
    for i in tl.static_range(4):
        both = (words[2 * i] & mine) | (words[2 * i + 1] & others)
        columns += (_rotated(both, -down, COMPILED),)
    return columns


@triton.constexpr_function
def _load_ptx(place):
    offset = place * SET_BYTES
    return (
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$8 + {offset}];"
        f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$8 + {offset + 16}];"
    )


@triton.jit
def _of_thread(word, R: tl.constexpr, r, NUM_WARPS: tl.constexpr):
    """For the interpreter: the word of thread (R, q), for all threads (r, q)."""
    only = tl.reshape(tl.where(r == R, word, 0), [NUM_WARPS, 8, 4])
    return tl.reshape(tl.broadcast_to(tl.sum(only, 1, keep_dims=True), [NUM_WARPS, 8, 4]), [32 * NUM_WARPS])


@triton.jit
def no_counts(NUM_WARPS: tl.constexpr):
    """Counts of a tile before the first instruction: two sets of the four that a thread has of each."""
    zero = tl.zeros([32 * NUM_WARPS], tl.int32)
    return (zero, zero, zero, zero), (zero, zero, zero, zero)


@triton.jit
def count(v, u, columns, sums, NUM_WARPS: tl.constexpr, INT4_CODES: tl.constexpr, COMPILED: tl.constexpr):
    """Add the counts of a step: of words v of rows r and u of rows r + 8, four each, and the columns.

    The two sets make instructions independent: with codes of 4 bits each has one of its own; with 8 bits one
    set is for the lower bits of weights, the other for the upper ones.
    """
    c0, c1, c2, c3 = columns
    first, second = sums
    if INT4_CODES:
        first = mma(v[0], u[0], v[1], u[1], c0, c1, first, True, NUM_WARPS, COMPILED)
        second = mma(v[2], u[2], v[3], u[3], c2, c3, second, True, NUM_WARPS, COMPILED)
    else:
        first = mma(v[0], u[0], v[1], u[1], c0, c1, first, True, NUM_WARPS, COMPILED)
        second = mma(v[0], u[0], v[1], u[1], c0 << 1, c1 << 1, second, True, NUM_WARPS, COMPILED)
        first = mma(v[2], u[2], v[3], u[3], c2, c3, first, True, NUM_WARPS, COMPILED)
        second = mma(v[2], u[2], v[3], u[3], c2 << 1, c3 << 1, second, True, NUM_WARPS, COMPILED)
    return first, second


@triton.jit
def of_rows(sums, q, INT4_CODES: tl.constexpr):
    """A thread's part of the products of rows r and r + 8: its counts, weighted by their bits."""
    first, second = sums
    results = ()
    for row in tl.static_range(0, 4, 2):
        if INT4_CODES:  # bit q at the lower bits of weights, and at the upper ones
            counted = first[row] + second[row] + 2 * (first[row + 1] + second[row + 1])
            results += (tl.where(q == 3, -counted, counted) << q,)
        else:  # bits 2 q and 2 q + 1
            upper = first[row + 1] + 2 * second[row + 1]
            results += (first[row] + 2 * second[row] + 2 * tl.where(q == 3, -upper, upper) << (2 * q),)
    return results
