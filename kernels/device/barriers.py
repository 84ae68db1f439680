"""Barriers of shared memory, on Hopper, in Gluon: what a loader and those that multiply wait at."""

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
