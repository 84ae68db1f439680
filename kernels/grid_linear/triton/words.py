"""Weights of a uniform grid in the registers of a thread, in Triton: from words of codes to pairs of weights.

A field of a word is a whole number u from 0 on. With the exponent of 2^(23 - b) above a field that begins
with bit b, the 32 bits are the fp32 number 2^(23 - b) + u: that takes one instruction, and no shift as long
as the field ends below bit 23. Less 2^(23 - b) and the bias that is the code, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_spare(words, WIDTH: tl.constexpr):
    """The words of a row, and behind them the one that their spare bits are together."""
    COUNT: tl.constexpr = 32 % WIDTH
    if COUNT:
        spare = words[0].to(tl.uint32, bitcast=True) >> (32 - COUNT)
        for i in tl.static_range(1, WIDTH):
            spare = (spare << COUNT) | (words[i].to(tl.uint32, bitcast=True) >> (32 - COUNT))
        words += (spare.to(tl.int32, bitcast=True),)
    return words


@triton.jit
def _masked(word, MASK: tl.constexpr, ABOVE: tl.constexpr, COMPILED: tl.constexpr):
    """The bits of MASK of a word, with those of ABOVE set: in one instruction, not the compiler's two."""
    if COMPILED:
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,n,r", [word, MASK, ABOVE],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        number = (word & MASK) | ABOVE
    return number


@triton.jit
def _code(words, SLOT: tl.constexpr, WIDTH: tl.constexpr, COMPILED: tl.constexpr):
    """The code of a slot, in fp32. Fields that end above bit 23 are taken from the word shifted by 9."""
    word = words[SLOT // (32 // WIDTH)]
    BIT: tl.constexpr = SLOT % (32 // WIDTH) * WIDTH
    SHIFTED: tl.constexpr = BIT + WIDTH > 23
    AT: tl.constexpr = BIT - 9 if SHIFTED else BIT
    if SHIFTED:
        word = word >> 9
    number = _masked(word, ((1 << WIDTH) - 1) << AT, (150 - AT) << 23, COMPILED)
    BIAS: tl.constexpr = (1 << (23 - AT)) + (1 << (WIDTH - 1))
    return number.to(tl.float32, bitcast=True) - BIAS


@triton.jit
def four_steps(step, factors, G: tl.constexpr, COLUMNS: tl.constexpr):
    """The steps of slots 4 G to 4 G + 3: of the row, or (COLUMNS) that times the factors of their columns."""
    steps = (step, step, step, step)
    if COLUMNS:
        steps = (step * factors[G][0], step * factors[G][1], step * factors[G][2], step * factors[G][3])
    return steps


@triton.jit
def weights_of(
    words, step, factors, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Slots 4 G and 4 G + 1, and the next two, of a row: pairs of 16-bit numbers."""
    steps = four_steps(step, factors, G, COLUMNS)
    first = _code(words, 4 * G, WIDTH, COMPILED) * steps[0]
    second = _code(words, 4 * G + 1, WIDTH, COMPILED) * steps[1]
    third = _code(words, 4 * G + 2, WIDTH, COMPILED) * steps[2]
    fourth = _code(words, 4 * G + 3, WIDTH, COMPILED) * steps[3]
    return rounded_pair(first, second, HALF, COMPILED), rounded_pair(third, fourth, HALF, COMPILED)


@triton.jit
def rounded_pair(first, second, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Two fp32 numbers, rounded to nearest even, as a pair."""
    if COMPILED:
        KIND: tl.constexpr = "f16x2" if HALF else "bf16x2"
        pair = tl.inline_asm_elementwise(
            "cvt.rn." + KIND + ".f32 $0, $2, $1;", "=r,f,f", [first, second],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pair = _rounded(first, HALF) | (_rounded(second, HALF) << 16)
    return pair


@triton.jit
def _rounded(number, HALF: tl.constexpr):
    """For the interpreter: the 16 bits of a finite fp32 number, rounded."""
    if HALF:
        pattern = number.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        bits = number.to(tl.int32, bitcast=True)
        pattern = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return pattern


@triton.jit
def load_factors(column_factors, c, COLUMNS: tl.constexpr):
    """Factors of the 32 columns of a word, by instruction; nothing without COLUMNS."""
    factors = ()
    if COLUMNS:
        at = (column_factors + (c // 4 * 128 + c % 4 * 4))[:, None] + tl.arange(0, 4)[None, :]
        for g in tl.static_range(8):
            even, odd = tl.split(tl.reshape(tl.load(at + g * 16), [at.shape[0], 2, 2]))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            factors += ((first, second, third, fourth),)
    return factors
