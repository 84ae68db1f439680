"""What the kernels that decode packed weights and those that multiply with them have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def side_by_side(low, high, ASM: tl.constexpr):
    """Of the low and high bytes of 4 slots, int32 each, the weights: the first two, and the last two.

    ASM: by an instruction of NVIDIA's GPUs, which the interpreter does not have.
    """
    if ASM:
        first = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
        second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first = (low & 0xFF) | (high & 0xFF) << 8 | (low & 0xFF00) << 8 | (high & 0xFF00) << 16
        low, high = (low >> 16) & 0xFFFF, (high >> 16) & 0xFFFF
        second = (low & 0xFF) | (high & 0xFF) << 8 | (low & 0xFF00) << 8 | (high & 0xFF00) << 16
    return first, second


@triton.jit
def as_start(loaded):
    """Where the escapes of a row begin, as row_start has it: in 16 bits if that is enough."""
    return loaded.to(tl.int32) & 0xFFFF if loaded.dtype == tl.int16 else loaded
