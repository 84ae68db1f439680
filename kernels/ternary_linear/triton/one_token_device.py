"""Device functions of the kernels for one token: its codes, sums over warps, and bits or bytes by a constant.

A program is some warps that share the columns of a tile of 16 rows, a K block of 256 columns each in turn: in
step s, warp w has K block s * NUM_WARPS + w. Thread (r, q) of a warp is lane 4 r + q.

The codes of a token are the columns of matrix instructions. Each thread makes those that it needs itself,
from a part of the activations that no other thread has, so that quantising is shared out like multiplying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from neuzip.kernels.device.reduce import sum_rows
from neuzip.kernels.ternary_linear.triton import one_token_bmma, one_token_int8
from neuzip.kernels.ternary_linear.triton.quantize_device import INT4, quantize_runs
from neuzip.kernels.ternary_linear.triton.registers import load_words, words_of_run
from neuzip.kernels.ternary_linear.weight import BLOCK_K

_BLOCK_K = tl.constexpr(BLOCK_K)


@dataclass(frozen=True)
class OneTokenConfig:
    """Constants that a kernel for one token is compiled for."""

    KIND: int  # of activations: KINDS of `quantize_device`
    CLAMPED: bool  # the epsilon of the quantiser is a minimum
    ROW_SCALES: bool  # the weights (of a gated unit: the gate) have a scale a row
    NUM_WARPS: int
    STEPS: int  # of a warp, for each tile
    STAGES: int  # steps whose words are in flight
    TILES: int  # of a program
    PROLOGUE: int  # steps whose words move to registers before the token is quantised
    EVEN_K: bool  # rows are whole steps of all warps: no column is masked
    BITS: bool  # multiply bit by bit
    TRIGGER_NEXT_EARLY: bool  # the next kernel may start at once, not when all words were requested
    USE_PDL: bool
    COMPILED: bool  # not run by Triton's interpreter


class Token(NamedTuple):
    """Arguments of a kernel that describe its token: activations, or codes that another kernel has made."""

    x: Any  # [in]
    codes: Any  # int32 [k_blocks * 64], four codes a word; None: the kernel quantises x itself
    scale: Any  # fp32 [1], of codes
    total: Any  # int32 [1], the sum of codes
    width: Any  # of x, in memory
    inverse: Any  # 1 / in
    unit_exponent: Any  # log2 of the unit that INT4 first tries for its mean
    k_blocks: Any
    epsilon: Any


class Threads(NamedTuple):
    """Places of the threads of a program, [T] each."""

    warp: Any
    r: Any  # row of a tile, and the one 8 below it: lane // 4
    q: Any  # lane % 4
    offset: Any  # of a thread's four words of row r in a tile and K block


@triton.jit
def make_threads(config: tl.constexpr):
    """The places of all threads."""
    t = tl.arange(0, 32 * config.NUM_WARPS)
    lane = t % 32
    r, q = lane // 4, lane % 4
    return Threads(t // 32, r, q, r * 16 + q * 4)


@triton.jit
def load_token(token, threads, config: tl.constexpr, WORD: tl.constexpr, NEXT: tl.constexpr):
    """A thread's part of a token: two runs of activations a step, or what `codes_of_token` gives if there are
    codes.

    Threads q multiply words WORD q + NEXT i of a row, i = 0 to 3. Of these thread (r, q) has codes 4 j to 4 j
    + 3: for bits those of i = r // 2 and j = r % 2, j + 2; for bytes, where it serves instruction r = 4 p +
    j, those of i = 2 p and 2 p + 1.
    """
    NUM_WARPS: tl.constexpr = config.NUM_WARPS
    STEPS: tl.constexpr = config.STEPS
    r = threads.r
    if config.BITS:
        word, j, BETWEEN = r // 2, r % 2, tl.constexpr(2)
    else:
        word, j, BETWEEN = r // 4 * 2, r % 4, tl.constexpr(4 * NEXT)
    k = threads.warp * _BLOCK_K + (threads.q * WORD + word * NEXT) * 16 + j * 4  # first column of a thread
    loaded = ()
    if token.codes is None:
        WORDS: tl.constexpr = words_of_run(token.x.dtype.element_ty)
        words = token.width * WORDS // 4
        at = k // 4 * WORDS
        STEP_WORDS: tl.constexpr = NUM_WARPS * _BLOCK_K // 4 * WORDS
        for step in tl.static_range(STEPS):
            run = load_words(token.x, at, words, step * STEP_WORDS, WORDS, config.EVEN_K)
            loaded += (
                run,
                load_words(token.x, at, words, step * STEP_WORDS + BETWEEN * WORDS, WORDS, config.EVEN_K),
            )
    else:
        token_scale = tl.load(token.scale)
        total = tl.load(token.total)
        pairs = ()
        of_thread = token.codes + k // 4
        for step in tl.static_range(STEPS):
            at = of_thread + step * (NUM_WARPS * _BLOCK_K // 4)
            if config.EVEN_K:
                pairs += ((tl.load(at), tl.load(at + BETWEEN)),)
            else:
                inside = threads.warp + step * NUM_WARPS < token.k_blocks
                pairs += (
                    (tl.load(at, mask=inside, other=0), tl.load(at + BETWEEN, mask=inside, other=0)),
                )  # fmt: skip
        loaded = (pairs, token_scale, total)
    return loaded


@triton.jit
def codes_of_token(loaded, token, config: tl.constexpr):
    """From what `load_token` gives: a thread's codes, two words a step; the token's scale; the sum of codes.

    That sum is of the whole token if there were codes. Else it is a sum over r, the rows of a warp, so that
    adding it up over q and the warps gives the sum of the token.
    """
    NUM_WARPS: tl.constexpr = config.NUM_WARPS
    if token.codes is not None:
        pairs, token_scale, total = loaded
    else:
        pairs, token_scale, total, _ = quantize_runs(
            loaded, token.inverse, token.unit_exponent, token.epsilon, token.x.dtype.element_ty, config.KIND,
            config.CLAMPED, NUM_WARPS, config.COMPILED, True,
        )  # fmt: skip
        total = tl.sum(tl.reshape(total, [NUM_WARPS, 8, 4]), 1, keep_dims=True)
        total = tl.reshape(tl.broadcast_to(total, [NUM_WARPS, 8, 4]), [32 * NUM_WARPS])
    return pairs, token_scale, total


@triton.jit
def add_over_warps(parts, total, WHOLE_TOTAL: tl.constexpr, config: tl.constexpr):
    """Sums of products with c, which every thread gets, from each thread's parts of those with c + 1.

    `total`, the sum of the token's codes, is subtracted: once if it is WHOLE_TOTAL, else each thread's part.
    """
    if WHOLE_TOTAL:
        sums = sum_rows(parts, config.NUM_WARPS, config.COMPILED)
        results = ()
        for i in tl.static_range(len(parts)):
            results += (sums[i] - total,)
    else:
        differences = ()
        for i in tl.static_range(len(parts)):
            differences += (parts[i] - total,)
        results = sum_rows(differences, config.NUM_WARPS, config.COMPILED)
    return results


# Bit by bit or by bytes


@triton.jit
def make_code_memory(threads, config: tl.constexpr):
    """Where a thread writes codes in shared memory, and where it reads them; by bytes there is none."""
    if config.BITS:
        to, at = one_token_bmma.make_planes(
            threads.warp, threads.r, threads.q, config.NUM_WARPS, config.STEPS, config.KIND == INT4,
            config.COMPILED,
        )  # fmt: skip
    else:
        to, at = threads.warp, threads.warp
    return to, at


@triton.jit
def no_sums(config: tl.constexpr):
    """The accumulators of a tile before its first step."""
    return (
        one_token_bmma.no_counts(config.NUM_WARPS)
        if config.BITS
        else one_token_int8.no_sums(config.NUM_WARPS)
    )


@triton.jit
def multiply(upper, lower, codes, sums, config: tl.constexpr):
    """Add the products of words of rows r and of r + 8, four each, with the token's codes of a step."""
    if config.BITS:
        added = one_token_bmma.count(
            upper, lower, codes, sums, config.NUM_WARPS, config.KIND == INT4, config.COMPILED
        )
    else:
        added = one_token_int8.multiply(upper, lower, codes, sums, config.NUM_WARPS, config.COMPILED)
    return added


@triton.jit
def of_rows(sums, q, config: tl.constexpr):
    """A thread's part of the products of rows r and r + 8, from its accumulators."""
    return (
        one_token_bmma.of_rows(sums, q, config.KIND == INT4)
        if config.BITS
        else one_token_int8.of_rows(sums, q)
    )
