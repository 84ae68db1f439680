"""Products of tiles of rows with experts in a pool: a program has a tile, and some columns of the output.

Programs of an expert come in groups of tiles, columns after columns: those that run at the same time read
the same weights, and few rows. Reading weights takes most of the time with tiles of 16 rows, multiplying with
tiles of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.expert_pool.lists import ExpertsInUse
from neuzip.kernels.tuning import launch_for

_GROUP = tl.constexpr(8)
"""Tiles whose programs come together."""


def pool_linear(
    rows: torch.Tensor,
    pool: torch.Tensor,
    used: ExpertsInUse,
    first: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write what `ops.pool_linear` returns to `out`. The arguments fit together."""
    slots, columns, width = pool.shape
    tile, _, tiles, count = used.routing
    use = launch_for("expert_pool.linear", rows.device, tile=tile)
    block_n, block_k = use["columns"], max(16, min(use["depth"], triton.next_power_of_2(width)))
    blocks = triton.cdiv(columns, block_n)
    compiled = is_compiled(pool_linear_kernel)
    y = out if compiled else out.float()  # the interpreter cuts bf16 off, and does not round
    launch(
        pool_linear_kernel, (tiles.shape[0] * blocks,),
        rows, pool, bias, y, tiles, count, used.slot_of_tile, first, slots, blocks, columns, width,
        *pool.stride(), TILE=tile, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=width % block_k == 0,
        HAS_BIAS=bias is not None, COMPILED=compiled,
        num_warps=use["warps"], num_stages=use["stages"], pdl=True, device=rows.device,
    )  # fmt: skip
    if y is not out:
        out.copy_(y)


@triton.jit(do_not_specialize=["first", "slots"])
def pool_linear_kernel(
    rows, pool, bias, y, tiles, count, slot_of_tile, first, slots, blocks, N, K,
    slot_stride, n_stride, k_stride,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, COMPILED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """TILE rows and BLOCK_N columns of y [tiles * TILE, N], of `blocks` blocks of columns."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    some_tile = program // blocks  # a tile of the expert, not always the one that is multiplied
    is_used = some_tile < tl.load(count)
    slot = tl.load(slot_of_tile + some_tile, mask=is_used, other=-1) - first
    if is_used & (slot >= 0) & (slot < slots):
        tiles_of_expert = tiles + 4 * some_tile
        expert, first_tile, n_tiles = (
            tl.load(tiles_of_expert), tl.load(tiles_of_expert + 1), tl.load(tiles_of_expert + 2)
        )  # fmt: skip
        number = program - first_tile * blocks
        group = number // (_GROUP * blocks)
        in_group = tl.minimum(n_tiles - group * _GROUP, _GROUP)
        number -= group * _GROUP * blocks
        tile = first_tile + group * _GROUP + number % in_group
        columns = number // in_group * BLOCK_N + tl.arange(0, BLOCK_N)
        used = tl.load(tiles + 4 * tile + 3)
        row, k = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
        is_row, is_column = row < used, columns < N
        x = rows + (tile.to(tl.int64) * TILE + row)[:, None] * K + k[None, :]
        w = pool + slot.to(tl.int64) * slot_stride + k[:, None] * k_stride + columns[None, :] * n_stride
        total = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(x, mask=is_row[:, None], other=0.0)
                b = tl.load(w, mask=is_column[None, :], other=0.0)
            else:
                a = tl.load(x, mask=is_row[:, None] & (at + k < K)[None, :], other=0.0)
                b = tl.load(w, mask=is_column[None, :] & (at + k < K)[:, None], other=0.0)
            if not COMPILED:  # the interpreter takes bf16 for integers
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total)
            x += BLOCK_K
            w += BLOCK_K * k_stride
        if HAS_BIAS:
            own = tl.load(bias + expert.to(tl.int64) * N + columns, mask=is_column, other=0.0)
            total += own.to(tl.float32)[None, :]
        target = y + (tile.to(tl.int64) * TILE + row)[:, None] * N + columns[None, :]
        tl.store(target, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
