"""Products of 2 to 64 tokens with ternary weights, by matrix instructions on 8-bit integers.

`quantize` writes the codes first, as fragments: in the order in which matrix instructions take them. Then

    a program          has some tiles of 16 rows for 8, 16 or 32 tokens; its warps share the columns, a K
                       block of 256 columns each in turn
    a warp             prefetches words of STAGES steps to registers, before the quantiser has ended (PDL)
    a step             loads the fragments of its K block, and masks and shifts words to bytes c + 1 for them
    at the end         warps add their sums in one exchange, and each thread scales and stores some of them

Words of weights are read once for 32 tokens. The codes of 16 tokens are more bytes than the weights of a
tile, but they are the same for all tiles, and so come from the caches. What is multiplied is c + 1, 0 to 2
for the codes c of weights; the sum of a token's codes is subtracted at the end.

ACCUMULATOR_SETS: one of the four codes in a byte needs no shift, and with several sets of accumulators more:
those of set s are 4**s times too large, which is repaired once at the end. A set costs registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launching, uses_pdl
from neuzip.kernels.device.reduce import each_of, first_of, share_sums
from neuzip.kernels.ternary_linear.triton import launches
from neuzip.kernels.ternary_linear.triton.launches import FewTokensLaunch
from neuzip.kernels.ternary_linear.triton.mma import mma
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.ternary_linear.triton.registers import four
from neuzip.kernels.ternary_linear.triton.tiles import load_scales, load_tile_words, scaled
from neuzip.kernels.ternary_linear.weight import TernaryWeight


@dataclass(frozen=True)
class FewTokensConfig:
    """Constants that the kernel for few tokens is compiled for."""

    BLOCKS: int  # of 8 tokens, in the array of codes
    TOKEN_BLOCKS: int  # of 8 tokens, of a program
    ROW_SCALES: bool  # the weights have a scale a row
    NUM_WARPS: int
    TILES_PER_WARP: int
    ACCUMULATOR_SETS: int
    STAGES: int  # steps of a warp whose words are in flight
    ROUNDS: int  # of STAGES steps
    INT4X2: bool  # two codes in a byte
    EVEN_K: bool  # K blocks are whole rounds of all warps: none is masked
    TRIGGER_NEXT_EARLY: bool  # the next kernel may start at once, not when all words were loaded
    USE_PDL: bool
    COMPILED: bool  # not run by Triton's interpreter


def few_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    top_k: int = 0,
    launch: FewTokensLaunch | None = None,
) -> torch.Tensor:
    """The product of x [tokens, in] with weights that have one scale or one a row: [tokens, out].

    All arrays are contiguous. Raises ValueError for a launch that takes too much shared memory.
    """
    tokens, out = x.shape[0], weight.shape[0]
    tiles, k_blocks = weight.words.shape[:2]
    compiled, use_pdl = is_compiled(few_tokens_kernel), uses_pdl(few_tokens_kernel, x.device)
    y = torch.empty(tokens, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    blocks = triton.cdiv(tokens, 8)
    of_program = 4 if blocks > 2 else blocks
    blocks = triton.cdiv(blocks, of_program) * of_program
    int4 = activation == "int4"
    launch = launch or launches.few_tokens_launch(tiles, k_blocks, blocks, x.device, int4)
    steps = triton.cdiv(k_blocks, launch.warps)
    stages = min(launch.stages, steps)
    int4x2 = int4 and launch.int4x2
    launches.check_shared(launch, 512 * of_program * launch.tiles * launch.warps)
    config = FewTokensConfig(
        BLOCKS=blocks, TOKEN_BLOCKS=of_program, ROW_SCALES=weight.scale.dim() > 0, NUM_WARPS=launch.warps,
        TILES_PER_WARP=launch.tiles, ACCUMULATOR_SETS=launch.accumulator_sets, STAGES=stages,
        ROUNDS=triton.cdiv(steps, stages), INT4X2=int4x2, EVEN_K=k_blocks % (launch.warps * stages) == 0,
        TRIGGER_NEXT_EARLY=launch.trigger_next_early, USE_PDL=use_pdl, COMPILED=compiled,
    )  # fmt: skip
    with launching(x.device):
        codes, scale, total = quantize(
            x, activation, top_k, clamped, blocks=blocks, int4x2=int4x2, trigger_first=launch.quantizer_pdl
        )
        few_tokens_kernel[(triton.cdiv(tiles, launch.tiles), blocks // of_program)](
            y, codes.view(torch.int32), scale, total, weight.words, weight.scale, bias, tokens, out,
            k_blocks, tiles, config=config, num_warps=launch.warps, launch_pdl=use_pdl,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y.to(x.dtype)


@triton.jit
def few_tokens_kernel(
    y, codes, token_scale, total, words, scales, bias, M, N, k_blocks, tiles, config: tl.constexpr
):
    """16 TILES_PER_WARP columns of y [M, N] for 8 TOKEN_BLOCKS tokens.

    Words are loaded anew into the registers of a stage when they have been used. Handing them from one stage
    to the next would make the kernel wait for a word one step after its request.
    """
    NUM_WARPS: tl.constexpr = config.NUM_WARPS
    TILES_PER_WARP: tl.constexpr = config.TILES_PER_WARP
    TOKEN_BLOCKS: tl.constexpr = config.TOKEN_BLOCKS
    ACCUMULATOR_SETS: tl.constexpr = config.ACCUMULATOR_SETS
    STAGES: tl.constexpr = config.STAGES
    ROUNDS: tl.constexpr = config.ROUNDS
    EVEN_K: tl.constexpr = config.EVEN_K
    t = tl.arange(0, 32 * NUM_WARPS)
    lane, warp = t % 32, t // 32
    r, q = lane // 4, lane % 4
    thread_offset = r * 16 + q * 4
    tile = warp * 0 + tl.program_id(0) * TILES_PER_WARP
    block = tl.program_id(1) * TOKEN_BLOCKS
    everyone = t >= 0
    zero = tl.zeros([32 * NUM_WARPS], tl.int32)
    sums = ()
    for _ in tl.static_range(TILES_PER_WARP * TOKEN_BLOCKS * ACCUMULATOR_SETS):
        sums += ((zero, zero, zero, zero),)
    stages = ()
    for i in tl.static_range(STAGES):
        stages += (
            _load_tiles(
                words, tile, tiles, warp + i * NUM_WARPS, k_blocks, thread_offset, everyone, TILES_PER_WARP,
                EVEN_K,
            ),
        )  # fmt: skip
    if config.USE_PDL:
        cuda.gdc_wait()
        if config.TRIGGER_NEXT_EARLY:
            cuda.gdc_launch_dependents()
    # The results that this thread stores: values of a token are consecutive, rows r and r + 8 of each tile.
    OF_TOKEN: tl.constexpr = 2 * TILES_PER_WARP
    EACH: tl.constexpr = each_of(4 * TOKEN_BLOCKS * TILES_PER_WARP, NUM_WARPS)
    value = first_of(4 * TOKEN_BLOCKS * TILES_PER_WARP, NUM_WARPS)
    of_rows = ()
    for i in tl.static_range(EACH if EACH < OF_TOKEN else OF_TOKEN):
        n = (tile + (value + i) % OF_TOKEN // 2) * 16 + (value + i) % 2 * 8 + r
        of_rows += (load_scales(scales, bias, n, N, config.ROW_SCALES),)
    of_tokens = ()
    for i in tl.static_range(0, EACH, OF_TOKEN):
        token = (value + i) // OF_TOKEN
        m = block * 8 + token // 2 * 8 + token % 2 + 2 * q
        scale = tl.load(token_scale + m, mask=m < M, other=0.0)
        of_tokens += ((scale, tl.load(total + m, mask=m < M, other=0)),)
    for step in range(0, ROUNDS * STAGES, STAGES):
        next_stages = ()
        for i in tl.static_range(STAGES):
            k_block = (step + i) * NUM_WARPS + warp
            fragments = _load_fragments(codes, k_block, k_blocks, r, q, block, config)
            sums = _multiply_tiles(stages[i], fragments, sums, config)
            if ROUNDS > 1:
                k_block += STAGES * NUM_WARPS
                next_stages += (
                    _load_tiles(
                        words, tile, tiles, k_block, k_blocks, thread_offset, everyone, TILES_PER_WARP, False
                    ),
                )  # fmt: skip
        if ROUNDS > 1:
            stages = next_stages
    if config.USE_PDL and not config.TRIGGER_NEXT_EARLY:
        cuda.gdc_launch_dependents()

    values = ()
    for token_block in tl.static_range(TOKEN_BLOCKS):
        for column in tl.static_range(2):
            for i in tl.static_range(TILES_PER_WARP):
                upper, lower = zero, zero
                for s in tl.static_range(ACCUMULATOR_SETS):
                    of_set = sums[(i * TOKEN_BLOCKS + token_block) * ACCUMULATOR_SETS + s]
                    upper += of_set[column] >> (2 * s)
                    lower += of_set[2 + column] >> (2 * s)
                values += (upper, lower)
    added = share_sums(values, value, NUM_WARPS, config.COMPILED)
    for i in tl.static_range(EACH):
        scale, code_sum = of_tokens[i // OF_TOKEN]
        product = added[i] >> 4 if config.INT4X2 else added[i]
        result = scaled(product - code_sum, scale, of_rows[i % len(of_rows)], bias)
        token = (value + i) // OF_TOKEN
        m = block * 8 + token // 2 * 8 + token % 2 + 2 * q
        n = (tile + (value + i) % OF_TOKEN // 2) * 16 + (value + i) % 2 * 8 + r
        tl.store(y + m.to(tl.int64) * N + n, result.to(y.dtype.element_ty), mask=(n < N) & (m < M))


@triton.jit
def _load_tiles(
    words, tile, tiles, k_block, k_blocks, thread_offset, everyone, TILES_PER_WARP: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """A thread's words in one K block of TILES_PER_WARP tiles from `tile` on."""
    loaded = ()
    for i in tl.static_range(TILES_PER_WARP):
        number = tl.minimum(tile + i, tiles - 1)
        loaded += (
            load_tile_words(
                words, number, k_block, k_blocks, thread_offset, everyone, everyone, EVEN_K
            ),
        )  # fmt: skip
    return loaded


@triton.jit
def _load_fragments(codes, k_block, k_blocks, r, q, block, config: tl.constexpr):
    """A thread's codes in one K block: for each block of 8 tokens 16 words, in the order of the instructions.

    INT4X2: they come from 8 words, and are 16 times too large.
    """
    LOADS: tl.constexpr = 2 if config.INT4X2 else 4
    BLOCKS: tl.constexpr = config.BLOCKS
    TOKEN_BLOCKS: tl.constexpr = config.TOKEN_BLOCKS
    loaded = ()
    for token_block in tl.static_range(TOKEN_BLOCKS):
        words = ()
        for i in tl.static_range(LOADS):
            at = k_block * (LOADS * 128 * BLOCKS) + block * 128 + r * 16 + q * 4
            pointer = (
                codes + at[:, None] + tl.arange(0, 4)[None, :] + (i * BLOCKS + token_block) * 128
            )  # [T, 4]
            if config.EVEN_K:
                some = four(tl.load(pointer))
            else:
                some = four(tl.load(pointer, mask=(k_block < k_blocks)[:, None], other=0))
            if config.INT4X2:
                words += (_split_halves(some[0], some[1]), _split_halves(some[2], some[3]))
            else:
                words += (some,)
        loaded += (words,)
    return loaded


@triton.jit
def _split_halves(first, second):
    """Lower and upper halves of the bytes of two words, as upper halves of bytes: 16 times the codes."""
    return (
        (first << 4) & -0x0F0F0F10, (second << 4) & -0x0F0F0F10, first & -0x0F0F0F10, second & -0x0F0F0F10
    )  # fmt: skip


@triton.jit
def _multiply_tiles(tiles, fragments, sums, config: tl.constexpr):
    """Add the products of the words of some tiles with the tokens' codes in one K block."""
    TILES_PER_WARP: tl.constexpr = config.TILES_PER_WARP
    TOKEN_BLOCKS: tl.constexpr = config.TOKEN_BLOCKS
    SETS: tl.constexpr = config.ACCUMULATOR_SETS
    added = ()
    for i in tl.static_range(TILES_PER_WARP):
        v = four(tiles[i][0])
        u = four(tiles[i][1])
        for token_block in tl.static_range(TOKEN_BLOCKS):
            added += _multiply_words(
                v, u, fragments[token_block], sums, (i * TOKEN_BLOCKS + token_block) * SETS, config
            )
    return added


@triton.jit
def _multiply_words(v, u, codes, sums, FIRST_SET: tl.constexpr, config: tl.constexpr):
    """Add the products of words v of rows r and u of rows r + 8, four each, with the codes of 8 tokens.

    Their sets of accumulators begin at FIRST_SET. Set s is 4**s times too large, as its words are shifted
    less.
    """
    SETS: tl.constexpr = config.ACCUMULATOR_SETS
    added = ()
    for s in tl.static_range(SETS):
        mask = 0x03030303 << (2 * s)
        of_set = sums[FIRST_SET + s]
        for p in tl.static_range(2):
            for j in tl.static_range(s, 4, SETS):
                a, b = codes[2 * p + j // 2][2 * (j % 2)], codes[2 * p + j // 2][2 * (j % 2) + 1]
                of_set = mma(
                    (v[2 * p] >> (2 * (j - s))) & mask, (u[2 * p] >> (2 * (j - s))) & mask,
                    (v[2 * p + 1] >> (2 * (j - s))) & mask, (u[2 * p + 1] >> (2 * (j - s))) & mask,
                    a, b, of_set, False, config.NUM_WARPS, config.COMPILED,
                )  # fmt: skip
        added += (of_set,)
    return added
