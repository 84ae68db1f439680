"""Weights of a uniform grid in the registers of a thread, in Triton: from words of codes to pairs of weights.

In bf16 arithmetic (TERMS) two weights are made at a time: see the package. In fp32, one:

A field of a word is a whole number u from 0 on. With the exponent of 2^(23 - b) above a field that begins
with bit b, the 32 bits are the fp32 number 2^(23 - b) + u: that takes one instruction, and no shift as long
as the field ends below bit 23. Less 2^(23 - b) and the bias that is the code, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import float_of, less, masked_or


@triton.jit
def with_spare(words, WIDTH: tl.constexpr):
    """The words of a row, and behind them those that their spare bits are together."""
    SPARE: tl.constexpr = 16 % WIDTH
    if SPARE:
        EACH: tl.constexpr = 3 if WIDTH == 6 else WIDTH
        for first in tl.static_range(0, WIDTH, EACH):
            spare = _spare_bits(words[first], SPARE, SPARE * (EACH - 1))
            for i in tl.static_range(1, EACH):
                spare |= _spare_bits(words[first + i], SPARE, SPARE * (EACH - 1 - i))
            words += (spare,)
    return words


@triton.jit
def _spare_bits(word, SPARE: tl.constexpr, AT: tl.constexpr):
    """The uppermost bits of both halves of a word, at a lower place."""
    return (word >> (16 - SPARE - AT)) & ((((1 << SPARE) - 1) << AT) * 0x10001)


@triton.jit
def _code(words, SLOT: tl.constexpr, WIDTH: tl.constexpr, COMPILED: tl.constexpr):
    """The code of a slot, in fp32. Fields that end above bit 23 are taken from the word shifted by 9."""
    word = words[SLOT // 2 // (16 // WIDTH)]
    BIT: tl.constexpr = SLOT // 2 % (16 // WIDTH) * WIDTH + SLOT % 2 * 16
    SHIFTED: tl.constexpr = BIT + WIDTH > 23
    AT: tl.constexpr = BIT - 9 if SHIFTED else BIT
    if SHIFTED:
        word = word >> 9
    number = masked_or(word, ((1 << WIDTH) - 1) << AT, (150 - AT) << 23, COMPILED)
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
def load_step(row_steps, row_terms, n, TERMS: tl.constexpr):
    """The step of a row as `weights_of` takes it: two terms, or (not TERMS) the step twice."""
    if TERMS:
        step = (tl.load(row_terms + 2 * n), tl.load(row_terms + 2 * n + 1))
    else:
        whole = tl.load(row_steps + n)
        step = (whole, whole)
    return step


@triton.jit
def weights_of(
    words, step, factors, patches, WIDTH: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr,
    HALF: tl.constexpr, G: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Slots 4 G and 4 G + 1, and the next two, of a row: pairs of 16-bit numbers, with their escapes.

    TERMS: bf16 arithmetic makes them, see `terms`, and else fp32 arithmetic. `patches` are the escapes in
    both pairs, int32; where a patch is 0, so is the escape.
    """
    if TERMS:
        pairs = (
            _pair_by_terms(words, step, patches[0], 2 * G, WIDTH, COMPILED),
            _pair_by_terms(words, step, patches[1], 2 * G + 1, WIDTH, COMPILED),
        )
    else:
        first, second = _pairs_by_step(words, step[0], factors, WIDTH, COLUMNS, HALF, G, COMPILED)
        pairs = first | patches[0], second | patches[1]
    return pairs


@triton.jit
def _pair_by_terms(words, step, patch, PAIR: tl.constexpr, WIDTH: tl.constexpr, COMPILED: tl.constexpr):
    """Slots 2 PAIR and 2 PAIR + 1: fields of both halves of a word, which become 128 + u in bf16.

    The code of an escape is 0, so the patch is what both products leave; of other weights the patch is 0.
    """
    BIT: tl.constexpr = PAIR % (16 // WIDTH) * WIDTH
    word = words[PAIR // (16 // WIDTH)] >> BIT
    number = masked_or(word, ((1 << WIDTH) - 1) * 0x10001, 0x43004300, COMPILED)
    code = less(number, 128 + (1 << (WIDTH - 1)), False, COMPILED)
    if COMPILED:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 low; fma.rn.bf16x2 low, $1, $3, $4; fma.rn.bf16x2 $0, $1, $2, low; }", "=r,r,r,r,r",
            [code, step[0], step[1], patch + tl.zeros_like(code)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = _times(code, step, patch), _times(code >> 16, step, patch >> 16)
        pair = low | (high << 16)
    return pair


@triton.jit
def _times(code, step, patch):
    """For the interpreter: the lower bf16 numbers, code * first + (code * second + patch), rounded twice."""
    number = float_of(code, False).to(tl.float64)
    added = float_of(patch + tl.zeros_like(code), False).to(tl.float64)
    low = _rounded_bf16(number * float_of(step[1], False).to(tl.float64) + added)
    product = _rounded_bf16(number * float_of(step[0], False).to(tl.float64) + low)
    return (product.to(tl.float32).to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def _rounded_bf16(number):
    """For the interpreter: fp64 numbers rounded to those that bf16 has, not near the ends of its range."""
    bits = number.to(tl.int64, bitcast=True)
    return (((bits + ((1 << 44) - 1) + ((bits >> 45) & 1)) >> 45) << 45).to(tl.float64, bitcast=True)


@triton.jit
def _pairs_by_step(
    words, step, factors, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
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
