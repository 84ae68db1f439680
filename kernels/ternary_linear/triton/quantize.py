"""Activations to codes and scales, in Triton: the quantisers of `kernels.quantizers`, to the last bit.

A token a program, in its registers from the first to the last; see `triton_codes` for the arithmetic. Top-K
finds the smallest magnitude that is kept by counting what reaches three numbers at a time.

    layout of codes    rows         int8 [tokens, padded]
                       interleaved  int8 [tokens, padded / 128, j, h, q, 4]: of each token, in turns of 128,
                                    codes 4 j to 4 j + 3 of word 2 q + h
                       fragments    int8 [padded / 256, p, j / 2, 8 blocks, q, j % 2, b, 4]: of each token, in
                                    steps of 256, codes 4 j to 4 j + 3 of word 4 q + 2 p + b
                       of 4 bits    int8 [padded / 256, p, 8 blocks, q, j / 2, b, 4]: of j and j + 1, in the
                                    lower and the upper half of a byte
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.properties import early_launches
from neuzip.kernels.device.reduce import of_program, of_program_in, room
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.quantizers.magnitudes import first_unit
from neuzip.kernels.ternary_linear.triton.one_token_int8 import (
    KINDS,
    TOP_K,
    load_words,
    lower_and_upper,
    quantised,
    sum_of_bytes,
    words_of_run,
)
from neuzip.kernels.ternary_linear.weight import STEP, steps_of

FEW, FEW_INT4 = 16, 32
"""Activations of a thread for up to 64 tokens: more where warps have more to exchange."""

MANY_BYTES, LEAST = 128, 4
"""For more tokens: bytes of a thread's activations, half of them for Top-K; warps of a token, at least."""


def quantize(
    x: torch.Tensor,
    activation: str,
    kept: int,
    clamped: bool,
    blocks: int = 0,
    halves: bool = False,
    interleaved: bool = False,
    start_next: bool = False,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales fp32 [tokens] and sums of codes int32 [tokens] of x [tokens, in], contiguous.

    Codes are zeros from `in` up to a multiple of 256. They come as rows, `interleaved` or not, or for 8
    `blocks` tokens as fragments, those of INT4 in `halves` of bytes; what stands there for tokens that x has
    not is anything.
    `start_next`: the next kernel may start before x is there. It waits for this one to read what this one
    writes; what it reads earlier has to be complete. Whoever calls holds LAUNCHING, and the device is the
    current one.
    """
    tokens, columns = x.shape
    steps = steps_of(columns)
    assert not halves or (blocks and activation == "int4")
    assert not interleaved or not blocks
    nbytes = steps * STEP // 2 if halves else steps * STEP
    codes = torch.empty(8 * blocks or tokens, nbytes, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    total = torch.empty(tokens, dtype=torch.int32, device=x.device)
    compiled = isinstance(_quantize_kernel, triton.JITFunction)
    early = compiled and early_launches(x.device)
    options = {
        "CLAMPED": clamped, "BLOCKS": blocks, "INTERLEAVED": interleaved, "START_NEXT": start_next,
        "EARLY": early, "ASM": compiled, "launch_pdl": early, "enable_fp_fusion": False,
    }  # fmt: skip
    x = in_words(x)
    many = tokens > 64
    most = MANY_BYTES // 2 if activation == "top_k_int8" else MANY_BYTES
    few = FEW_INT4 if activation == "int4" else FEW
    least, each = (LEAST, most // x.element_size()) if many else (1, few)
    usual = max(least, triton.next_power_of_2(triton.cdiv(columns, 32 * each)))
    warps = warps or min(32, usual, triton.next_power_of_2(steps))
    turns = triton.cdiv(steps, warps)
    _quantize_kernel[(tokens,)](
        codes.view(torch.int32), scale, total, x, 1 / columns, first_unit(columns), x.shape[1], steps,
        EPSILON, kept, KIND=KINDS[activation], HALVES=halves, W=warps, TURNS=turns, SPARING=many,
        EVEN=x.shape[1] == steps * STEP and steps == turns * warps, num_warps=warps, **options,
    )  # fmt: skip
    return codes, scale, total


def in_words(x: torch.Tensor) -> torch.Tensor:
    """The same tokens [tokens, in] as 32-bit words can be loaded of: a column of zeros more, if need be."""
    odd = x.shape[1] % 2 if x.element_size() == 2 else 0
    return F.pad(x, (0, odd)) if odd or x.data_ptr() % 4 else x


@triton.jit
def _begin(START_NEXT: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the kernel ahead, and let the next one start: then, or before that."""
    if EARLY and START_NEXT:
        cuda.gdc_launch_dependents()
    if EARLY:
        cuda.gdc_wait()
    if EARLY and not START_NEXT:
        cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["unit", "kept"])
def _quantize_kernel(
    codes, scale, total, x, inverse, unit, stride, steps, epsilon, kept,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr,
    TURNS: tl.constexpr, BLOCKS: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
    START_NEXT: tl.constexpr, SPARING: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A token a program; a thread has 8 activations that follow each other in each turn."""
    _begin(START_NEXT, EARLY)
    token = tl.program_id(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = 2 * words_of_run(DTYPE)
    words = stride * WORDS // 8  # of a token
    own = x.to(tl.pointer_type(tl.int32), bitcast=True) + token.to(tl.int64) * words
    EACH: tl.constexpr = TURNS if KIND == TOP_K else 1  # turns of a thread that follow each other
    eight = tl.arange(0, 32 * W) * EACH
    at = eight * WORDS
    OF_TURN: tl.constexpr = WORDS if KIND == TOP_K else 32 * W * WORDS
    runs = ()
    for turn in tl.static_range(TURNS):
        if WORDS == 8:
            run = load_words(own, at, words, turn * OF_TURN, 4, EVEN)
            runs += (run, load_words(own, at, words, turn * OF_TURN + 4, 4, EVEN))
        else:
            w0, w1, w2, w3 = load_words(own, at, words, turn * OF_TURN, 4, EVEN)
            runs += ((w0, w1), (w2, w3))
    pairs, of_token, of_codes, peak = quantised(
        runs, inverse, unit, epsilon, DTYPE, KIND, CLAMPED, W, ASM, False, SPARING
    )
    if KIND == TOP_K:
        pairs, of_codes = _top_k(runs, pairs, peak, kept, DTYPE, W, ASM)
    for turn in tl.static_range(TURNS):
        first, second = pairs[turn]
        at = turn * (OF_TURN // WORDS) + eight
        inside = at < steps * 32
        # Words 4 q + 2 p + b of a step, codes 4 j to 4 j + 3: where instruction (p, j) has them.
        pair, b, p, q, step = at % 2, at // 2 % 2, at // 4 % 2, at // 8 % 4, at // 32
        if HALVES:
            target = codes + token * 16 + (2 * step + p) * (128 * BLOCKS) + 4 * q + 2 * pair + b
            both = lower_and_upper(first, second << 4, ASM)
            if EVEN:
                tl.store(target, both)
            else:
                tl.store(target, both, mask=inside)
        elif BLOCKS > 0:
            target = codes + token * 16 + (4 * step + 2 * p + pair) * (128 * BLOCKS) + 4 * q + b
            _store_apart(target, first, second, 2, inside, EVEN)
        elif INTERLEAVED:
            if EACH == 1:  # whole turns of 128 further: a constant of the store
                place = _interleaved(2 * eight) + turn * (64 * W)
            else:
                place = _interleaved(2 * at)
            target = codes + token.to(tl.int64) * (steps * 64) + place
            _store_apart(target, first, second, 8, inside, EVEN)
        else:
            target = codes + token.to(tl.int64) * (steps * 64) + 2 * at
            target = target[:, None] + tl.arange(0, 2)[None, :]
            if EVEN:
                tl.store(target, tl.join(first, second))
            else:
                tl.store(target, tl.join(first, second), mask=inside[:, None])
    (summed,) = of_program((of_codes,), 0, W, ASM)
    one = tl.arange(0, 32 * W)
    tl.store(scale + token + one, of_token, mask=one == 0)
    tl.store(total + token + one, summed + one, mask=one == 0)


@triton.jit
def _store_apart(target, first, second, WORDS: tl.constexpr, inside, EVEN: tl.constexpr):
    """Store two words, the second so many words behind the first; all of them if EVEN."""
    if EVEN:
        tl.store(target, first)
        tl.store(target + WORDS, second)
    else:
        tl.store(target, first, mask=inside)
        tl.store(target + WORDS, second, mask=inside)


@triton.jit
def _interleaved(word):
    """Where four codes stand that are the 8 q + 4 h + j-th of a turn: as the 8 j + 4 h + q-th."""
    return word // 32 * 32 + word % 4 * 8 + word // 4 % 2 * 4 + word // 8 % 4


@triton.jit
def _top_k(runs, pairs, peak, kept, DTYPE: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Codes of the `kept` largest magnitudes, of equals the first, and 0 for others; the sum of a thread's.

    Threads have runs that follow each other.
    """
    MAGNITUDE: tl.constexpr = 0x7FFFFFFF if tl.float32 == DTYPE else 0x7FFF7FFF
    sizes = ()
    for i in tl.static_range(len(runs)):
        for w in tl.static_range(len(runs[i])):
            sizes += (runs[i][w] & MAGNITUDE,)
    least, larger = _least(sizes, peak, kept, DTYPE, W, ASM)
    above, equal = _compared(sizes, least, DTYPE)
    earlier = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(equal)):
        earlier += equal[i].to(tl.int32)
    left = kept - larger - (tl.cumsum(earlier, 0) - earlier)  # of equals, for this thread and those behind it
    chosen = ()
    summed = tl.zeros(runs[0][0].shape, tl.int32)
    for i in tl.static_range(len(pairs)):
        both = ()
        for half in tl.static_range(2):
            bytes = tl.zeros(runs[0][0].shape, tl.int32)
            for j in tl.static_range(8 * i + 4 * half, 8 * i + 4 * half + 4):
                wanted = above[j] | (equal[j] & (left > 0))
                left -= equal[j].to(tl.int32)
                bytes |= tl.where(wanted, 0xFF << (8 * (j % 4)) if j % 4 < 3 else -0x1000000, 0)
            both += (pairs[i][half] & bytes,)
            summed = sum_of_bytes(both[half], summed, ASM)
        chosen += (both,)
    return chosen, summed


@triton.jit
def _compared(sizes, least, DTYPE: tl.constexpr):
    """Which magnitudes of a thread are above a number, and which are equal to it."""
    above = ()
    equal = ()
    for i in tl.static_range(len(sizes)):
        if tl.float32 == DTYPE:
            above += (sizes[i] > least,)
            equal += (sizes[i] == least,)
        else:
            for half in tl.static_range(2):
                size = (sizes[i] >> (16 * half)) & 0x7FFF
                above += (size > least,)
                equal += (size == least,)
    return above, equal


@triton.jit
def _least(sizes, peak, kept, DTYPE: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """The largest number, as bits, that `kept` magnitudes reach, and how many are above it.

    It is between two numbers, three between these are tried at once: first where it is likely, as half of
    what is Gaussian is a fifth of the peak and less, and half of what has outliers much less; then quarters.
    """
    OCTAVE: tl.constexpr = 1 << DTYPE.fp_mantissa_width
    ALL: tl.constexpr = 32 * W * len(sizes) * (1 if tl.float32 == DTYPE else 2)
    where = room(3, 2, W, ASM)
    turn, larger = kept * 0, kept * 0
    low, high = kept * 0, tl.minimum(peak, 0x7FFFFFFE) + 1  # a NaN of fp32 may have all bits
    a, b = tl.maximum(peak - 7 * OCTAVE, 1), tl.maximum(peak - 3 * OCTAVE, 1)
    c = tl.maximum(peak - 2 * OCTAVE, 1)
    while high - low > 1:
        counts = _reaching(sizes, a, b, c, DTYPE)
        if ALL < 1 << 16:
            both, of_c = of_program_in(where, turn & 1, (counts[0] | (counts[1] << 16), counts[2]), 0, W, ASM)
            of_a, of_b = both & 0xFFFF, (both >> 16) & 0xFFFF
        else:
            of_a, of_b, of_c = of_program_in(where, turn & 1, counts, 0, W, ASM)
        if of_a < kept:
            high, larger = a, of_a
        elif of_b < kept:
            low, high, larger = a, b, of_b
        elif of_c < kept:
            low, high, larger = b, c, of_c
        else:
            low = c
        width = high - low
        a, b = low + tl.maximum(width // 4, 1), low + tl.maximum(width // 2, 1)
        c = low + tl.maximum(width // 2 + width // 4, 1)
        turn += 1
    return low, larger


@triton.jit
def _reaching(sizes, a, b, c, DTYPE: tl.constexpr):
    """How many magnitudes of a thread reach each of three numbers.

    Of two in a word, bits above them are what is left of a subtraction: 5 bits count those of 31 words.
    """
    zero = tl.zeros(sizes[0].shape, tl.int32)
    of_a, of_b, of_c = zero, zero, zero
    if tl.float32 == DTYPE:
        for i in tl.static_range(len(sizes)):
            of_a += (sizes[i] >= a).to(tl.int32)
            of_b += (sizes[i] >= b).to(tl.int32)
            of_c += (sizes[i] >= c).to(tl.int32)
    else:
        a, b, c = a * 0x10001, b * 0x10001, c * 0x10001
        for first in tl.static_range(0, len(sizes), 31):
            fields = zero
            for i in tl.static_range(first, min(first + 31, len(sizes))):
                size = sizes[i] | -0x7FFF8000
                left = ((size - a) >> 15) & 0x10001 | ((size - b) >> 10) & 0x200020
                fields += left | ((size - c) >> 5) & 0x4000400
            of_a += (fields & 0x1F) + ((fields >> 16) & 0x1F)
            of_b += ((fields >> 5) & 0x1F) + ((fields >> 21) & 0x1F)
            of_c += ((fields >> 10) & 0x1F) + ((fields >> 26) & 0x1F)
    return of_a, of_b, of_c
