"""Escapes among the weights that a warp unpacks, in Triton.

A unit is a tile of 16 rows and a turn of 128 columns: 4 KB of weights, of which a thread of a warp has 8
times 4 pairs. The warp has as much shared memory, all zeros, and writes the weight of each escape to the
offset that stands in its entry. Then every thread reads a patch for each pair: the escapes in it, and 0 for
other weights. Fields of escapes hold the code 0. So a pair is what its codes make, plus its patch, exactly.

Neighbouring threads read and write neighbouring 16 bytes, so there are no conflicts of banks. A thread clears
what it has read, and only the threads of a warp wait for each other.

The interpreter has no shared memory: there the patches of a unit are a tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT_BYTES = tl.constexpr(4096)
"""Bytes of the weights of a unit."""

MOST_WARPS = 8
"""Warps of a program, at most, a power of two: PTX declares up to 48 KB of shared memory."""


@triton.jit
def reserve_patches(W: tl.constexpr, COMPILED: tl.constexpr):
    """Zeros in new shared memory for each of W warps: where a thread's warp has its own, an int32 [32 W]."""
    t = tl.arange(0, 32 * W)
    memory = t // 32 * UNIT_BYTES
    if COMPILED:
        memory = tl.inline_asm_elementwise(
            _reservation(W), "=&r,r,r", [memory, t % 32 * 16], dtype=tl.int32, is_pure=False, pack=1
        )
    return memory


@triton.jit
def load_span(unit_start, unit, end, W: tl.constexpr):
    """Where a thread's first escape of a unit may be, and where those of the unit end: where `end` begins.

    The threads of a warp have one unit; without escapes, both are the same.
    """
    return tl.load(unit_start + unit) + tl.arange(0, 32 * W) % 32, tl.load(unit_start + end)


@triton.jit
def load_entry(escapes, span):
    """The first escape of each thread, or 0: the others are loaded when all are written."""
    return tl.load(escapes + span[0], mask=span[0] < span[1], other=0)


@triton.jit
def write_patches(memory, entries, spans, escapes, W: tl.constexpr, COMPILED: tl.constexpr):
    """Write the escapes of a unit for each warp: the first of those whose entries and spans are loaded."""
    entry = entries[0]
    first, stop = spans[0]
    if COMPILED:
        tl.inline_asm_elementwise(
            _writing(), "=r,r,r,r,r,l", [memory, entry, first, stop, escapes],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        patches = memory
    else:
        patches = _written(entry, first, stop, escapes, W)
    return patches


@triton.jit
def patches_of(patches, G: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr):
    """Patches of the pairs of slots 4 G, 4 G + 1, and the next two: for row r, then for row r + 8."""
    if COMPILED:
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            _reading(G), "=&r,=&r,=&r,=&r,r", [patches + tl.arange(0, 32 * W) % 32 * 16],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        of_group = tl.where(tl.arange(0, 8)[None, :, None] == G, tl.reshape(patches, [W, 8, 256]), 0)
        low, high = tl.split(tl.reshape(tl.sum(of_group, 1), [32 * W, 2, 2, 2]))
        upper, lower = tl.split(low | (high << 16))
        a0, a2 = tl.split(upper)
        a1, a3 = tl.split(lower)
    return (a0, a2), (a1, a3)


@triton.jit
def place_of(entry, turn, C):
    """The row of an escape in its tile, and its column, in weights of C words a row."""
    g, lane = (entry >> 9) & 7, (entry >> 4) & 31
    h, lower, e = (entry >> 3) & 1, (entry >> 2) & 1, (entry >> 1) & 1
    q = lane % 4
    within = tl.where(turn < C // 4, 16 * g + 8 * h + 2 * q + e, 32 * q + 4 * g + 2 * h + e)
    return lower * 8 + lane // 4, turn * 128 + within


@triton.jit
def _written(entry, first, stop, escapes, W: tl.constexpr):
    """For the interpreter: the 16-bit numbers of the patches of each warp, int32 [W, 2048]."""
    at = tl.arange(0, 2048)[None, None, :]
    patches = tl.zeros([W, 2048], tl.int32)
    for _ in range(tl.cdiv(tl.max(tl.maximum(stop - first, 0)), 32)):
        place = tl.where(first < stop, (entry & 0xFFFF) // 2, -1)
        is_there = tl.reshape(place, [W, 32])[:, :, None] == at
        patches += tl.sum(tl.where(is_there, tl.reshape((entry >> 16) & 0xFFFF, [W, 32])[:, :, None], 0), 1)
        first += 32
        entry = tl.load(escapes + first, mask=first < stop, other=0)
    return patches


@triton.constexpr_function
def _reservation(warps):
    """PTX: declare shared memory, and clear what a thread will read of it."""
    clear = " ".join(f"st.shared.v4.b32 [own + {512 * g}], {{zero, zero, zero, zero}};" for g in range(8))
    return (
        f"{{ .shared .align 16 .b8 patches[{4096 * warps}]; .reg .b32 own, zero; mov.u32 $0, patches;"
        f" add.u32 $0, $0, $1; add.u32 own, $0, $2; mov.b32 zero, 0; {clear} }}"
    )


@triton.constexpr_function
def _writing():
    """PTX: write a thread's first entry, and each 32nd after it, when its warp has cleared what was there."""
    return (
        "{ .reg .pred p; .reg .b32 e, i, to; .reg .b16 none, weight; .reg .b64 at;"
        " bar.warp.sync 0xffffffff; mov.b32 e, $2; mov.b32 i, $3; setp.ge.s32 p, i, $4; @p bra DONE_${:uid};"
        " NEXT_${:uid}: and.b32 to, e, 0xfff; add.u32 to, to, $1; mov.b32 {none, weight}, e;"
        " st.shared.b16 [to], weight; add.s32 i, i, 32; setp.ge.s32 p, i, $4; @p bra DONE_${:uid};"
        " mad.wide.s32 at, i, 4, $5; ld.global.b32 e, [at]; bra NEXT_${:uid};"
        " DONE_${:uid}: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.constexpr_function
def _reading(g):
    """PTX: read 16 bytes of patches, and clear them."""
    return (
        f"{{ .reg .b32 zero; ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {512 * g}]; mov.b32 zero, 0;"
        f" st.shared.v4.b32 [$4 + {512 * g}], {{zero, zero, zero, zero}}; }}"
    )
