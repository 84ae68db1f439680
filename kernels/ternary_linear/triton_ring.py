"""Words of weights by way of shared memory: asked for long before they are used, and held in no register.

A thread copies what it will use itself, 16 bytes of row r and of row r + 8 a turn, so no thread waits for
another. Copies end in the order they were begun in, a group for each turn. A place is filled again when its
words have been loaded from it. Nothing in PTX says that a copy is not ahead of such a load; ptxas keeps them
in order, and a copy goes to the memory of the card first.

The interpreter has no shared memory: it loads words where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_codes import four
from .weight import STEP

TURN_BYTES = 4 * STEP
"""Of a warp's words in a turn: 16 rows of STEP columns."""

MOST_TURNS = 40
"""Of all warps of a program that are under way, at most: of 48 KB, sums are exchanged in the rest."""

_ROWS_BEHIND, _TURN_BYTES = tl.constexpr(STEP // 2), tl.constexpr(TURN_BYTES)


@triton.jit
def make(warp, own, AHEAD: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Where each thread has its words in a ring of AHEAD turns of W warps; `own` says where in a turn."""
    ring = warp * (AHEAD * _TURN_BYTES) + own * 4
    if ASM:
        ring = tl.inline_asm_elementwise(
            _making(W * AHEAD), "=r,r", [ring], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    return ring


@triton.constexpr_function
def _making(turns):
    return (
        f"{{ .shared .align 16 .b8 ring[{TURN_BYTES * turns}]; .reg .b32 base; mov.u32 base, ring;"
        " add.u32 $0, base, $1; }"
    )


@triton.jit
def begin_copy(
    ring, words, inside, TURN: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr
):
    """Begin to copy the words of a turn, pointers [T]; zeros unless `inside`, which with EVEN all are."""
    if ASM:
        tl.inline_asm_elementwise(
            _copying(TURN % AHEAD, EVEN), "=r,r,l,r", [ring, words.to(tl.int64), tl.where(inside, 16, 0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def _copying(place, even):
    size = "16" if even else "16, $3"
    to = TURN_BYTES * place
    return (
        f"cp.async.cg.shared.global [$1 + {to}], [$2], {size};"
        f" cp.async.cg.shared.global [$1 + {to + TURN_BYTES // 2}], [$2 + {TURN_BYTES // 2}], {size};"
        " cp.async.commit_group; mov.b32 $0, 0;"
    )


@triton.jit
def take(
    ring, words, inside, TURN: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr
):
    """The four words of rows r and of rows r + 8 in one of TURNS turns, when they are there."""
    if ASM:
        LATER: tl.constexpr = (TURN + AHEAD if TURN + AHEAD < TURNS else TURNS) - TURN - 1
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _taking(TURN % AHEAD, LATER), "=r,=r,=r,=r,=r,=r,=r,=r,r", [ring],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        upper, lower = (a, b, c, d), (e, f, g, h)
    else:
        at = words[:, None] + tl.arange(0, 4)[None, :]
        upper = four(tl.load(at, mask=inside[:, None], other=0))
        lower = four(tl.load(at + _ROWS_BEHIND, mask=inside[:, None], other=0))
    return upper, lower


@triton.constexpr_function
def _taking(place, later):
    at = TURN_BYTES * place
    return (
        f"cp.async.wait_group {later}; ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$8 + {at}];"
        f" ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$8 + {at + TURN_BYTES // 2}];"
    )
