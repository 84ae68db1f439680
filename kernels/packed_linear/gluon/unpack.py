"""From words in shared memory to weights in the registers that a warp-group instruction reads, on Hopper.

A thread (r, q) of a warp has the words q of rows r and r + 8 of a tile. What it unpacks from them is what it
has to give to m64nNk16, so nothing moves between threads. Far words and escapes are loaded to registers,
where their records say, which are loaded before.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from neuzip.kernels.packed_linear.form import PackedLayout
from neuzip.kernels.packed_linear.tensor import format_of
from neuzip.kernels.packed_linear.triton.slots import low_bytes, signs_of, unsigned_bytes

HIGH_PLANES_F16 = gl.constexpr(PackedLayout(format_of(torch.float16), 8).planes - 8)
HIGH_PLANES_BF16 = gl.constexpr(PackedLayout(format_of(torch.bfloat16), 8).planes - 8)
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Rows r and r + 8 of word q of a tile: a warp has the tile, a thread (r, q) both.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1]], [[0, 0, 16], [0, 0, 32], [0, 0, 2], [0, 0, 4], [0, 0, 8]], [[1, 0, 0], [2, 0, 0]], [],
        [4, 1, 64],
    )
)  # fmt: skip


NO_ESCAPE = 31 << 9
"""Where a thread has none: the number of high bytes that there are not."""


def _escapes_turned() -> str:
    """PTX: turn the bits of high bytes in which escapes differ. Most threads have no escape.

    $0 to $7 are high bytes, $8 to $15 the same before; $16 the thread's first escape, $17 where those behind
    the first ones of all threads begin, $18 the number of $0, $19 the escapes, $20 the thread.
    """
    lines = [
        "{ .reg .pred p, mine, here; .reg .b32 e, number, shift, bits; .reg .b64 at;",
        f"mov.b32 e, $16; setp.eq.u32 p, e, {NO_ESCAPE}; @p bra DONE_${{:uid}};",
        "mad.wide.s32 at, $17, 4, $19;",
        "NEXT_${:uid}: bfe.u32 bits, e, 16, 5; setp.eq.u32 mine, bits, $20;",
        "bfe.u32 number, e, 9, 5; sub.u32 number, number, $18;",
        "bfe.u32 shift, e, 7, 2; shl.b32 shift, shift, 3; and.b32 bits, e, 0x7f; shl.b32 bits, bits, shift;",
        "@!mine mov.b32 bits, 0;",
        *(f"setp.eq.u32 here, number, {i}; @here xor.b32 ${i}, ${i}, bits;" for i in range(8)),
        "and.b32 bits, e, 0x8000; setp.eq.u32 p, bits, 0; @p bra DONE_${:uid};",
        "ld.global.b32 e, [at]; add.s64 at, at, 4; bra NEXT_${:uid}; DONE_${:uid}: }",
    ]
    return "\n".join(lines)


_NO_ESCAPE = gl.constexpr(NO_ESCAPE)
_SIGNS_AND_FARS = (
    gl.constexpr(  # lop3 0xe4 takes bits of the first where the third has ones, else of the second
        "{ .reg .b32 far; shf.l.wrap.b32 far, $3, $3, $4;"
        " lop3.b32 $0, $2, far, $5, 0xe4; lop3.b32 $1, far, $2, $5, 0xe4; }"
    )
)
_TURNED = gl.constexpr(_escapes_turned())
_TURNED_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + [str(i) for i in range(8)] + ["r", "r", "r", "l", "r"]))


@gluon.jit
def _set_bits(word):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _record(record):
    """A mask, and where what it speaks of begins."""
    return record.to(gl.int32), (record >> 32).to(gl.int32)


@gluon.jit
def load_far(far, record, bit):
    """The far words of rows r and r + 8, 0 where there is none."""
    mask, start = _record(record)
    at = far + start + _set_bits(mask & ~((gl.zeros_like(mask) - 1) << bit))
    own, next_own = (mask >> bit) & 1, (mask >> (bit + 1)) & 1
    return gl.load(at, mask=own != 0, other=0), gl.load(at + own, mask=next_own != 0, other=0)


@gluon.jit
def load_escape(escapes, record, lane):
    """A thread's first escape in a turn, or one that is nowhere; where those behind all first ones begin."""
    mask, start = _record(record)
    at = start + _set_bits(mask & ((1 << lane) - 1))
    return gl.load(escapes + at, mask=((mask >> lane) & 1) != 0, other=_NO_ESCAPE), start + _set_bits(mask)


@gluon.jit
def _by_thread(words):
    return gl.convert_layout(gl.reshape(gl.permute(words, (0, 2, 1)), [128]), THREADS, assert_trivial=True)


@gluon.jit
def _plane(words, number, GROUP: gl.constexpr):
    """A word of rows r, and one of rows r + 8, of a plane in shared memory."""
    tiles = words.index(number).slice(4 * GROUP, 4, dim=0).load(_WORDS)
    a, b = gl.split(gl.reshape(tiles, [4, 4, 8, 2]))
    return _by_thread(a), _by_thread(b)


@gluon.jit
def _planes(words, turn, other, P: gl.constexpr, WANTED: gl.constexpr, GROUP: gl.constexpr):
    """Words of all planes of a turn, of rows r, and of rows r + 8; of planes that are not WANTED another."""
    a = ()
    b = ()
    for p in gl.static_range(P):
        if (WANTED >> p) & 1:
            of_a, of_b = _plane(words, turn + p, GROUP)
            a += (of_a,)
            b += (of_b,)
        else:
            a += (other,)
            b += (other,)
    return a, b


@gluon.jit
def _rotated(word, BITS: gl.constexpr):
    """A word whose bits go to the left, and those that leave it to its right end."""
    return gl.inline_asm_elementwise(
        "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [word, BITS], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _signs_and_fars(sign, far, HALF: gl.constexpr):
    """Two words, each with the signs of 4 groups of 4 slots and their far bits, which one rotation moves.

    From bit G of a byte the sign of group G goes to bit 7, its far bit to bit 5 (HALF) or 2. The first word
    has groups 0, 1, 4 and 5 (HALF), or 0, 2, 4 and 6: bits of others would come to the same places.
    """
    FAR: gl.constexpr = 30 if HALF else 27
    FIRST: gl.constexpr = 0x33333333 if HALF else 0x55555555
    return gl.inline_asm_elementwise(
        _SIGNS_AND_FARS, "=&r,=r,r,r,r,r", [sign, far, FAR, FIRST], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def half_bytes(
    words, turn, fars, escape, others, escapes, lane, base4,
    P: gl.constexpr, LOW: gl.constexpr, HALF: gl.constexpr, H: gl.constexpr, WANTED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The low and the high bytes of half of the slots: for each 4 those of row r, then of row r + 8.

    Escapes differ in up to 7 bits of their high bytes.
    """
    planes = _planes(words, turn, escape, P, WANTED, GROUP)
    lows = ()
    highs = ()
    TURNED: gl.constexpr = 0x20202020 if HALF else 0x04040404
    bits = ()
    for row in gl.static_range(2):
        bits += (_signs_and_fars(signs_of(planes[row], LOW, HALF), fars[row], HALF),)
    for g in gl.static_range(4 * H, 4 * H + 4):
        for row in gl.static_range(2):
            lows += (low_bytes(planes[row], LOW, g),)
            own = bits[row][(g // 2 if HALF else g) % 2]
            own = _rotated(own, 7 - g) & (TURNED | -0x7F7F7F80)
            highs += (unsigned_bytes(planes[row], base4, LOW, HALF, g) ^ own,)
    return lows, _turn_escapes(highs, escape, others, escapes, lane, 8 * H)


@gluon.jit
def _turn_escapes(h, escape, others, escapes, lane, FIRST: gl.constexpr):
    """High bytes with those of a thread's escapes. Not pure: see `_pairs`."""
    return gl.inline_asm_elementwise(
        _TURNED, _TURNED_OPERANDS,
        [h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7], escape, others, FIRST, escapes, lane],
        dtype=(gl.int32,) * 8, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pairs(low, high):
    """Two pairs of weights from the bytes of four. Not pure: the compiler leaves it where it stands."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=&r,=r,r,r", [low, high],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _numbers(pair, HALF: gl.constexpr):
    low, high = (pair & 0xFFFF).to(gl.uint16), ((pair >> 16) & 0xFFFF).to(gl.uint16)
    both = gl.join(low, high)
    return both.to(gl.float16, bitcast=True) if HALF else both.to(gl.bfloat16, bitcast=True)


@gluon.jit
def half_weights(lows, highs, HALF: gl.constexpr, SUMS: gl.constexpr):
    """[64, 64] weights, each thread's as the instruction wants them of it."""
    groups = ()
    for g in gl.static_range(4):
        a0, a2 = _pairs(lows[2 * g], highs[2 * g])
        a1, a3 = _pairs(lows[2 * g + 1], highs[2 * g + 1])
        first = gl.join(_numbers(a0, HALF), _numbers(a1, HALF))
        groups += (gl.join(first, gl.join(_numbers(a2, HALF), _numbers(a3, HALF))),)
    # warp, r, q, of a pair, row r or r + 8, half of an instruction, g
    tile = gl.permute(gl.reshape(_all_four(groups), [4, 8, 4, 2, 2, 2, 4]), (0, 4, 1, 6, 5, 2, 3))
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    return gl.convert_layout(gl.reshape(tile, [64, 64]), WEIGHTS, assert_trivial=True)


@gluon.jit
def _all_four(groups):
    """Four arrays as one, with two last axes of 2: the bits of their numbers."""
    return gl.join(gl.join(groups[0], groups[2]), gl.join(groups[1], groups[3]))
