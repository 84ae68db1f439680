"""The kernel that multiplies one token with one or more weights, quantising the token itself if it can.

In time, for a program (PDL: the kernel starts before its predecessor in the stream has ended):

    begin      start to copy the words of the first STAGES steps to shared memory: weights never change
    gdc_wait   the predecessor has ended, so the token is complete
    token      load the activations of each thread
    prologue   while they are in flight, move the words of PROLOGUE steps to registers and start further
               copies
    codes      quantise: one exchange between all threads gives the size of the token
    steps      take the words of a step from the ring, start the copy STAGES steps later, multiply
    sums       add up over the warps in one exchange, scale, store

`smem_ring` is the ring of words, `one_token_bmma` and `one_token_int8` are the two ways to multiply. Bit by
bit, a program's tiles take each step one after the other, as the columns of codes are made once for all of
them. By bytes it finishes one tile before the next, as each tile has many accumulators.

gdc_launch_dependents lets the next kernel of the stream start. If it comes early, the next kernel's words are
requested before this one's last, so for some shapes it waits until all words of this kernel are requested.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.ternary_linear.triton import one_token_bmma, one_token_int8, smem_ring
from neuzip.kernels.ternary_linear.triton.one_token_device import (
    Token,
    add_over_warps,
    codes_of_token,
    load_token,
    make_code_memory,
    make_threads,
)
from neuzip.kernels.ternary_linear.triton.quantize_device import INT4
from neuzip.kernels.ternary_linear.triton.tiles import load_scales, scaled
from neuzip.kernels.ternary_linear.weight import BLOCK_K

_BLOCK_K = tl.constexpr(BLOCK_K)
_LOWEST = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["unit_exponent"])
def one_token_kernel(
    ys, x, words, scales, biases, codes, token_scale, total, outs, tiles,
    width, inverse, unit_exponent, k_blocks, epsilon, config: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one of the products `ys`: the programs of each weight follow those of the one before.

    ys, words, scales, biases, outs, tiles  tuples, an element for each weight
    """
    TILES: tl.constexpr = config.TILES
    program = tl.program_id(0)
    begin, before = program, 0
    y, word, scale, bias, N, count = ys[0], words[0], scales[0], biases[0], outs[0], tiles[0]
    for i in tl.static_range(1, len(ys)):
        before += tl.cdiv(tiles[i - 1], TILES)
        if program >= before:
            begin = program - before
            y, word, scale, N, count = ys[i], words[i], scales[i], outs[i], tiles[i]
            if bias is not None:
                bias = biases[i]
    begin *= TILES

    token = Token(x, codes, token_scale, total, width, inverse, unit_exponent, k_blocks, epsilon)
    threads = make_threads(config)
    tile_pointers = pointers_of_tiles(word, begin, count, k_blocks, threads, TILES)
    sums, of_rows, token_scale, n = products(tile_pointers, (scale,), bias, begin, N, token, threads, config)
    for i in tl.static_range(TILES):
        row_sum = tl.where(threads.q == 0, sums[2 * i], sums[2 * i + 1])
        value = scaled(row_sum, token_scale, of_rows[i], bias)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)
        n += 16


@triton.jit
def pointers_of_tiles(words, tile, tiles, k_blocks, threads, COUNT: tl.constexpr):
    """Pointers to a thread's words in COUNT tiles from `tile` on, in the first K block of its warp."""
    pointers = ()
    for i in tl.static_range(COUNT):
        number = tl.minimum(tile + i, tiles - 1).to(tl.int64)
        pointers += (words + (number * k_blocks + threads.warp) * _BLOCK_K + threads.offset,)
    return pointers


@triton.jit
def products(tile_pointers, scales, bias, begin, N, token, threads, config: tl.constexpr):
    """Products of a token with the rows of some tiles, of one weight or two: integer sums and their scales.

    tile_pointers  of each tile, as many of each weight, from tile `begin` on
    scales         a pointer for each weight

    Returns the sums of rows r and r + 8 of each tile, for every thread; what `load_scales` gives for each
    tile; the token's scale; and the row that a thread stores of the first tile, N for none. Row r is that of
    q = 0, row r + 8 that of q = 1, both in the first warp.
    """
    NUM_WARPS: tl.constexpr = config.NUM_WARPS
    STEPS: tl.constexpr = config.STEPS
    STAGES: tl.constexpr = config.STAGES
    PROLOGUE: tl.constexpr = config.PROLOGUE
    BITS: tl.constexpr = config.BITS
    COMPILED: tl.constexpr = config.COMPILED
    INT4_CODES: tl.constexpr = config.KIND == INT4
    TILES: tl.constexpr = len(tile_pointers)
    ALL_STEPS: tl.constexpr = TILES * STEPS
    warp, r, q = threads.warp, threads.r, threads.q
    ring = smem_ring.make(warp, r, q, STAGES, NUM_WARPS, COMPILED)
    write_at, read_at = make_code_memory(threads, config)
    for step in tl.static_range(STAGES):
        at, mask = _words_of_step(tile_pointers, warp, token.k_blocks, step, config)
        smem_ring.begin_copy(ring, at, mask, step, STAGES, config.EVEN_K, COMPILED)
    if config.USE_PDL:
        cuda.gdc_wait()
        if config.TRIGGER_NEXT_EARLY:
            cuda.gdc_launch_dependents()
    QUANTISED: tl.constexpr = token.codes is not None
    loaded = load_token(token, threads, config, 1, 4)
    if PROLOGUE > 0 or QUANTISED:
        smem_ring.warp_sync(warp, COMPILED)  # the loads above are issued before the waits below
    prologue = ()
    for step in tl.static_range(PROLOGUE):
        prologue += (_take_step(ring, tile_pointers, warp, q, token.k_blocks, step, config),)
    n = tl.where((warp == 0) & (q < 2), begin * 16 + r + 8 * q, N)
    TILES_OF_WEIGHT: tl.constexpr = TILES // len(scales)
    of_rows = ()
    for i in tl.static_range(TILES):
        of_rows += (
            load_scales(
                scales[i // TILES_OF_WEIGHT], bias, n + 16 * (i % TILES_OF_WEIGHT), N, config.ROW_SCALES
            ),
        )  # fmt: skip
    pairs, token_scale, total = codes_of_token(loaded, token, config)
    stored = one_token_bmma.put(write_at, pairs, r, INT4_CODES, COMPILED) if BITS else pairs
    sums = ()
    if BITS:
        of_tiles = ()
        for _ in tl.static_range(TILES):
            of_tiles += (one_token_bmma.no_counts(NUM_WARPS),)
        for step in tl.static_range(STEPS):
            columns = one_token_bmma.take(read_at, stored, r, step, NUM_WARPS, INT4_CODES, COMPILED)
            added = ()
            for i in tl.static_range(TILES):
                if step * TILES + i < PROLOGUE:
                    taken = prologue[step * TILES + i]
                else:
                    taken = _take_step(ring, tile_pointers, warp, q, token.k_blocks, step * TILES + i, config)
                added += (
                    one_token_bmma.count(
                        taken[0], taken[1], columns, of_tiles[i], NUM_WARPS, INT4_CODES, COMPILED
                    ),
                )  # fmt: skip
            of_tiles = added
        for i in tl.static_range(TILES):
            sums += one_token_bmma.of_rows(of_tiles[i], q, INT4_CODES)
    else:
        for step in tl.static_range(ALL_STEPS):
            if step < PROLOGUE:
                taken = prologue[step]
            else:
                taken = _take_step(ring, tile_pointers, warp, q, token.k_blocks, step, config)
            if step % STEPS == 0:
                of_tile = one_token_int8.no_sums(NUM_WARPS)
            of_tile = one_token_int8.multiply(
                taken[0], taken[1], stored[step % STEPS], of_tile, NUM_WARPS, COMPILED
            )
            if step % STEPS == STEPS - 1:
                sums += one_token_int8.of_rows(of_tile, q)
    sums = add_over_warps(sums, total, QUANTISED, config)
    # No sum is that small, which the compiler does not know. So the token's scale depends on the sums, and is
    # not multiplied with those of the rows before: that would wait for the rows' scales, whose loads are in
    # flight.
    return sums, of_rows, tl.where(sums[0] == _LOWEST, 0.0, token_scale), n


@triton.jit
def _words_of_step(tile_pointers, warp, k_blocks, STEP: tl.constexpr, config: tl.constexpr):
    """Pointers to a thread's words in one of the steps of all tiles; and whether there are any."""
    TILES: tl.constexpr = len(tile_pointers)
    TILE: tl.constexpr = STEP % TILES if config.BITS else STEP // config.STEPS
    FIRST: tl.constexpr = (STEP // TILES if config.BITS else STEP % config.STEPS) * config.NUM_WARPS
    return tile_pointers[TILE] + FIRST * _BLOCK_K, warp + FIRST < k_blocks


@triton.jit
def _take_step(ring, tile_pointers, warp, q, k_blocks, STEP: tl.constexpr, config: tl.constexpr):
    """Take the words of a step, of rows r and r + 8, and start the copy of those of STAGES steps later."""
    STAGES: tl.constexpr = config.STAGES
    ALL_STEPS: tl.constexpr = len(tile_pointers) * config.STEPS
    at, mask = _words_of_step(tile_pointers, warp, k_blocks, STEP, config)
    taken = smem_ring.take(ring, at, mask, q, STEP, ALL_STEPS, STAGES, config.COMPILED)
    if STEP + STAGES < ALL_STEPS:
        at, mask = _words_of_step(tile_pointers, warp, k_blocks, STEP + STAGES, config)
        smem_ring.begin_copy(ring, at, mask, STEP + STAGES, STAGES, config.EVEN_K, config.COMPILED)
    LAST_REQUEST: tl.constexpr = ALL_STEPS - STAGES - 1 if ALL_STEPS > STAGES else 0
    if config.USE_PDL and not config.TRIGGER_NEXT_EARLY and STEP == LAST_REQUEST:
        cuda.gdc_launch_dependents()
    return taken
