"""Floats in Triton with the bits that torch gives, in the interpreter too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x):
    """bf16, fp16 or fp32 as fp32. (The interpreter's own conversion gets denormals of bf16 wrong.)"""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def rounded(x, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """fp32 in another dtype, to nearest even: the interpreter would cut off what bf16 cannot hold."""
    if COMPILED or tl.bfloat16 != DTYPE:
        y = x.to(DTYPE)
    else:
        bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
        bits += 0x7FFF + ((bits >> 16) & 1)
        y = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y
