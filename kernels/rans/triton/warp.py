"""Instructions of a warp in PTX, with plain Triton in their place for the interpreter: ballot, rank, sum."""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.launch import is_compiled


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not is_compiled(_probe))
"""Whether Triton's interpreter runs the kernels: it has no PTX."""


@triton.jit
def ballot(which):
    """One bit a lane of the warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r", [which.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def count_ones(x):
    """How many bits are set."""
    if INTERPRETED:
        n = x & 1
        for i in tl.static_range(1, 32):
            n += (x >> i) & 1
        return n
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def lanes_below(ballot):
    """Those bits of a ballot that belong to lower lanes."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 $0, m, $1; }",
        "=r,r", [ballot], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sum_of_warp(x):
    """The sum over the 32 lanes, in all of them. x: [lanes] int32."""
    if INTERPRETED:
        rows = tl.reshape(x, [x.shape[0] // 32, 32])
        return tl.reshape(tl.broadcast_to(tl.sum(rows, 1)[:, None], rows.shape), x.shape)
    return tl.inline_asm_elementwise(
        "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def rank_of(which):
    """For each lane, how many lower ones of its warp are chosen; and how many are at all. which: [lanes]."""
    if INTERPRETED:
        n = which.to(tl.int32)
        rows = tl.reshape(n, [n.shape[0] // 32, 32])
        return tl.reshape(tl.cumsum(rows, 1), n.shape) - n, sum_of_warp(n)
    chosen = ballot(which)
    return count_ones(lanes_below(chosen)), count_ones(chosen)
