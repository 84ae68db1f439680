"""Products of many tokens with ternary weights, in Triton: codes as int8 for the tensor cores, int32 sums.

For what `gluon_matrix` cannot do: other cards than Hopper, fp32, scales of groups, rows that its copies
cannot begin at. Weights are unpacked to int8 first, some rows at a time, so that what is written stays in the
second-level cache: 1 byte a weight written and read is little beside the products of 2,048 tokens. Products
of 8-bit integers run at twice the speed of bf16.

Scales of groups: the sums of a group are scaled and added in fp32 before the next group begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.device.properties import early_launches, multiprocessors
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.ternary_linear.weight import STEP, TILE, TernaryWeight

CHUNK = 64 << 20
"""Bytes of unpacked weights at a time, or a little more."""

UNPACKED = 4
"""Steps of a tile that a program unpacks."""


@dataclass(frozen=True)
class Launch:
    """The tile of a program and how it is launched."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    group: int = 8  # tiles below each other that are worked through together, for the second-level cache
    flatten: bool = False  # tiles and steps are one loop
    programs: int = 1  # a multiprocessor


def launch_of(tokens: int) -> Launch:
    """What was fastest on an H200 (benchmarks/notes): programs that take turns beat larger tiles."""
    if tokens <= 256:
        return Launch(64, 128, 128, 4, 4, programs=3)
    return Launch(128, 128, 128, 4, 3, programs=2)


def many_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    kept: int = 0,
    launch: Launch | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The product of x [tokens, in] with any weights: [tokens, out]; all arrays are contiguous."""
    tokens, out = x.shape[0], weight.shape[0]
    launch = launch or launch_of(tokens)
    compiled = isinstance(_unpack, triton.JITFunction)
    y = torch.empty(tokens, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    tiles, steps = weight.words.shape[:2]
    some = min(tiles, max(1, chunk // (TILE * STEP * steps)))
    some = triton.cdiv(tiles, triton.cdiv(tiles, some))  # chunks of one size
    dense = torch.empty(TILE * some, STEP * steps, dtype=torch.int8, device=x.device)
    with torch.cuda.device_of(x), LAUNCHING:
        codes, scale, _ = quantize(x, activation, kept, clamped)
        early = compiled and early_launches(x.device)
        for first in range(0, tiles, some):
            words = weight.words[first : first + some]
            _unpack[(words.shape[0], triton.cdiv(steps, UNPACKED))](
                dense.view(torch.int32),
                words,
                steps,
                STEPS=UNPACKED,
                EARLY=early,
                num_warps=4,
                launch_pdl=early,
            )
            _multiply(y, codes, scale, dense, weight, bias, TILE * first, launch)
    return y.to(x.dtype)


def _multiply(
    y: torch.Tensor,
    codes: torch.Tensor,
    token_scale: torch.Tensor,
    dense: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    first: int,
    launch: Launch,
) -> None:
    """Write the columns of y from `first` on that `dense` has rows for."""
    tokens, out = y.shape
    stop = min(out, first + dense.shape[0])
    tiles = triton.cdiv(tokens, launch.rows) * triton.cdiv(stop - first, launch.columns)
    options = {"BM": launch.rows, "BN": launch.columns, "num_warps": launch.warps, "enable_fp_fusion": False}
    if weight.grouped:
        assert weight.group is not None
        step = min(128, max(32, triton.next_power_of_2(weight.group)))
        _grouped_kernel[(triton.cdiv(tokens, launch.rows), triton.cdiv(stop - first, launch.columns))](
            y, codes, token_scale, dense, weight.scale, bias, tokens, first, stop, out, weight.shape[1],
            weight.group, weight.scale.shape[1], dense.shape[1],
            BK=step, EVEN=weight.group % step == 0 and weight.shape[1] % weight.group == 0, **options,
        )  # fmt: skip
        return
    a = TensorDescriptor.from_tensor(codes, [launch.rows, launch.step])
    b = TensorDescriptor.from_tensor(dense, [launch.columns, launch.step])
    _multiply_kernel[(min(tiles, launch.programs * multiprocessors(y.device)),)](
        y, a, b, token_scale, weight.scale, bias, tokens, first, stop, out, dense.shape[1] // launch.step,
        ROWS=weight.scale.dim() > 0, BK=launch.step, GROUP=launch.group, FLATTEN=launch.flatten,
        num_stages=launch.stages, **options,
    )  # fmt: skip


@triton.jit
def _unpack(dense, words, steps, STEPS: tl.constexpr, EARLY: tl.constexpr):
    """int8 of a tile's words, 4 a word of `dense`, whose rows follow each other.

    EARLY: starts when the kernel ahead lets it, which is when all kernels before that one have ended, so that
    nobody reads `dense`; and ends after it, so that who waits for this one has waited for both.
    """
    tile, step = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEPS
    e = tl.arange(0, 256 * STEPS)
    inside = step + e // 256 < steps
    word = tl.load(
        words + (tile * steps + step) * 256 + e, mask=inside, other=0, eviction_policy="evict_first"
    )
    j = tl.arange(0, 4)[None, :]
    four = (word[:, None] >> (2 * j)) & 0x03030303
    four = ((four | -0x7F7F7F80) - 0x01010101) ^ -0x7F7F7F80  # c + 1 less 1, and no byte borrows
    row = dense + tile * 16 * (64 * steps) + step * 64
    target = e // 16 % 16 * (64 * steps) + e // 256 * 64 + e % 16 * 4
    tl.store(row + target[:, None] + j, four, mask=inside[:, None])
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def _store_scaled(
    y, value, token_scale, scales, bias, m, n, M, first, stop, N, ROWS: tl.constexpr, DONE: tl.constexpr
):
    """Scale a tile, DONE: but for the tokens' scales it is, add the bias, store."""
    own = tl.load(token_scale + m, mask=m < M, other=0.0)[:, None]
    valid = n < stop
    if DONE:
        value = value * own
    elif ROWS:
        value = value.to(tl.float32) * (own * tl.load(scales + n, mask=valid, other=0.0)[None, :])
    else:
        value = value.to(tl.float32) * (own * tl.load(scales))
    if bias is not None:
        value += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=(m < M)[:, None] & valid[None, :])


@triton.jit
def _multiply_kernel(
    y, a, b, token_scale, scales, bias, M, first, stop, N, steps,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Columns `first` to `stop` of y, one tile after the other."""
    down, across = tl.cdiv(M, BM), tl.cdiv(stop - first, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        band = tile // (GROUP * across)
        height = tl.minimum(down - band * GROUP, GROUP)
        at_m = (band * GROUP + tile % (GROUP * across) % height) * BM
        at_n = tile % (GROUP * across) // height * BN
        sums = tl.zeros([BM, BN], tl.int32)
        for step in range(steps):
            sums = tl.dot(a.load([at_m, step * BK]), b.load([at_n, step * BK]).T, sums, out_dtype=tl.int32)
        m, n = at_m + tl.arange(0, BM), first + at_n + tl.arange(0, BN)
        _store_scaled(y, sums, token_scale, scales, bias, m, n, M, first, stop, N, ROWS, False)


@triton.jit
def _grouped_kernel(
    y, codes, token_scale, dense, scales, bias, M, first, stop, N, K, group, groups, padded,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of y, for scales of groups: sums of a group are added in fp32, in order."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), first + tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = tl.minimum(m, M - 1).to(tl.int64)[:, None] * padded + k[None, :]
    columns = tl.minimum(n - first, stop - first - 1).to(tl.int64)[:, None] * padded + k[None, :]
    value = tl.zeros([BM, BN], tl.float32)
    for g in range(groups):
        sums = tl.zeros([BM, BN], tl.int32)
        for at in range(0, group, BK):
            if EVEN:
                some = tl.load(codes + rows + (g * group + at))
                weights = tl.load(dense + columns + (g * group + at))
            else:
                inside = k < tl.minimum(group, K - g * group) - at
                some = tl.load(codes + rows + (g * group + at), mask=inside[None, :], other=0)
                weights = tl.load(dense + columns + (g * group + at), mask=inside[None, :], other=0)
            sums = tl.dot(some, weights.T, sums, out_dtype=tl.int32)
        scale = tl.load(scales + n.to(tl.int64) * groups + g, mask=n < stop, other=0.0)
        value += sums.to(tl.float32) * scale[None, :]
    _store_scaled(y, value, token_scale, scales, bias, m, n, M, first, stop, N, False, True)
