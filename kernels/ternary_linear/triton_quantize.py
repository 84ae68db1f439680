"""Activations to codes and scales, in Triton: the quantisers of `kernels.quantizers`, to the last bit.

A token a program, in its registers from the first to the last; see `triton_codes` for the arithmetic. Top-K,
which has to find out which activations are the largest, loads them anew for that.

    layout of codes    rows         int8 [tokens, padded]
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

from neuzip.kernels.gpu import early_launches
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.quantizers.magnitudes import first_unit
from neuzip.kernels.triton_floats import widened
from neuzip.kernels.triton_sums import of_program

from .triton_codes import (
    INFINITY,
    INT8,
    KINDS,
    factor_and_scale,
    load_words,
    quantised,
    rounded_codes,
    words_of_run,
)
from .weight import STEP, steps_of

FEW, MANY = 16, 32
"""Activations of a thread: where each token has a multiprocessor to itself, and where there are more."""


def quantize(
    x: torch.Tensor,
    activation: str,
    kept: int,
    clamped: bool,
    blocks: int = 0,
    halves: bool = False,
    start_next: bool = False,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales fp32 [tokens] and sums of codes int32 [tokens] of x [tokens, in], contiguous.

    Codes are zeros from `in` up to a multiple of 256. They come as rows, or for 8 `blocks` tokens as
    fragments, those of INT4 in `halves` of bytes; what stands there for tokens that x has not is anything.
    `start_next`: the next kernel may start before x is there. It waits for this one to read what this one
    writes; what it reads earlier has to be complete. Whoever calls holds LAUNCHING, and the device is the
    current one.
    """
    tokens, columns = x.shape
    steps = steps_of(columns)
    assert not halves or (blocks and activation == "int4")
    nbytes = steps * STEP // 2 if halves else steps * STEP
    codes = torch.empty(8 * blocks or tokens, nbytes, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    total = torch.empty(tokens, dtype=torch.int32, device=x.device)
    compiled = isinstance(_quantize_kernel, triton.JITFunction)
    early = compiled and early_launches(x.device)
    options = {
        "CLAMPED": clamped, "BLOCKS": blocks, "START_NEXT": start_next, "EARLY": early, "ASM": compiled,
        "launch_pdl": early, "enable_fp_fusion": False,
    }  # fmt: skip
    if activation == "top_k_int8":
        block = max(STEP, triton.next_power_of_2(columns))
        _quantize_top_k[(tokens,)](
            codes, scale, total, x, columns, steps * STEP, kept, EPSILON, BLOCK=block,
            num_warps=min(32, max(1, block // 512)), **options,
        )  # fmt: skip
        return codes, scale, total
    x = in_words(x)
    each = FEW if tokens <= 64 else MANY
    warps = warps or min(32, max(1, triton.next_power_of_2(triton.cdiv(columns, 32 * each))))
    turns = triton.cdiv(steps, warps)
    _quantize_kernel[(tokens,)](
        codes.view(torch.int32), scale, total, x, 1 / columns, first_unit(columns), x.shape[1], steps,
        EPSILON, KIND=KINDS[activation], HALVES=halves, W=warps, TURNS=turns,
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


@triton.jit(do_not_specialize=["unit"])
def _quantize_kernel(
    codes, scale, total, x, inverse, unit, stride, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr,
    TURNS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, START_NEXT: tl.constexpr,
    EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A token a program; a thread has 8 activations that follow each other in each turn."""
    _begin(START_NEXT, EARLY)
    token = tl.program_id(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = 2 * words_of_run(DTYPE)
    words = stride * WORDS // 8  # of a token
    own = x.to(tl.pointer_type(tl.int32), bitcast=True) + token.to(tl.int64) * words
    eight = tl.arange(0, 32 * W)
    at = eight * WORDS
    OF_TURN: tl.constexpr = 32 * W * WORDS
    runs = ()
    for turn in tl.static_range(TURNS):
        if WORDS == 8:
            run = load_words(own, at, words, turn * OF_TURN, 4, EVEN)
            runs += (run, load_words(own, at, words, turn * OF_TURN + 4, 4, EVEN))
        else:
            w0, w1, w2, w3 = load_words(own, at, words, turn * OF_TURN, 4, EVEN)
            runs += ((w0, w1), (w2, w3))
    pairs, of_token, of_codes = quantised(runs, inverse, unit, epsilon, DTYPE, KIND, CLAMPED, W, ASM, False)
    for turn in tl.static_range(TURNS):
        first, second = pairs[turn]
        at = turn * (32 * W) + eight
        inside = at < steps * 32
        # Words 4 q + 2 p + b of a step, codes 4 j to 4 j + 3: where instruction (p, j) has them.
        pair, b, p, q, step = at % 2, at // 2 % 2, at // 4 % 2, at // 8 % 4, at // 32
        if HALVES:
            target = codes + token * 16 + (2 * step + p) * (128 * BLOCKS) + 4 * q + 2 * pair + b
            both = (first & 0x0F0F0F0F) | (second << 4) & -0x0F0F0F10
            if EVEN:
                tl.store(target, both)
            else:
                tl.store(target, both, mask=inside)
        elif BLOCKS > 0:
            target = codes + token * 16 + (4 * step + 2 * p + pair) * (128 * BLOCKS) + 4 * q + b
            if EVEN:
                tl.store(target, first)
                tl.store(target + 2, second)
            else:
                tl.store(target, first, mask=inside)
                tl.store(target + 2, second, mask=inside)
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
def _pairs(size):
    """Magnitudes of 15 bits, [R, C], two in a number, with a bit above each: [R, C / 2]."""
    first, second = tl.split(tl.reshape(size, [size.shape[0], size.shape[1] // 2, 2]))
    return first | (second << 16) | -0x7FFF8000


@triton.jit
def _reaching(size, pairs, least, LOW: tl.constexpr, COUNT: tl.constexpr):
    """How many magnitudes reach `least` with 1 to COUNT, at most 3, in the bits from LOW on: 20 bits each.

    Of pairs, the bits above them are left of a subtraction. They are counted in 5 bits in a row of 16, in
    10 in 32 rows, so that one number is added up where there would be three.
    """
    if pairs is None:
        each = tl.zeros(size.shape, tl.int64)
        for j in tl.static_range(COUNT):
            each += (size >= (least | ((j + 1) << LOW))).to(tl.int64) << (20 * j)
    else:
        left = tl.zeros(pairs.shape, tl.int32)
        for j in tl.static_range(COUNT):
            above = (pairs - (least | ((j + 1) << LOW)) * 0x10001) >> (15 - 5 * j)
            left |= above & (0x10001 << (5 * j))
        both = tl.sum(left, 1)
        of_row = (both & 0x7FFF) + ((both >> 16) & 0x7FFF)
        wider = (of_row & 0x1F) | ((of_row & 0x3E0) << 5) | ((of_row & 0x7C00) << 10)
        ROWS: tl.constexpr = 32 if wider.shape[0] > 32 else wider.shape[0]
        of_rows = tl.sum(tl.reshape(wider, [wider.shape[0] // ROWS, ROWS]), 1).to(tl.int64)
        each = (of_rows & 0x3FF) | ((of_rows & 0xFFC00) << 10) | ((of_rows & 0x3FF00000) << 20)
    return tl.sum(each)


@triton.jit
def _next_bits(size, pairs, least, kept, LOW: tl.constexpr, COUNT: tl.constexpr):
    """`least` with bits from LOW on, of which COUNT is the largest number, as large as `kept` allow."""
    counts = _reaching(size, pairs, least, LOW, COUNT)
    for j in tl.static_range(COUNT):
        reached = ((counts >> (20 * j)) & 0xFFFFF) >= kept
        least += reached.to(tl.int32) << LOW
    return least


@triton.jit
def _largest(size, kept, BITS: tl.constexpr):
    """Which magnitudes, integers of 15 or 31 bits, are the `kept` largest: of equals, the first."""
    pairs = _pairs(size) if BITS == 15 else None
    # The largest number that `kept` of them reach: its first bit, then two at a time.
    least = _next_bits(size, pairs, kept * 0, kept, BITS - 1, 1)
    for low in tl.static_range(BITS - 3, -1, -2):
        least = _next_bits(size, pairs, least, kept, low, 3)
    equal = (size == least).to(tl.int32)
    of_row = tl.sum(equal, 1)
    earlier = (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(equal, 1) - equal
    wanted = kept - tl.sum((size > least).to(tl.int32))
    return (size > least) | ((equal != 0) & (earlier < wanted))


@triton.jit(do_not_specialize=["kept"])
def _quantize_top_k(
    codes_ptr, scale_ptr, total_ptr, x_ptr, columns, padded, kept, epsilon,
    CLAMPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, START_NEXT: tl.constexpr,
    EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """INT8 with all but the `kept` largest magnitudes 0: a token a program.

    It is loaded anew for every use, from the first-level cache: with all of it in registers, fewer programs
    would run side by side. Other policies keep the compiler from making one load of them.
    """
    _begin(START_NEXT, EARLY)
    token = tl.program_id(0)
    # Codes of fragments are stored four at a time: loaded so, no thread has to ask another.
    TOGETHER: tl.constexpr = 4 if BLOCKS > 0 else 16
    some, i = tl.arange(0, BLOCK // TOGETHER), tl.arange(0, TOGETHER)[None, :]
    k = some[:, None] * TOGETHER + i
    inside = k < columns
    at = x_ptr + token.to(tl.int64) * columns + k
    x = widened(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last"))
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(size)
    most = tl.full([], 127.0, tl.float32)
    factor, scale = factor_and_scale(peak.to(tl.float32, bitcast=True), most, most, epsilon, CLAMPED)
    x = widened(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"))
    codes = rounded_codes(x, factor, INT8, False).to(tl.int8)
    if x_ptr.dtype.element_ty == tl.float32:
        wanted = _largest(size, kept, 31)
    else:  # in its own 16 bits, which have the same order
        own = tl.load(at, mask=inside, other=0.0)
        wanted = _largest(own.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF, kept, 15)
    codes = tl.where(wanted & inside & (peak < INFINITY), codes, 0)
    if BLOCKS > 0:
        j, b, p, q, step = some % 4, some // 4 % 2, some // 8 % 2, some // 16 % 4, some // 64
        piece, place = 4 * step + 2 * p + j // 2, 16 * q + 8 * (j % 2) + 4 * b
        target = ((piece * (8 * BLOCKS) + token) * 64 + place)[:, None] + i
        tl.store(codes_ptr + target, codes, mask=k < padded)
    else:
        tl.store(codes_ptr + token.to(tl.int64) * padded + k, codes, mask=k < padded)
    tl.store(scale_ptr + token, tl.where(peak < INFINITY, scale, float("nan")))
    tl.store(total_ptr + token, tl.sum(codes.to(tl.int32)))
