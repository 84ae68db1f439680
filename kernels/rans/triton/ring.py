"""Words of blocks on their way through shared memory, in Triton, for warps that decode full blocks.

    table     4,096 slots of 32 bits, for all warps of the program: 16 KB
    a warp    a ring of 1,024 words, in four pieces, 2 KB, and what else the kernel needs

Copies to shared memory end in the order they were begun in, and are waited for in groups. A piece is copied
when the one whose place it takes has been read.

The interpreter has no shared memory: it reads words where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.numbers import LANES, LOWER, SCALE, SCALE_BITS

PIECE, PIECES = 256, 4
"""Words of a piece, and pieces of a ring."""

TABLE_BYTES, RING_BYTES = 4 * SCALE, 2 * PIECE * PIECES
"""Bytes of shared memory: of a program's table, and of a warp's ring."""

_LANES, _SLOTS, _SCALE_BITS, _LOWER = (tl.constexpr(v) for v in (LANES, SCALE - 1, SCALE_BITS, LOWER))
_TABLE_BYTES, _RING_BYTES, _PIECES = (tl.constexpr(v) for v in (TABLE_BYTES, RING_BYTES, PIECES))


@triton.jit
def to_shared(tables, WARP_BYTES: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr):
    """Where the memory of a program is, once all its threads have put the table there: [L].

    It has WARP_BYTES for each warp behind the table, and if these are a multiple of a ring, one ring more.
    """
    start = tl.zeros([L], tl.int64) + tables.to(tl.int64)
    if COMPILED:
        shared = tl.inline_asm_elementwise(
            _filling(L, WARP_BYTES), "=r,l", [start], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        shared = start.to(tl.int32)
    return shared


@triton.constexpr_function
def _filling(threads, warp_bytes):
    spare = 0 if warp_bytes % RING_BYTES else RING_BYTES
    turns = range(SCALE // (4 * threads))
    words = [", ".join(f"w{4 * turn + k}" for k in range(4)) for turn in turns]
    loads = [f"ld.global.v4.b32 {{{words[i]}}}, [from + {16 * threads * i}];" for i in turns]
    stores = [f"st.shared.v4.b32 [to + {16 * threads * i}], {{{words[i]}}};" for i in turns]
    return f"""{{
        .shared .align 16 .b8 memory[{TABLE_BYTES + spare + threads // LANES * warp_bytes}];
        .reg .b32 first, to, w<{4 * len(turns)}>;
        .reg .b64 from;
        mov.u32 first, memory;
        mov.u32 to, %tid.x;
        mul.wide.u32 from, to, 16;
        add.s64 from, from, $1;
        shl.b32 to, to, 4;
        add.u32 to, to, first;
        {" ".join([*loads, *stores])}
        bar.sync 0;
        mov.u32 $0, first;
        }}"""


@triton.jit
def own_memory(shared, WARP_BYTES: tl.constexpr, L: tl.constexpr):
    """Where the memory of each lane's warp is, which begins with its ring: [L].

    If WARP_BYTES are a multiple of a ring, so are the places of rings, wherever the memory of a program is.
    """
    first = shared + _TABLE_BYTES
    if WARP_BYTES % _RING_BYTES == 0:
        first = (first + (_RING_BYTES - 1)) & -_RING_BYTES
    return first + tl.arange(0, L) // _LANES * WARP_BYTES


@triton.jit
def fill_ring(p, end, words, own, lane, COMPILED: tl.constexpr):
    """Begin to copy the first pieces: how many were begun."""
    piece = tl.zeros_like(p)
    for _ in tl.static_range(_PIECES):
        piece = copy_words(p, piece, end, words, own, lane, COMPILED)
    return piece


@triton.jit
def copy_words(p, piece, end, words, own, lane, COMPILED: tl.constexpr):
    """Begin to copy the next piece if its place has been read: how many were begun. None from `end` on."""
    if COMPILED:
        piece = tl.inline_asm_elementwise(
            _copying(), "=r,r,r,r,l,r,r", [p, piece, end, words.to(tl.int64), own, lane],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return piece


@triton.constexpr_function
def _copying():
    return f"""{{
        .reg .pred next;
        .reg .b32 at, to, size;
        .reg .b64 from;
        mul.lo.s32 at, $2, {PIECE};
        sub.s32 size, $1, at;
        setp.ge.s32 next, size, -{PIECE * (PIECES - 1)};
        @!next bra DONE;
        shl.b32 to, $6, 3;
        add.s32 at, at, to;
        mad.wide.s32 from, at, 2, $4;
        sub.s32 size, $3, at;
        shl.b32 size, size, 1;
        max.s32 size, size, 0;
        min.s32 size, size, 16;
        and.b32 to, at, {PIECE * PIECES - 1};
        shl.b32 to, to, 1;
        add.u32 to, to, $5;
        cp.async.cg.shared.global [to], [from], 16, size;
        DONE:
        selp.s32 at, 1, 0, next;
        add.s32 $0, $2, at;
        }}"""


@triton.jit
def end_group(own, COMPILED: tl.constexpr):
    """End a group of copies."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "cp.async.commit_group; mov.b32 $0, 0;", "=r,r", [own], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait(own, AHEAD: tl.constexpr, COMPILED: tl.constexpr):
    """For all groups of the warp but the last AHEAD - 1, and for the other lanes."""
    if COMPILED:
        tl.inline_asm_elementwise(_waiting(AHEAD), "=r,r", [own], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _waiting(ahead):
    return f"cp.async.wait_group {ahead - 1}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.jit
def wait_all(own, COMPILED: tl.constexpr):
    """For all copies: in the end of a block pieces that nobody needs may be in flight."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "cp.async.wait_all; mov.b32 $0, 0;", "=r,r", [own], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def next_entry(
    x, p, words, end, tables, own, shared,
    SHIFT: tl.constexpr, IN_BYTES: tl.constexpr, L: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Decode a symbol of every lane: states, words taken, and entries of the table.

    SHIFT: where the frequency begins in an entry. IN_BYTES: p counts bytes of words taken, and rings begin at
    multiples of their size, which saves an instruction.
    """
    if COMPILED:
        entry = tl.inline_asm_elementwise(
            "{ .reg .b32 at; and.b32 at, $1, 4095; shl.b32 at, at, 2; add.u32 at, at, $2;"
            " ld.shared.b32 $0, [at]; }",
            "=r,r,r", [x, shared], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        entry = tl.load(tables + (x & _SLOTS)).to(tl.uint32, bitcast=True)
    x = ((entry >> SHIFT) & 0xFFF) * (x >> _SCALE_BITS) + (entry >> 20)
    if COMPILED:
        x, p = tl.inline_asm_elementwise(
            _refilling(IN_BYTES), "=r,=r,r,r,r,r", [x, p, own, (1 << tl.arange(0, L) % _LANES) - 1],
            dtype=(tl.uint32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    elif IN_BYTES:
        x, p = refilled(x, p >> 1, words, end, L)
        p = p << 1
    else:
        x, p = refilled(x, p, words, end, L)
    return x, p, entry


@triton.jit
def refilled(x, p, words, end, L: tl.constexpr):
    """States, those that were small with the next words before `end` in the order of lanes, and words taken.

    Without instructions of a warp: for the interpreter.
    """
    need = x < _LOWER
    flags = tl.reshape(need.to(tl.int32), [L // _LANES, _LANES])
    at = p + tl.reshape(tl.cumsum(flags, axis=1) - flags, [L])
    word = tl.load(words + at, mask=need & (at < end), other=0).to(tl.uint32)
    p += tl.reshape(tl.broadcast_to(tl.sum(flags, axis=1)[:, None], [L // _LANES, _LANES]), [L])
    return tl.where(need, (x << 16) | word, x), p


@triton.constexpr_function
def _refilling(in_bytes):
    ring = PIECE * PIECES
    in_words = f"add.s32 at, at, $3; and.b32 at, at, {ring - 1}; shl.b32 at, at, 1; add.u32 at, at, $4;"
    bytes_in_ring = f"shl.b32 at, at, 1; add.s32 at, at, $3; lop3.b32 at, at, {2 * ring - 1}, $4, 0xEA;"
    return f"""{{
        .reg .pred need;
        .reg .b32 ballot, lower, at, word, filled, all;
        setp.lo.u32 need, $2, 65536;
        vote.sync.ballot.b32 ballot, need, 0xffffffff;
        and.b32 lower, $5, ballot;
        popc.b32 at, lower;
        {bytes_in_ring if in_bytes else in_words}
        @need ld.shared.u16 word, [at];
        prmt.b32 filled, $2, word, 0x1054;
        selp.b32 $0, filled, $2, need;
        popc.b32 all, ballot;
        {"shl.b32 all, all, 1;" if in_bytes else ""}
        add.s32 $1, $3, all;
        }}"""


@triton.jit
def joined(low, high):
    """Two words of 32 bits in one."""
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)
