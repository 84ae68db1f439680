"""Device functions for tiles of ternary weights: their words in registers, the scales of their rows.

A tile is 16 rows of the weights; with 256 columns, a K block, it is 1 KiB of consecutive words. Thread (r, q)
of a warp (lane 4 r + q) takes 4 words of row r and 4 of row r + 8: what it has to give to matrix
instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.ternary_linear.weight import BLOCK_K, TILE

_BLOCK_K = tl.constexpr(BLOCK_K)
_LOWER_ROWS = tl.constexpr(TILE * TILE // 2)
"""Words from row r to row r + 8 of a tile."""


@triton.jit
def load_tile_words(words, tile, k_block, k_blocks, thread_offset, mask, mask8, EVEN_K: tl.constexpr):
    """The 4 words that a thread has of row r, and those of row r + 8, of a tile and K block: [T, 4] each.

    mask, mask8  which threads load, for rows r and for rows r + 8; others get zeros. EVEN_K: all load
    """
    at = words + (tile.to(tl.int64) * k_blocks + k_block)[:, None] * _BLOCK_K
    at += thread_offset[:, None] + tl.arange(0, 4)[None, :]  # [T, 4]
    if EVEN_K:
        upper = tl.load(at, eviction_policy="evict_first")
        lower = tl.load(at + _LOWER_ROWS, eviction_policy="evict_first")
    else:
        inside = k_block < k_blocks
        upper = tl.load(at, mask=(inside & mask)[:, None], other=0, eviction_policy="evict_first")
        lower = tl.load(
            at + _LOWER_ROWS, mask=(inside & mask8)[:, None], other=0, eviction_policy="evict_first"
        )
    return upper, lower


@triton.jit
def load_scales(scales, bias, n, N, ROW_SCALES: tl.constexpr):
    """The scale and the bias of rows n, fp32; the bias of weights without one is 0."""
    scale = tl.load(scales + n, mask=n < N, other=0.0) if ROW_SCALES else tl.load(scales)
    added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if bias is not None else 0.0
    return scale, added


@triton.jit
def scaled(sums, token_scale, of_rows, bias):
    """Sums as fp32, times the scales, plus the bias: `of_rows` is what `load_scales` gives."""
    scale, added = of_rows
    result = sums.to(tl.float32) * (token_scale * scale)
    if bias is not None:
        result += added
    return result
