"""Activations and codes in registers: four at a time, in words of 32 bits.

A run is four consecutive activations of a thread: two words of two bf16 or fp16 each, or four words of fp32.
An array of words has one element for each thread. Four codes are the bytes of one word, the first one lowest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.floats import widened


@triton.constexpr_function
def words_of_run(dtype):
    """Words of four activations."""
    return 4 if dtype == tl.float32 else 2


@triton.jit
def four(tile):
    """The columns of [T, 4]."""
    T: tl.constexpr = tile.shape[0]
    even, odd = tl.split(tl.reshape(tile, [T, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_words(x, at, words, OFFSET: tl.constexpr, COUNT: tl.constexpr, EVEN_K: tl.constexpr):
    """COUNT words, 2 or 4, from word `at` [T] + OFFSET of x on; 0 from `words` on, unless EVEN_K.

    The pointers to `at` are made before OFFSET is added, which makes that a constant of the load.
    """
    offsets = OFFSET + tl.arange(0, COUNT)[None, :]
    pointer = (x.to(tl.pointer_type(tl.int32), bitcast=True) + at)[:, None] + offsets  # [T, COUNT]
    if EVEN_K:
        loaded = tl.load(pointer)
    else:
        loaded = tl.load(pointer, mask=at[:, None] + offsets < words, other=0)
    if COUNT == 4:
        result = four(loaded)
    else:
        result = tl.split(loaded)
    return result


@triton.jit
def floats_of_run(run, DTYPE: tl.constexpr):
    """The four activations of a run, as fp32."""
    if tl.float32 == DTYPE:
        result = (
            run[0].to(tl.float32, bitcast=True), run[1].to(tl.float32, bitcast=True),
            run[2].to(tl.float32, bitcast=True), run[3].to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:
        result = (
            lower_half(run[0], DTYPE), lower_half(run[0] >> 16, DTYPE),
            lower_half(run[1], DTYPE), lower_half(run[1] >> 16, DTYPE),
        )  # fmt: skip
    return result


@triton.jit
def lower_half(word, DTYPE: tl.constexpr):
    """The number in the lower 16 bits of a word, as fp32."""
    return widened(word.to(tl.int16).to(DTYPE, bitcast=True))


@triton.constexpr_function
def widening(dtype):
    """Lines of PTX that open a block and make x0 to x3, fp32, of the run in $1, $2 and so on."""
    lines = ["{ .reg .f32 x0, x1, x2, x3;"]
    if dtype == tl.float32:
        return [*lines, *(f"mov.b32 x{i}, ${i + 1};" for i in range(4))]
    for i, word in enumerate(("$1", "$2")):
        if dtype == tl.bfloat16:
            lines += [f"{{ .reg .b32 t; shl.b32 t, {word}, 16; mov.b32 x{2 * i}, t;"]
            lines += [f"and.b32 t, {word}, 0xFFFF0000; mov.b32 x{2 * i + 1}, t; }}"]
        else:
            lines += [f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {word}; cvt.f32.f16 x{2 * i}, l;"]
            lines += [f"cvt.f32.f16 x{2 * i + 1}, h; }}"]
    return lines


@triton.jit
def lowest_bytes(b0, b1, b2, b3, COMPILED: tl.constexpr):
    """The lowest bytes of four int32, in one word."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = (b0 & 0xFF) | (b1 & 0xFF) << 8 | (b2 & 0xFF) << 16 | (b3 & 0xFF) << 24
    return word


@triton.jit
def lower_and_upper(lower, upper, COMPILED: tl.constexpr):
    """The lower halves of the bytes of one word, and the upper halves of those of another."""
    if COMPILED:
        result = tl.inline_asm_elementwise(  # one instruction; the compiler would make two with a mask each
            "lop3.b32 $0, $1, 0x0F0F0F0F, $2, 0xE2;", "=r,r,r", [lower, upper],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = (lower & 0x0F0F0F0F) | (upper & -0x0F0F0F10)
    return result


@triton.jit
def signed_byte(word, B: tl.constexpr):
    """Byte B of a word, with its sign."""
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def sum_of_bytes(word, total, COMPILED: tl.constexpr):
    """A total plus the 4 signed bytes of a word."""
    if COMPILED:
        result = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, word * 0 + 0x01010101, total],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = total
        for i in tl.static_range(4):
            result += signed_byte(word, i)
    return result
