"""What warps wait at, on Hopper, in Gluon: barriers of shared memory, and counters of all programs.

barriers   what a loader of a program and its warp groups wait at
arrive     adds 1 to a counter for every thread of a warp group, after all that it has written (release)
await_     waits until so many warp groups have arrived (acquire), and sets the counter to 0 again
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Waits for all threads of a partition of warps. Triton 3.7 calls it `barrier`."""


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT of them, of which a phase ends with so many arrivals; they are to be fenced before use."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


THREADS = gl.constexpr(128)
"""Threads of a warp group."""

_ARRIVE = gl.constexpr("red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0;")
_AWAIT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 count; AGAIN_${:uid}: ld.acquire.gpu.global.b32 count, [$1];"
    " setp.lt.u32 p, count, $2; @p bra AGAIN_${:uid}; mov.b32 $0, count; }"
)


@gluon.jit
def arrive(pointers):
    """Add 1 to a counter, by each thread of a warp group. `pointers` are 128 pointers to the counter."""
    gl.inline_asm_elementwise(_ARRIVE, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_(pointers, groups):
    """Wait until so many warp groups have arrived. `pointers` are 128 pointers to a counter, which gets 0."""
    count = groups * THREADS
    gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [pointers, count], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()  # all threads have seen it
    gl.store(pointers, gl.full([THREADS], 0, gl.int32, pointers.type.layout))
