"""Words of weights by way of shared memory: asked for long before they are used, and held in no register.

A thread copies 16 bytes of row r and of row r + 8 a turn, and gets the words of matrix instructions, which
others of its warp have copied: `ldmatrix` gives thread (r, q) words q, 4 + q, 8 + q and 12 + q of both rows.
Of rows that are 64 bytes long, every other would lie in the same banks; so the four pieces of a row change
places with each other, in another way for every second row.

Copies end in the order they were begun in, a group for each turn. A place is filled again when all threads of
a warp have loaded its words.

The interpreter has no shared memory: it loads words where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.one_token_int8 import four
from neuzip.kernels.ternary_linear.weight import STEP

TURN_BYTES = 4 * STEP
"""Of a warp's words in a turn: 16 rows of STEP columns."""

_ROWS_BEHIND, _TURN_BYTES = tl.constexpr(STEP // 2), tl.constexpr(TURN_BYTES)


@triton.jit
def make(warp, r, q, AHEAD: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """A ring of AHEAD turns of W warps: where a thread copies words to, and the two places it loads from."""
    of_warp = warp * (AHEAD * _TURN_BYTES)
    to = of_warp + r * 64 + (q ^ (r // 2)) * 16
    # Thread 8 m + i names row i of the m-th of four matrices: rows up to 7, from 8 on, and both once more.
    m, i = r // 2, r % 2 * 4 + q
    at = of_warp + m % 2 * (_TURN_BYTES // 2) + i * 64 + (m // 2 ^ (i // 2)) * 16
    if ASM:
        base = tl.inline_asm_elementwise(
            _making(W * AHEAD), "=r,r", [warp], dtype=tl.int32, is_pure=False, pack=1
        )
        to += base
        at += base
    return to, at, at ^ 32


@triton.constexpr_function
def _making(turns):
    return f"{{ .shared .align 64 .b8 ring[{TURN_BYTES * turns}]; mov.u32 $0, ring; }}"


@triton.jit
def meet(thread, ASM: tl.constexpr):
    """All threads of a warp meet: what they wrote is there for each, and loads are not moved over this."""
    if ASM:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [thread],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def begin_copy(
    ring, words, inside, TURN: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr
):
    """Begin to copy the words of a turn, pointers [T]; zeros unless `inside`, which with EVEN all are."""
    if ASM:
        tl.inline_asm_elementwise(
            _copying(TURN % AHEAD, TURN >= AHEAD, EVEN), "=r,r,l,r",
            [ring[0], words.to(tl.int64), tl.where(inside, 16, 0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def _copying(place, again, even):
    size = "16" if even else "16, $3"
    to = TURN_BYTES * place
    meet = "bar.warp.sync 0xffffffff; " if again else ""
    return (
        f"{meet}cp.async.cg.shared.global [$1 + {to}], [$2], {size};"
        f" cp.async.cg.shared.global [$1 + {to + TURN_BYTES // 2}], [$2 + {TURN_BYTES // 2}], {size};"
        " cp.async.commit_group; mov.b32 $0, 0;"
    )


@triton.jit
def take(
    ring, words, inside, q, TURN: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr
):
    """The four words of rows r and of rows r + 8 in one of TURNS turns, when they are there."""
    if ASM:
        LATER: tl.constexpr = (TURN + AHEAD if TURN + AHEAD < TURNS else TURNS) - TURN - 1
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _taking(TURN % AHEAD, LATER), "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [ring[1], ring[2]],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        upper, lower = (a, c, e, g), (b, d, f, h)
    else:
        at = (words - 3 * q)[:, None] + 4 * tl.arange(0, 4)[None, :]
        upper = four(tl.load(at, mask=inside[:, None], other=0))
        lower = four(tl.load(at + _ROWS_BEHIND, mask=inside[:, None], other=0))
    return upper, lower


@triton.constexpr_function
def _taking(place, later):
    at = TURN_BYTES * place
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    return (
        f"cp.async.wait_group {later}; bar.warp.sync 0xffffffff;"
        f" {load} {{$0, $1, $2, $3}}, [$8 + {at}]; {load} {{$4, $5, $6, $7}}, [$9 + {at}];"
    )
