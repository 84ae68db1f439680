"""Products of many tokens with ternary weights, in Triton: int8 matrices on the tensor cores, int32 sums.

This serves what `gluon.matrix` cannot do: other GPUs than Hopper, fp32, scales of groups, rows that begin
where its copies cannot. Weights are unpacked to int8 first, a chunk of rows at a time, so that what is
written stays in the L2 cache: writing and reading a byte for each weight takes little time beside the
products of 2,048 tokens. Products of 8-bit integers run at twice the speed of bf16.

Scales of groups: the sums of a group are scaled and added in fp32 before the next group begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.launch import is_compiled, launching, uses_pdl
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.ternary_linear.triton.launches import ManyTokensLaunch, many_tokens_launch
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.ternary_linear.weight import BLOCK_K, TILE, TernaryWeight

CHUNK = 64 << 20
"""Bytes of unpacked weights at a time, or a little more."""

UNPACKED_BLOCKS = 4
"""K blocks of a tile that a program unpacks."""


def many_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    top_k: int = 0,
    launch: ManyTokensLaunch | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The product of x [tokens, in] with any weights: [tokens, out]; all arrays are contiguous."""
    tokens, out = x.shape[0], weight.shape[0]
    launch = launch or many_tokens_launch(tokens, x.device)
    compiled, use_pdl = is_compiled(_unpack), uses_pdl(_unpack, x.device)
    y = torch.empty(tokens, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    tiles, k_blocks = weight.words.shape[:2]
    some = min(tiles, max(1, chunk // (TILE * BLOCK_K * k_blocks)))
    some = triton.cdiv(tiles, triton.cdiv(tiles, some))  # chunks of one size
    dense = torch.empty(TILE * some, BLOCK_K * k_blocks, dtype=torch.int8, device=x.device)
    with launching(x.device):
        codes, scale, _ = quantize(x, activation, top_k, clamped)
        for first in range(0, tiles, some):
            words = weight.words[first : first + some]
            _unpack[(words.shape[0], triton.cdiv(k_blocks, UNPACKED_BLOCKS))](
                dense.view(torch.int32), words, k_blocks, BLOCKS=UNPACKED_BLOCKS, USE_PDL=use_pdl,
                num_warps=4, launch_pdl=use_pdl,
            )  # fmt: skip
            _multiply(y, codes, scale, dense, weight, bias, TILE * first, launch)
    return y.to(x.dtype)


def _multiply(
    y: torch.Tensor,
    codes: torch.Tensor,
    token_scale: torch.Tensor,
    dense: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    begin: int,
    launch: ManyTokensLaunch,
) -> None:
    """Write the columns of y from `begin` on that `dense` has rows for."""
    tokens, out = y.shape
    end = min(out, begin + dense.shape[0])
    tiles = triton.cdiv(tokens, launch.rows) * triton.cdiv(end - begin, launch.columns)
    options = {"BM": launch.rows, "BN": launch.columns, "num_warps": launch.warps, "enable_fp_fusion": False}
    if weight.grouped:
        assert weight.group is not None
        step = min(128, max(32, triton.next_power_of_2(weight.group)))
        _grouped_kernel[(triton.cdiv(tokens, launch.rows), triton.cdiv(end - begin, launch.columns))](
            y, codes, token_scale, dense, weight.scale, bias, tokens, begin, end, out, weight.shape[1],
            weight.group, weight.scale.shape[1], dense.shape[1],
            BK=step, EVEN_K=weight.group % step == 0 and weight.shape[1] % weight.group == 0, **options,
        )  # fmt: skip
        return
    a = TensorDescriptor.from_tensor(codes, [launch.rows, launch.step])
    b = TensorDescriptor.from_tensor(dense, [launch.columns, launch.step])
    _multiply_kernel[(min(tiles, launch.programs * multiprocessors(y.device)),)](
        y, a, b, token_scale, weight.scale, bias, tokens, begin, end, out, dense.shape[1] // launch.step,
        ROW_SCALES=weight.scale.dim() > 0, BK=launch.step, BAND=launch.band, num_stages=launch.stages,
        **options,
    )  # fmt: skip


@triton.jit
def _unpack(dense, words, k_blocks, BLOCKS: tl.constexpr, USE_PDL: tl.constexpr):
    """Unpack BLOCKS K blocks of a tile to int8, 4 weights a word of `dense`, whose rows are consecutive.

    USE_PDL: the predecessor lets this kernel start when all kernels before it have ended, so that none still
    reads `dense`. This one ends after its predecessor, so whoever waits for this one has waited for both.
    """
    tile, k_block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    e = tl.arange(0, 256 * BLOCKS)
    mask = k_block + e // 256 < k_blocks
    word = tl.load(
        words + (tile * k_blocks + k_block) * 256 + e, mask=mask, other=0, eviction_policy="evict_first"
    )
    j = tl.arange(0, 4)[None, :]
    four = (word[:, None] >> (2 * j)) & 0x03030303  # [256 BLOCKS, 4]
    four = ((four | -0x7F7F7F80) - 0x01010101) ^ -0x7F7F7F80  # c + 1 less 1, and no byte borrows
    row = dense + tile * 16 * (64 * k_blocks) + k_block * 64
    target = e // 16 % 16 * (64 * k_blocks) + e // 256 * 64 + e % 16 * 4
    tl.store(row + target[:, None] + j, four, mask=mask[:, None])
    if USE_PDL:
        cuda.gdc_wait()


@triton.jit
def _store_scaled(
    y, value, token_scale, scales, bias, m, n, M, begin, end, N,
    ROW_SCALES: tl.constexpr, WEIGHTS_SCALED: tl.constexpr,
):  # fmt: skip
    """Scale a tile [BM, BN], add the bias, store. WEIGHTS_SCALED: only the tokens' scales are missing."""
    of_tokens = tl.load(token_scale + m, mask=m < M, other=0.0)[:, None]  # [BM, 1]
    valid = n < end
    if WEIGHTS_SCALED:
        value = value * of_tokens
    elif ROW_SCALES:
        value = value.to(tl.float32) * (of_tokens * tl.load(scales + n, mask=valid, other=0.0)[None, :])
    else:
        value = value.to(tl.float32) * (of_tokens * tl.load(scales))
    if bias is not None:
        value += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]  # [BM, BN]
    tl.store(at, value.to(y.dtype.element_ty), mask=(m < M)[:, None] & valid[None, :])


@triton.jit
def _multiply_kernel(
    y, a, b, token_scale, scales, bias, M, begin, end, N, steps,
    ROW_SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Columns `begin` to `end` of y, tile by tile; BAND tiles below each other share weights in the L2."""
    down, across = tl.cdiv(M, BM), tl.cdiv(end - begin, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0)):
        band = tile // (BAND * across)
        height = tl.minimum(down - band * BAND, BAND)
        at_m = (band * BAND + tile % (BAND * across) % height) * BM
        at_n = tile % (BAND * across) // height * BN
        sums = tl.zeros([BM, BN], tl.int32)
        for step in range(steps):
            sums = tl.dot(a.load([at_m, step * BK]), b.load([at_n, step * BK]).T, sums, out_dtype=tl.int32)
        m, n = at_m + tl.arange(0, BM), begin + at_n + tl.arange(0, BN)
        _store_scaled(y, sums, token_scale, scales, bias, m, n, M, begin, end, N, ROW_SCALES, False)


@triton.jit
def _grouped_kernel(
    y, codes, token_scale, dense, scales, bias, M, begin, end, N, K, group, groups, padded,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of y for scales of groups: sums of a group are added in fp32, in order."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), begin + tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = tl.minimum(m, M - 1).to(tl.int64)[:, None] * padded + k[None, :]  # [BM, BK]
    columns = tl.minimum(n - begin, end - begin - 1).to(tl.int64)[:, None] * padded + k[None, :]  # [BN, BK]
    value = tl.zeros([BM, BN], tl.float32)
    for g in range(groups):
        sums = tl.zeros([BM, BN], tl.int32)
        for at in range(0, group, BK):
            if EVEN_K:
                some = tl.load(codes + rows + (g * group + at))
                weights = tl.load(dense + columns + (g * group + at))
            else:
                mask = k < tl.minimum(group, K - g * group) - at
                some = tl.load(codes + rows + (g * group + at), mask=mask[None, :], other=0)
                weights = tl.load(dense + columns + (g * group + at), mask=mask[None, :], other=0)
            sums = tl.dot(some, weights.T, sums, out_dtype=tl.int32)
        scale = tl.load(scales + n.to(tl.int64) * groups + g, mask=n < end, other=0.0)
        value += sums.to(tl.float32) * scale[None, :]
    _store_scaled(y, value, token_scale, scales, bias, m, n, M, begin, end, N, False, True)
