"""What threads give to m16n8k16 and get from it, in Triton: arrays [32 W] have an element for each thread.

    thread (r, q) of a warp    A: k = 2 q, 2 q + 1 of rows r and r + 8, then k = 2 q + 8, 2 q + 9 of both
                               B: k = 2 q, 2 q + 1 of column r, then k = 2 q + 8, 2 q + 9
                               C: columns 2 q, 2 q + 1 of row r, then of row r + 8

A pair of 16-bit numbers is an int32. Which columns of A and rows of B are called k is free, as long as both
have the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.floats import rounded


@triton.jit
def multiply(a, b, sums, W: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Sums C, four fp32, plus the products of A, 4 pairs of bf16 or (HALF) fp16, and B, 2 pairs."""
    if COMPILED:
        KIND: tl.constexpr = "f16" if HALF else "bf16"
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32." + KIND + "." + KIND
            + ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = _multiplied(a, b, sums, W, HALF)
    return result


@triton.jit
def side_by_side(low, high, COMPILED: tl.constexpr):
    """Interleave the bytes of two int32: low 0, high 0, low 1, high 1, and those of bytes 2 and 3.

    COMPILED: by an instruction of NVIDIA's GPUs, which the interpreter does not have.
    """
    if COMPILED:
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
def halves_together(one, other, COMPILED: tl.constexpr):
    """The lower halves of two int32 side by side, and the upper halves."""
    if COMPILED:
        lower = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
        )
        upper = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = (one & 0xFFFF) | (other << 16)
        upper = ((one >> 16) & 0xFFFF) | (other & -65536)
    return lower, upper


@triton.jit
def masked_or(word, MASK: tl.constexpr, MORE: tl.constexpr, COMPILED: tl.constexpr):
    """The bits of an int32 that MASK has, and those of MORE: one instruction, not the compiler's two."""
    if COMPILED:
        result = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,n,r", [word, MASK, MORE],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = (word & MASK) | MORE
    return result


@triton.jit
def under(word, UPPER: tl.constexpr, BYTE: tl.constexpr, COMPILED: tl.constexpr):
    """Byte BYTE of an int32 under the three upper bytes of a constant, whose two in the middle are alike."""
    if COMPILED:
        upper = tl.full(word.shape, UPPER, tl.int32)
        result = tl.inline_asm_elementwise(
            _permute(0x7550 + BYTE), "=r,r,r", [word, upper],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = ((word >> (8 * BYTE)) & 0xFF) | UPPER
    return result


@triton.jit
def float_of(pattern, HALF: tl.constexpr):
    """What 16 bits in the lower half of an int32 are worth."""
    if HALF:
        number = (pattern & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = (pattern << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def pair_of(first, second, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Two fp32 rounded to 16 bits, as a pair."""
    if COMPILED:
        KIND: tl.constexpr = "f16x2" if HALF else "bf16x2"
        pair = tl.inline_asm_elementwise(
            "cvt.rn." + KIND + ".f32 $0, $2, $1;", "=r,f,f", [first, second],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        NUMBERS: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        low = rounded(first, NUMBERS, COMPILED).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        pair = low | (rounded(second, NUMBERS, COMPILED).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return pair


@triton.jit
def transposed(pair, COMPILED: tl.constexpr):
    """The transpose of an 8 x 8 matrix, of which thread (r, q) has columns 2 q and 2 q + 1 of row r."""
    if COMPILED:
        turned = tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pair],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        rows = tl.reshape(tl.join(pair & 0xFFFF, (pair >> 16) & 0xFFFF), [8, 8])
        low, high = tl.split(tl.reshape(tl.trans(rows), [32, 2]))
        turned = low | (high << 16)
    return turned


@triton.constexpr_function
def _exchange(lanes):
    return f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"


@triton.constexpr_function
def _permute(selector):
    return f"prmt.b32 $0, $1, $2, {selector};"


@triton.jit
def exchanged(number, LANES: tl.constexpr, COMPILED: tl.constexpr):
    """What thread t ^ LANES of a warp has, fp32 [32]; LANES is a power of two."""
    if COMPILED:
        others = tl.inline_asm_elementwise(
            _exchange(LANES), "=f,f", [number],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        halves = tl.trans(tl.reshape(number, [16 // LANES, 2, LANES]), 0, 2, 1)
        first, second = tl.split(halves)
        others = tl.reshape(tl.trans(tl.join(second, first), 0, 2, 1), [32])
    return others


@triton.jit
def times_plus(pair, factors, addends, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Both numbers of a pair times one of another pair, plus one of a third, rounded once."""
    if COMPILED:
        KIND: tl.constexpr = "f16x2" if HALF else "bf16x2"
        result = tl.inline_asm_elementwise(
            "fma.rn." + KIND + " $0, $1, $2, $3;", "=r,r,r,r", [pair, factors, addends],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = pair_of(
            float_of(pair, HALF) * float_of(factors, HALF) + float_of(addends, HALF),
            float_of(pair >> 16, HALF) * float_of(factors >> 16, HALF) + float_of(addends >> 16, HALF),
            HALF, COMPILED,
        )  # fmt: skip
    return result


@triton.jit
def less(pair, NUMBER: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Both numbers of a pair less another, where that is exact."""
    one = twice(tl.full(pair.shape, 1, tl.float32), HALF)
    return times_plus(pair, one, twice(tl.full(pair.shape, -NUMBER, tl.float32), HALF), HALF, COMPILED)


@triton.jit
def twice(number, HALF: tl.constexpr):
    """The pair of an fp32 and itself."""
    pattern = _pattern(number, HALF)
    return pattern | (pattern << 16)


@triton.jit
def _pattern(number, HALF: tl.constexpr):
    """The 16 bits of an fp32 that 16 bits can hold."""
    if HALF:
        pattern = number.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        pattern = (number.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return pattern


@triton.jit
def _multiplied(a, b, sums, W: tl.constexpr, HALF: tl.constexpr):
    """For the interpreter."""
    rows = tl.join(tl.join(a[0], a[1]), tl.join(a[2], a[3]))  # warp, r, q; row r or r + 8, k or k + 8
    rows = tl.reshape(rows, [W, 8, 1, 4, 2, 2])
    columns = tl.reshape(tl.join(b[0], b[1]), [W, 1, 8, 4, 1, 2])
    products = float_of(rows, HALF) * float_of(columns, HALF)
    products += float_of(rows >> 16, HALF) * float_of(columns >> 16, HALF)
    of_rows = tl.sum(tl.sum(products, 5), 3)  # warp, r, column, row r or r + 8
    upper, lower = tl.split(of_rows)
    c0, c1 = tl.split(tl.reshape(upper, [32 * W, 2]))
    c2, c3 = tl.split(tl.reshape(lower, [32 * W, 2]))
    return sums[0] + c0, sums[1] + c1, sums[2] + c2, sums[3] + c3
