"""Statistics of logits that are never in memory, in Triton.

Logits are divided into tiles of `rows` tokens times `columns` of the vocabulary. A program computes one after
the other and writes of each token only what is needed to put tiles together again, its *parts*:

    maximum    fp32, the largest logit z of the tile
    total      fp32, sum of 2^t          t = log2(e) (z - maximum)
    weighted   fp32, sum of 2^t t
    counts     int32, how many logits are larger than the target's << 16 | the first column of the maximum

The plain loss needs the first two only. A second kernel folds the parts of a token in the order of the
vocabulary: no atomics, no locks, the same bits in every run. Parts have room in the workspace for a *chunk*
of the vocabulary; what is known after a chunk are numbers a token, with which the next chunk goes on.

The target's logit comes first, by the same matrix instructions on the same order of D, so that within a tile
it is counted which logits are above it.

| input                               | what happens                                                      |
|-------------------------------------|-------------------------------------------------------------------|
| rows of D values that are no        | read by pointers instead of by the tensor memory accelerator      |
| multiple of 16 bytes, or strided    |                                                                   |
| N or V no multiple of the tile      | columns beyond V count as minus infinity, tokens beyond N nothing |
| a logit of minus infinity           | a probability of 0                                                |
| a logit that is NaN or plus infinity| `total` is NaN, and so is the log-sum-exp                         |
| fp32                                | products in fp32, without matrix instructions                     |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import launch
from neuzip.kernels.linear_cross_entropy.head import Head, TokenStatistics
from neuzip.kernels.linear_cross_entropy.triton.tiles import (
    LOG2E,
    bias_of,
    chunks,
    describable,
    finite,
    flags,
    multipliable,
    multiplied,
    operands,
    products,
    programs,
    statistics_launch,
    tile_logits,
    tile_of,
    tiles_at_once,
    transformed,
)
from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor

SEGMENT = 4096
"""Targets whose packed rows are decoded at a time."""

FOLDED = 32
"""Tokens of a program that folds tiles."""

LN2 = tl.constexpr(0.6931471805599453)


def forward(
    head: Head, target: Tensor, *, ignore_index: int, workspace: int, tile_maxima: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a loss needs: log-sum-exp and the targets' logits, fp32 [N], and the largest logits of tiles.

    These are bf16 [tiles, N], rounded up, of tiles as wide as `tile_columns` says, the last may be narrower.
    None if they are not asked for.
    """
    maxima = None
    if tile_maxima:
        tiles = triton.cdiv(head.vocabulary, tile_columns(head))
        maxima = torch.empty(tiles, head.tokens, dtype=torch.bfloat16, device=head.hidden.device)
    statistics = _run(head, target, ignore_index, workspace, extras=False, maxima=maxima)
    return statistics.lse, statistics.target_logit, maxima


def token_statistics(head: Head, target: Tensor, ignore_index: int, workspace: int) -> TokenStatistics:
    """The statistics of each token. `workspace` bounds the bytes of the parts, and of decoded weights."""
    return _run(head, target, ignore_index, workspace, extras=True, maxima=None)


def tile_columns(head: Head) -> int:
    """Columns of the vocabulary in a tile of `forward`."""
    config = statistics_launch(head.hidden.dtype, head.tokens, describable(head), False, head.hidden.device)
    return config.columns


def _run(
    head: Head, target: Tensor, ignore_index: int, workspace: int, extras: bool, maxima: Tensor | None
) -> TokenStatistics:
    tokens, device = head.tokens, head.hidden.device
    described = describable(head)
    config = statistics_launch(head.hidden.dtype, tokens, described, extras, device)
    state = TokenState.empty(tokens, device, extras)
    logit = target_logits(head, target, ignore_index)
    if not tokens:
        return TokenStatistics(state.lse, logit, state.argmax, state.entropy, state.rank)
    kinds = 4 if extras else 2
    tiles = triton.cdiv(head.vocabulary, config.columns)
    capacity = workspace - 12 * tokens  # what is known after a chunk
    at_once = tiles_at_once(tiles, capacity // (4 * kinds * tokens), head, config.columns, workspace)
    parts = torch.empty(kinds, at_once, tokens, device=device, dtype=torch.float32)
    counts = parts[-1].view(torch.int32)
    for start, weight in chunks(head, at_once * config.columns):
        columns = weight.shape[0]
        hidden, weight, strides = operands(head.hidden, weight, config, described)
        down, across = triton.cdiv(tokens, config.rows), triton.cdiv(columns, config.columns)
        launch(
            _tile_statistics, (programs(config, down * across, device),),
            parts[0], parts[1], parts[2 % kinds], counts, hidden, weight, bias_of(head), target, logit,
            start, tokens, columns, head.scale, head.softcap or 1.0, *strides,
            D=head.hidden.shape[1], BM=config.rows, BN=config.columns, BK=config.step, GROUP=config.group,
            TMA=described, EXTRAS=extras, EVEN=columns % config.columns == 0, FLATTEN=config.flatten,
            **flags(head), num_warps=config.num_warps, num_stages=config.num_stages, device=device,
        )  # fmt: skip
        launch(
            fold, (triton.cdiv(tokens, FOLDED),),
            parts[0], parts[1], parts[2 % kinds], counts,
            None if maxima is None else maxima.view(torch.int16), logit,
            state.maximum, state.total, state.weighted,
            state.lse, state.entropy, state.rank, state.argmax,
            start, int(start == 0), int(start + columns == head.vocabulary), tokens, across,
            BN=config.columns, EXTRAS=extras, MAXIMA=maxima is not None, T=64, R=FOLDED, num_warps=8,
            device=device,
        )  # fmt: skip
    return TokenStatistics(state.lse, logit, state.argmax, state.entropy, state.rank)


@dataclass(frozen=True)
class TokenState:
    """What is known of each token after a chunk, [N], and after the last one."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    lse: Tensor
    entropy: Tensor
    rank: Tensor
    argmax: Tensor

    @classmethod
    def empty(cls, tokens: int, device: torch.device, extras: bool) -> TokenState:
        """Memory for it, which the first chunk writes. Without extras there are only three of them."""
        some = tokens if extras else 0
        numbers = [
            torch.empty(n, device=device, dtype=torch.float32) for n in (tokens, tokens, some, tokens, some)
        ]
        places = [torch.empty(some, dtype=torch.int64, device=device) for _ in range(2)]
        return cls(*numbers, *places)


def target_logits(head: Head, target: Tensor, ignore_index: int) -> Tensor:
    """The logits of the targets, fp32 [N]; NaN for those that are ignored or outside the vocabulary."""
    out = torch.empty(head.tokens, device=head.hidden.device, dtype=torch.float32)
    hidden, weight, d = head.hidden, head.weight, head.hidden.shape[1]
    # The same steps as without descriptors: see `multiplied`.
    depth = statistics_launch(hidden.dtype, head.tokens, False, False, hidden.device).step
    step = SEGMENT if isinstance(weight, PackedTensor) else max(1, head.tokens)
    for start in range(0, head.tokens, step):
        rows = slice(start, start + step)
        part, ids = hidden[rows], target[rows]
        if isinstance(weight, PackedTensor):
            chosen = packed_linear.rows(weight, ids.clamp(0, head.vocabulary - 1))
        else:
            chosen = weight
        part, chosen = multipliable(part), multipliable(chosen)
        launch(
            _target_logits, (triton.cdiv(part.shape[0], 64),),
            out[rows], part, chosen, bias_of(head), ids, ignore_index, part.shape[0], head.vocabulary,
            head.scale, head.softcap or 1.0, *part.stride(), *chosen.stride(),
            D=d, B=64, BK=depth, CHOSEN=isinstance(weight, PackedTensor), **flags(head),
            num_warps=8, num_stages=2, device=hidden.device,
        )  # fmt: skip
    return out


@triton.jit
def _tile_statistics(
    maximum_ptr, total_ptr, weighted_ptr, counts_ptr, hidden, weight, bias, target_ptr, logit_ptr,
    start, N, C, scale, softcap, h_row, h_col, w_row, w_col,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, EXTRAS: tl.constexpr, EVEN: tl.constexpr, FLATTEN: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The parts of all tiles of a chunk: C columns of the vocabulary from `start` on."""
    down = tl.cdiv(N, BM)
    across = tl.cdiv(C, BN)
    for i in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        tile_row, tile_column = tile_of(i, down, across, GROUP)
        row, column = tile_row * BM, tile_column * BN
        acc = products(
            hidden, weight, row, column, N, C, h_row, h_col, w_row, w_col, D, BM, BN, BK, TMA
        )  # fmt: skip
        z = tile_logits(acc, bias, column, start, C, scale, softcap, BN, BIAS, SCALE, SOFTCAP, EVEN)

        m = row + tl.arange(0, BM)  # [BM]
        inside = m < N
        at = tile_column.to(tl.int64) * N + m
        maximum = tl.max(z, 1)
        near = finite(maximum)
        scaled = near * LOG2E
        lost = tl.fma(near, tl.full((BM,), LOG2E, tl.float32), -scaled)  # by that rounding
        t = tl.fma(z, tl.full((BM, BN), LOG2E, tl.float32), tl.broadcast_to(-scaled[:, None], (BM, BN)))
        e = tl.exp2(t)
        total = tl.sum(e, 1)
        back = tl.exp2(-lost)
        tl.store(maximum_ptr + at, maximum, mask=inside)
        tl.store(total_ptr + at, total * back, mask=inside)
        if EXTRAS:
            if BIAS or not EVEN:
                t = tl.maximum(t, -300.0)  # 0 times minus infinity is nothing
            weighted = tl.sum(e * t, 1)
            tl.store(weighted_ptr + at, (weighted - lost * total) * back, mask=inside)
            logit = tl.load(logit_ptr + m, mask=inside, other=float("inf"))
            own = tl.load(target_ptr + m, mask=inside, other=-1) - (start + column)
            tl.store(counts_ptr + at, counted(z, maximum, logit, own, BN), mask=inside)


@triton.jit
def counted(z, maximum, logit, own, BN: tl.constexpr):
    """How many logits of a tile are larger than the target's << 16 | the first column of the maximum.

    logit, own: the targets' logits and columns [BM], which need not be in the tile.
    """
    n = tl.arange(0, BN)  # [BN]
    larger = tl.sum(tl.where(z > logit[:, None], 1.0, 0.0), 1)
    if tl.max(((own >= 0) & (own < BN)).to(tl.int32), 0) > 0:  # by rounding a target may be above itself
        itself = (n[None, :] == own.to(tl.int32)[:, None]) & (z > logit[:, None])
        larger -= tl.sum(tl.where(itself, 1.0, 0.0), 1)
    first = tl.min(tl.where(z == maximum[:, None], n[None, :], BN), 1)
    return larger.to(tl.int32) << 16 | first


@triton.jit(do_not_specialize=["start", "is_first", "is_last", "tiles"])
def fold(
    maximum_ptr, total_ptr, weighted_ptr, counts_ptr, maxima_ptr, logit_ptr,
    state_maximum, state_total, state_weighted, lse_ptr, entropy_ptr, rank_ptr, argmax_ptr,
    start, is_first, is_last, N, tiles,
    BN: tl.constexpr, EXTRAS: tl.constexpr, MAXIMA: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Put the tiles of a chunk together with what was known before; after the last one, the results."""
    m = tl.program_id(0) * R + tl.arange(0, R)
    inside = m < N
    maximum = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    weighted = tl.zeros((R,), tl.float32)
    rank = tl.zeros((R,), tl.int32)
    argmax = tl.full((R,), -1, tl.int32)
    if is_first == 0:  # Triton 3.6 has no `not` of an integer
        maximum = tl.load(state_maximum + m, mask=inside, other=0.0)
        total = tl.load(state_total + m, mask=inside, other=0.0)
        if EXTRAS:
            weighted = tl.load(state_weighted + m, mask=inside, other=0.0)
            rank = tl.load(rank_ptr + m, mask=inside, other=0).to(tl.int32)
            argmax = tl.load(argmax_ptr + m, mask=inside, other=0).to(tl.int32)
    for i in range(0, tiles, T):
        tile = i + tl.arange(0, T)
        at = tile.to(tl.int64)[:, None] * N + m[None, :]  # [T, R]
        there = (tile < tiles)[:, None] & inside[None, :]
        part = tl.load(maximum_ptr + at, mask=there, other=float("-inf"))
        largest = tl.max(part, 0)
        merged = tl.maximum(maximum, largest)
        below = tl.maximum((part - finite(merged)[None, :]) * LOG2E, -1e9)
        before = tl.maximum((maximum - finite(merged)) * LOG2E, -1e9)
        factor = tl.exp2(below)
        part_total = tl.load(total_ptr + at, mask=there, other=0.0)
        if EXTRAS:
            part_weighted = tl.load(weighted_ptr + at, mask=there, other=0.0)
            counts = tl.load(counts_ptr + at, mask=there, other=0)
            moved = tl.sum(factor * (part_weighted + below * part_total), 0)
            weighted = tl.exp2(before) * (weighted + before * total) + moved
            rank += tl.sum(counts >> 16, 0)
            first = tl.min(tl.where(part == largest[None, :], tile[:, None], tiles), 0)
            column = tl.sum(tl.where(tile[:, None] == first[None, :], counts & 0xFFFF, 0), 0)
            argmax = tl.where(largest > maximum, start + first * BN + column, argmax)
        total = tl.exp2(before) * total + tl.sum(factor * part_total, 0)
        maximum = merged
        if MAXIMA:
            bits = part.to(tl.int32, bitcast=True)
            up = tl.where(bits < 0, bits, bits + 0xFFFF) >> 16
            tl.store(maxima_ptr + at + (start // BN).to(tl.int64) * N, up.to(tl.int16), mask=there)
    if is_last != 0:
        logarithm = tl.log2(total.to(tl.float64))
        lse = (maximum.to(tl.float64) + logarithm * LN2).to(tl.float32)
        lse = tl.where(total > 0.0, lse, float("nan"))
        undefined = lse != lse
        tl.store(lse_ptr + m, lse, mask=inside)
        if EXTRAS:
            entropy = (logarithm - weighted.to(tl.float64) / total.to(tl.float64)) * LN2
            tl.store(entropy_ptr + m, tl.where(undefined, float("nan"), entropy.to(tl.float32)), mask=inside)
            logit = tl.load(logit_ptr + m, mask=inside, other=0.0)
            rank = tl.where(undefined | (logit != logit), -1, rank)
            argmax = tl.where(undefined, -1, argmax)
    tl.store(state_maximum + m, maximum, mask=inside)
    tl.store(state_total + m, total, mask=inside)
    if EXTRAS:
        tl.store(state_weighted + m, weighted, mask=inside)
        tl.store(rank_ptr + m, rank.to(tl.int64), mask=inside)
        tl.store(argmax_ptr + m, argmax.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])
def _target_logits(
    out_ptr, hidden, weight, bias, target_ptr, ignore_index, N, V, scale, softcap, h_row, h_col, w_row, w_col,
    D: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, CHOSEN: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits of the targets of B tokens: the diagonal of all their products with the B rows of the targets.

    CHOSEN: the weights are these rows already, row i that of token i.
    """
    m = tl.program_id(0) * B + tl.arange(0, B)
    inside = m < N
    target = tl.load(target_ptr + m, mask=inside, other=ignore_index).to(tl.int64)
    counted = (target != ignore_index) & (target >= 0) & (target < V)
    source = m.to(tl.int64) if CHOSEN else target
    k = tl.arange(0, BK)
    p_a = hidden + m.to(tl.int64)[:, None] * h_row + k.to(tl.int64)[None, :] * h_col
    p_b = weight + tl.where(counted, source, 0)[:, None] * w_row + k.to(tl.int64)[None, :] * w_col
    acc = tl.zeros((B, B), tl.float32)
    for k0 in range(0, D, BK):
        there = counted[:, None] & (k0 + k < D)[None, :]
        a = tl.load(p_a, mask=there, other=0.0)
        b = tl.load(p_b, mask=there, other=0.0)
        acc = multiplied(a, b, acc)
        p_a += BK * h_col
        p_b += BK * w_col
    own = tl.arange(0, B)[:, None] == tl.arange(0, B)[None, :]
    z = tl.sum(tl.where(own, acc, 0.0), 1)
    bias_of = 0.0
    if BIAS:
        bias_of = tl.load(bias + target, mask=counted, other=0.0).to(tl.float32)
    z = transformed(z, bias_of, scale, softcap, BIAS, SCALE, SOFTCAP)
    tl.store(out_ptr + m, tl.where(counted, z, float("nan")), mask=inside)
