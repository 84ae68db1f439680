"""Two kernels for a gated unit of one token, squared_relu(gate product) * up product; each is faster for some
shapes.

whole_glu_kernel     a program multiplies as many tiles of the gate as of `up`, with the same function as a
                     product. Faster for small weights: nothing waits for the gates
skipping_glu_kernel  a program multiplies its tiles of the gate first, and of `up` reads only the rows whose
                     squared ReLU is not 0. Faster for large weights, as less is read

In the second, words go to registers and not to the ring, because which ones are read is known late. The
gate's words of the next tile are in flight while rows of `up` are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.ternary_linear.triton import one_token_bmma, smem_ring
from neuzip.kernels.ternary_linear.triton.one_token_device import (
    Token,
    add_over_warps,
    codes_of_token,
    load_token,
    make_code_memory,
    make_threads,
    multiply,
    no_sums,
    of_rows,
)
from neuzip.kernels.ternary_linear.triton.one_token_kernel import pointers_of_tiles, products
from neuzip.kernels.ternary_linear.triton.quantize_device import INT4
from neuzip.kernels.ternary_linear.triton.registers import four
from neuzip.kernels.ternary_linear.triton.tiles import load_scales, load_tile_words, scaled


@triton.jit(do_not_specialize=["unit_exponent"])
def whole_glu_kernel(
    y, x, gates, gate_scales, ups, up_scales, codes, token_scale, total, N, tiles,
    width, inverse, unit_exponent, k_blocks, epsilon, config: tl.constexpr,
):  # fmt: skip
    """TILES / 2 tiles of the gate and the same of `up`, whichever gates are open."""
    EACH: tl.constexpr = config.TILES // 2
    begin = tl.program_id(0) * EACH
    token = Token(x, codes, token_scale, total, width, inverse, unit_exponent, k_blocks, epsilon)
    threads = make_threads(config)
    tile_pointers = pointers_of_tiles(gates, begin, tiles, k_blocks, threads, EACH)
    tile_pointers += pointers_of_tiles(ups, begin, tiles, k_blocks, threads, EACH)
    sums, scales, token_scale, n = products(
        tile_pointers, (gate_scales, up_scales), None, begin, N, token, threads, config
    )
    DTYPE: tl.constexpr = x.dtype.element_ty
    for i in tl.static_range(EACH):
        gate = tl.where(threads.q == 0, sums[2 * i], sums[2 * i + 1])
        squared = _squared_relu(gate, token_scale, scales[i], DTYPE, config.COMPILED)
        linear = tl.where(threads.q == 0, sums[2 * (EACH + i)], sums[2 * (EACH + i) + 1])
        value = _gated(squared, linear, token_scale, scales[EACH + i], DTYPE, config.COMPILED)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)
        n += 16


@triton.jit(do_not_specialize=["unit_exponent"])
def skipping_glu_kernel(
    y, x, gates, gate_scales, ups, up_scales, codes, token_scale, total, N, tiles,
    width, inverse, unit_exponent, k_blocks, epsilon, config: tl.constexpr, UP_ROW_SCALES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of the gate, and their open rows of `up`. UP_ROW_SCALES: `up` has a scale a row."""
    TILES: tl.constexpr = config.TILES
    STAGES: tl.constexpr = config.STAGES
    EVEN_K: tl.constexpr = config.EVEN_K
    COMPILED: tl.constexpr = config.COMPILED
    INT4_CODES: tl.constexpr = config.KIND == INT4
    DTYPE: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0) * TILES
    token = Token(x, codes, token_scale, total, width, inverse, unit_exponent, k_blocks, epsilon)
    threads = make_threads(config)
    warp, r, q = threads.warp, threads.r, threads.q
    everyone = warp >= 0
    write_at, read_at = make_code_memory(threads, config)
    words = _load_steps(gates, tile, threads, k_blocks, everyone, everyone, 0, STAGES, EVEN_K, config)
    if config.USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    n = tile * 16 + r
    of_gates = ()
    of_ups = ()
    for i in tl.static_range(2 * TILES):  # rows r and r + 8 of each tile
        of_gates += (load_scales(gate_scales, None, n + 8 * i, N, config.ROW_SCALES),)
        of_ups += (load_scales(up_scales, None, n + 8 * i, N, UP_ROW_SCALES),)
    QUANTISED: tl.constexpr = codes is not None
    loaded = load_token(token, threads, config, 4, 1)
    if QUANTISED:
        smem_ring.warp_sync(warp, COMPILED)  # the loads above are issued before the waits below
    pairs, token_scale, total = codes_of_token(loaded, token, config)
    stored = one_token_bmma.put(write_at, pairs, r, INT4_CODES, COMPILED) if config.BITS else pairs
    for i in tl.static_range(TILES):
        sums = _sums_of_rows(
            words, read_at, stored, gates, tile, threads, k_blocks, everyone, everyone, EVEN_K, config
        )
        upper, lower = add_over_warps(sums, total, QUANTISED, config)
        upper = _squared_relu(upper, token_scale, of_gates[2 * i], DTYPE, COMPILED)
        lower = _squared_relu(lower, token_scale, of_gates[2 * i + 1], DTYPE, COMPILED)
        open, open8 = (upper != 0) & (n < N), (lower != 0) & (n + 8 < N)
        up_words = _load_steps(ups, tile, threads, k_blocks, open, open8, 0, STAGES, False, config)
        next_tile = tl.minimum(tile + 1, tiles - 1)
        if i + 1 < TILES:  # in flight meanwhile
            words = _load_steps(
                gates, next_tile, threads, k_blocks, everyone, everyone, 0, STAGES, EVEN_K, config
            )
        sums = _sums_of_rows(
            up_words, read_at, stored, ups, tile, threads, k_blocks, open, open8, False, config
        )
        tile = next_tile
        upper_up, lower_up = add_over_warps(sums, total, QUANTISED, config)
        upper = _gated(upper, upper_up, token_scale, of_ups[2 * i], DTYPE, COMPILED)
        lower = _gated(lower, lower_up, token_scale, of_ups[2 * i + 1], DTYPE, COMPILED)
        value, row = tl.where(q == 0, upper, lower), n + 8 * q
        mask = (warp == 0) & (q < 2) & (row < N)
        tl.store(y + row, value.to(y.dtype.element_ty), mask=mask)
        n += 16


@triton.jit
def _load_steps(
    words, tile, threads, k_blocks, mask, mask8, FROM: tl.constexpr, COUNT: tl.constexpr,
    EVEN_K: tl.constexpr, config: tl.constexpr,
):  # fmt: skip
    """A thread's words in COUNT steps of a tile from step FROM on, masked for rows r and rows r + 8."""
    loaded = ()
    for step in tl.static_range(FROM, FROM + COUNT):
        loaded += (
            load_tile_words(
                words, threads.warp * 0 + tile, threads.warp + step * config.NUM_WARPS, k_blocks,
                threads.offset, mask, mask8, EVEN_K,
            ),
        )  # fmt: skip
    return loaded


@triton.jit
def _sums_of_rows(
    loaded, read_at, stored, words, tile, threads, k_blocks, mask, mask8, EVEN_K: tl.constexpr,
    config: tl.constexpr,
):  # fmt: skip
    """A thread's part of the sums of rows r and r + 8, int32; the first STAGES steps are `loaded`."""
    NUM_WARPS: tl.constexpr = config.NUM_WARPS
    STEPS: tl.constexpr = config.STEPS
    sums = no_sums(config)
    for step in tl.static_range(STEPS):
        if step + config.STAGES < STEPS:
            loaded += _load_steps(
                words, tile, threads, k_blocks, mask, mask8, step + config.STAGES, 1, EVEN_K, config
            )
        codes = (
            one_token_bmma.take(
                read_at, stored, threads.r, step, NUM_WARPS, config.KIND == INT4, config.COMPILED
            )
            if config.BITS
            else stored[step]
        )
        upper, lower = loaded[step]
        sums = multiply(four(upper), four(lower), codes, sums, config)
    return of_rows(sums, threads.q, config)


@triton.jit
def _squared_relu(sums, token_scale, of_rows, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """The squared ReLU of a gate, rounded to DTYPE as a product and a square would be, fp32."""
    gate = widened(rounded(scaled(sums, token_scale, of_rows, None), DTYPE, COMPILED))
    gate = tl.where(gate <= 0, 0.0, gate)  # NaN stays
    return widened(rounded(gate * gate, DTYPE, COMPILED))


@triton.jit
def _gated(squared, sums, token_scale, of_rows, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """The product with `up` times the squared gate; 0 where that is 0, whatever the product is."""
    linear = widened(rounded(scaled(sums, token_scale, of_rows, None), DTYPE, COMPILED))
    return tl.where(squared == 0, 0.0, squared * linear)
