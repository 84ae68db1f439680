"""Quantises tokens in memory, in Triton, to the last bit of `quantizers`: for products of two launches.

A program takes one token and holds it in registers from the first load to the last store. In each step a
thread has 8 consecutive activations; the arithmetic is in `quantize_device`, that of Top-K in `top_k`. Codes
are stored in the order in which the kernel that multiplies reads them:

    rows         int8 [tokens, padded]
    interleaved  int8 [tokens, padded / 128, j, h, q, 4]: of each token and 128 columns, codes 4 j to 4 j + 3
                 of word 2 q + h
    fragments    int8 [padded / 256, p, j / 2, 8 blocks, q, j % 2, b, 4]: of each token and 256 columns, codes
                 4 j to 4 j + 3 of word 4 q + 2 p + b
    int4x2       int8 [padded / 256, p, 8 blocks, q, j / 2, b, 4]: fragments of 4 bits, those of j and j + 1
                 in the lower and the upper half of a byte

`padded` are the columns, rounded up to a multiple of 256; q = 0 to 3, j = 0 to 3, h, p and b = 0 or 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, uses_pdl
from neuzip.kernels.device.reduce import of_program
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.quantizers.magnitudes import first_unit
from neuzip.kernels.ternary_linear.triton.quantize_device import KINDS, TOP_K, quantize_runs
from neuzip.kernels.ternary_linear.triton.registers import load_words, lower_and_upper, words_of_run
from neuzip.kernels.ternary_linear.triton.top_k import largest_codes
from neuzip.kernels.ternary_linear.weight import BLOCK_K, k_blocks_of

FEW_TOKENS = 64
"""Most tokens for which warps are many, as there are too few programs to fill the GPU."""

FEW_ACTIVATIONS, FEW_ACTIVATIONS_INT4 = 16, 32
"""Activations of a thread for up to `FEW_TOKENS` tokens: more for INT4, whose warps exchange more."""

MANY_BYTES, MANY_WARPS = 128, 4
"""Bytes of a thread's activations for more tokens, half of it for Top-K, and the fewest warps of a token."""


def quantize(
    x: torch.Tensor,
    activation: str,
    top_k: int,
    clamped: bool,
    blocks: int = 0,
    int4x2: bool = False,
    interleaved: bool = False,
    trigger_first: bool = False,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales fp32 [tokens] and sums of codes int32 [tokens] of x [tokens, in], contiguous.

    Codes are zeros from `in` up to a multiple of 256.

    top_k          magnitudes that "top_k_int8" keeps of each token
    blocks         0 for rows; else codes are fragments of this many blocks of 8 tokens, and tokens that x
                   does not have get any codes
    int4x2         fragments of INT4 come two codes in a byte
    interleaved    rows are interleaved
    trigger_first  the next kernel may start before x is complete. It must wait for this one before it reads
                   what this one writes; whatever it reads earlier has to be complete already

    The caller holds the launch lock, and the device of x is the current one.
    """
    tokens, columns = x.shape
    k_blocks = k_blocks_of(columns)
    assert not int4x2 or (blocks and activation == "int4")
    assert not interleaved or not blocks
    nbytes = k_blocks * BLOCK_K // 2 if int4x2 else k_blocks * BLOCK_K
    codes = torch.empty(8 * blocks or tokens, nbytes, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    total = torch.empty(tokens, dtype=torch.int32, device=x.device)
    use_pdl = uses_pdl(_quantize_kernel, x.device)
    x = in_words(x)
    warps = warps or _warps(tokens, columns, activation, x.element_size())
    steps = triton.cdiv(k_blocks, warps)
    _quantize_kernel[(tokens,)](
        codes.view(torch.int32), scale, total, x, 1 / columns, first_unit(columns), x.shape[1], k_blocks,
        EPSILON, top_k, KIND=KINDS[activation], CLAMPED=clamped, INT4X2=int4x2, NUM_WARPS=warps, STEPS=steps,
        TOKEN_BLOCKS=blocks, INTERLEAVED=interleaved,
        EVEN_K=x.shape[1] == k_blocks * BLOCK_K and k_blocks == steps * warps, TRIGGER_FIRST=trigger_first,
        USE_PDL=use_pdl, COMPILED=is_compiled(_quantize_kernel), num_warps=warps, launch_pdl=use_pdl,
        enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, total


def _warps(tokens: int, columns: int, activation: str, itemsize: int) -> int:
    """Warps of a program, by the number of activations that each thread should have."""
    if tokens > FEW_TOKENS:
        least, each = MANY_WARPS, (MANY_BYTES // 2 if activation == "top_k_int8" else MANY_BYTES) // itemsize
    else:
        least, each = 1, FEW_ACTIVATIONS_INT4 if activation == "int4" else FEW_ACTIVATIONS
    wanted = max(least, triton.next_power_of_2(triton.cdiv(columns, 32 * each)))
    return int(min(32, wanted, triton.next_power_of_2(k_blocks_of(columns))))


def in_words(x: torch.Tensor) -> torch.Tensor:
    """Tokens [tokens, in] as 32-bit words can be loaded of: with one more column of zeros, if need be."""
    odd = x.shape[1] % 2 if x.element_size() == 2 else 0
    return F.pad(x, (0, odd)) if odd or x.data_ptr() % 4 else x


@triton.jit
def _begin(TRIGGER_FIRST: tl.constexpr, USE_PDL: tl.constexpr):
    """Wait for the previous kernel, and let the next one start: after that, or before."""
    if USE_PDL and TRIGGER_FIRST:
        cuda.gdc_launch_dependents()
    if USE_PDL:
        cuda.gdc_wait()
    if USE_PDL and not TRIGGER_FIRST:
        cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["unit_exponent", "top_k"])
def _quantize_kernel(
    codes, scale, total, x, inverse, unit_exponent, stride, k_blocks, epsilon, top_k,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, INT4X2: tl.constexpr, NUM_WARPS: tl.constexpr,
    STEPS: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr,
    TRIGGER_FIRST: tl.constexpr, USE_PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Quantise one token; a thread has 8 consecutive activations in each step."""
    _begin(TRIGGER_FIRST, USE_PDL)
    token = tl.program_id(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = 2 * words_of_run(DTYPE)  # of 8 activations
    words = stride * WORDS // 8  # of a token
    token_words = x.to(tl.pointer_type(tl.int32), bitcast=True) + token.to(tl.int64) * words
    # Top-K has to know which of two equal magnitudes comes first: there the steps of a thread are
    # consecutive.
    CONSECUTIVE: tl.constexpr = STEPS if KIND == TOP_K else 1
    eight = tl.arange(0, 32 * NUM_WARPS) * CONSECUTIVE  # [T]
    at = eight * WORDS
    STEP_WORDS: tl.constexpr = WORDS if KIND == TOP_K else 32 * NUM_WARPS * WORDS
    runs = ()
    for step in tl.static_range(STEPS):
        if WORDS == 8:
            run = load_words(token_words, at, words, step * STEP_WORDS, 4, EVEN_K)
            runs += (run, load_words(token_words, at, words, step * STEP_WORDS + 4, 4, EVEN_K))
        else:
            w0, w1, w2, w3 = load_words(token_words, at, words, step * STEP_WORDS, 4, EVEN_K)
            runs += ((w0, w1), (w2, w3))
    pairs, token_scale, code_sum, peak = quantize_runs(
        runs, inverse, unit_exponent, epsilon, DTYPE, KIND, CLAMPED, NUM_WARPS, COMPILED, False
    )
    if KIND == TOP_K:
        pairs, code_sum = largest_codes(runs, pairs, peak, top_k, DTYPE, NUM_WARPS, COMPILED)
    for step in tl.static_range(STEPS):
        first, second = pairs[step]  # [T] each
        at = step * (STEP_WORDS // WORDS) + eight
        mask = at < k_blocks * 32
        # Words 4 q + 2 p + b of a K block, codes 4 j to 4 j + 3: where instruction (p, j) has them.
        pair, b, p, q, k_block = at % 2, at // 2 % 2, at // 4 % 2, at // 8 % 4, at // 32
        if INT4X2:
            target = codes + token * 16 + (2 * k_block + p) * (128 * TOKEN_BLOCKS) + 4 * q + 2 * pair + b
            both = lower_and_upper(first, second << 4, COMPILED)
            if EVEN_K:
                tl.store(target, both)
            else:
                tl.store(target, both, mask=mask)
        elif TOKEN_BLOCKS > 0:
            target = codes + token * 16 + (4 * k_block + 2 * p + pair) * (128 * TOKEN_BLOCKS) + 4 * q + b
            _store_apart(target, first, second, 2, mask, EVEN_K)
        elif INTERLEAVED:
            if CONSECUTIVE == 1:  # a multiple of 128 columns further: a constant of the store
                place = _interleaved(2 * eight) + step * (64 * NUM_WARPS)
            else:
                place = _interleaved(2 * at)
            target = codes + token.to(tl.int64) * (k_blocks * 64) + place
            _store_apart(target, first, second, 8, mask, EVEN_K)
        else:
            target = codes + token.to(tl.int64) * (k_blocks * 64) + 2 * at
            target = target[:, None] + tl.arange(0, 2)[None, :]  # [T, 2]
            if EVEN_K:
                tl.store(target, tl.join(first, second))
            else:
                tl.store(target, tl.join(first, second), mask=mask[:, None])
    (token_sum,) = of_program((code_sum,), 0, NUM_WARPS, COMPILED)
    thread = tl.arange(0, 32 * NUM_WARPS)
    tl.store(scale + token + thread, token_scale, mask=thread == 0)
    tl.store(total + token + thread, token_sum + thread, mask=thread == 0)


@triton.jit
def _store_apart(target, first, second, DISTANCE: tl.constexpr, mask, EVEN_K: tl.constexpr):
    """Store two words, the second DISTANCE words behind the first; unmasked if EVEN_K."""
    if EVEN_K:
        tl.store(target, first)
        tl.store(target + DISTANCE, second)
    else:
        tl.store(target, first, mask=mask)
        tl.store(target + DISTANCE, second, mask=mask)


@triton.jit
def _interleaved(word):
    """Interleaved place of a word of four codes: of 32, the 8 q + 4 h + j-th becomes the 8 j + 4 h + q-th."""
    return word // 32 * 32 + word % 4 * 8 + word // 4 % 2 * 4 + word // 8 % 4
