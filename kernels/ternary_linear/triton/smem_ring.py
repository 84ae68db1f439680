"""A ring of buffers in shared memory, through which each warp prefetches the words of its weights.

Words are requested with `cp.async` long before they are used, and hold no register meanwhile. In each step a
warp needs 16 rows of 256 columns, 64 bytes a row:

    thread (r, q) copies    16 bytes of row r and 16 of row r + 8: its quarter q, 4 words
    thread (r, q) loads     words q, 4 + q, 8 + q and 12 + q of both rows, by two `ldmatrix` of four 8 x 8
                            matrices

These are the operands of a matrix instruction as it wants them, without a move. As rows are 64 bytes long,
every second row would start at the same banks; so the quarters of a row are permuted, quarter q of row r
lying at place q ^ (r // 2), and no two rows of a matrix share banks.

With STAGES = 3, step s of a warp is

    wait      until 2 groups of copies at most are in flight: those of steps s + 1 and s + 2
    barrier   of the warp: what its other threads copied is there as well
    load      the words of step s
    barrier   of the warp: all threads have loaded, so the buffer is free
    copy      the words of step s + 3 into it: the next group
    multiply  the words of step s

Each warp has a part of the ring for itself, so no barrier of the whole program is needed.

Triton does not know this memory: PTX declares it in `make`, whose result is its address. Triton's interpreter
has none, and loads words from where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.triton.registers import four
from neuzip.kernels.ternary_linear.weight import BLOCK_K

STAGE_BYTES = 4 * BLOCK_K
"""Bytes of a warp's words in one step: 16 rows of BLOCK_K columns."""

_LOWER_ROWS, _STAGE_BYTES = tl.constexpr(BLOCK_K // 2), tl.constexpr(STAGE_BYTES)


@triton.jit
def make(warp, r, q, STAGES: tl.constexpr, NUM_WARPS: tl.constexpr, COMPILED: tl.constexpr):
    """Addresses in a new ring: where a thread copies words to, and the two places that it loads from."""
    of_warp = warp * (STAGES * _STAGE_BYTES)
    to = of_warp + r * 64 + (q ^ (r // 2)) * 16
    # Thread 8 m + i gives the address of row i of matrix m: rows 0 to 7, 8 to 15, and both once more.
    m, i = r // 2, r % 2 * 4 + q
    at = of_warp + m % 2 * (_STAGE_BYTES // 2) + i * 64 + (m // 2 ^ (i // 2)) * 16
    if COMPILED:
        base = tl.inline_asm_elementwise(
            _declare(NUM_WARPS * STAGES), "=r,r", [warp], dtype=tl.int32, is_pure=False, pack=1
        )
        to += base
        at += base
    return to, at, at ^ 32


@triton.constexpr_function
def _declare(stages):
    return f"{{ .shared .align 64 .b8 ring[{STAGE_BYTES * stages}]; mov.u32 $0, ring; }}"


@triton.jit
def warp_sync(thread, COMPILED: tl.constexpr):
    """A barrier of each warp: what its threads wrote is visible to all, and no load moves across."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [thread],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def begin_copy(
    ring, words, mask, STEP: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, COMPILED: tl.constexpr
):
    """Start to copy the words of a step from pointers [T]; zeros where not `mask`, unless EVEN_K."""
    if COMPILED:
        tl.inline_asm_elementwise(
            _copying(STEP % STAGES, STEP >= STAGES, EVEN_K), "=r,r,l,r",
            [ring[0], words.to(tl.int64), tl.where(mask, 16, 0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def _copying(stage, again, even):
    size = "16" if even else "16, $3"
    to = STAGE_BYTES * stage
    sync = "bar.warp.sync 0xffffffff; " if again else ""
    return (
        f"{sync}cp.async.cg.shared.global [$1 + {to}], [$2], {size};"
        f" cp.async.cg.shared.global [$1 + {to + STAGE_BYTES // 2}], [$2 + {STAGE_BYTES // 2}], {size};"
        " cp.async.commit_group; mov.b32 $0, 0;"
    )


@triton.jit
def take(
    ring,
    words,
    mask,
    q,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Wait for the words of one of STEPS steps and load them: four of row r, four of row r + 8."""
    if COMPILED:
        IN_FLIGHT: tl.constexpr = (STEP + STAGES if STEP + STAGES < STEPS else STEPS) - STEP - 1
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _taking(STEP % STAGES, IN_FLIGHT), "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [ring[1], ring[2]],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        upper, lower = (a, c, e, g), (b, d, f, h)
    else:
        at = (words - 3 * q)[:, None] + 4 * tl.arange(0, 4)[None, :]  # [T, 4]
        upper = four(tl.load(at, mask=mask[:, None], other=0))
        lower = four(tl.load(at + _LOWER_ROWS, mask=mask[:, None], other=0))
    return upper, lower


@triton.constexpr_function
def _taking(stage, in_flight):
    at = STAGE_BYTES * stage
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    return (
        f"cp.async.wait_group {in_flight}; bar.warp.sync 0xffffffff;"
        f" {load} {{$0, $1, $2, $3}}, [$8 + {at}]; {load} {{$4, $5, $6, $7}}, [$9 + {at}];"
    )
