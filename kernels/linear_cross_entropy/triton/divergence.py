"""Two heads over one vocabulary, tile by tile, in Triton: their statistics, KL(base || other), their top k.

A program has the logits of both heads for one tile at the same time. Beside the parts of forward.py,
for each head, a tile has two parts of `sums.kullback_leibler`, relative to its own maxima: with e = exp(y) of
the base, f = exp(y') of the other and u = y - y', where y and y' are logits less the maximum of the tile,

    shift      fp32, sum of e u
    excess     fp32, sum of e (exp(-u) - 1 + u) = f - e + e u

Near u = 0 the terms of `excess` come from a series, as the difference would have no digits left. Relative to
other maxima u is u + d for all of a tile, so that parts can be moved, exactly (`_fold_difference`).

The k largest logits of a token lie in the k tiles with the largest maxima (of equals the first): a tile with
one of them that is not among these has k tiles before it, each with a logit that comes first. So the maxima
of tiles are kept in order, and only those tiles are computed once more, for the tokens that want them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.device.launch import launch
from neuzip.kernels.dtypes import dtype_name
from neuzip.kernels.linear_cross_entropy import sums
from neuzip.kernels.linear_cross_entropy.head import Divergence, Head, TokenStatistics
from neuzip.kernels.linear_cross_entropy.triton.forward import (
    FOLDED,
    TokenState,
    counted,
    fold,
    target_logits,
)
from neuzip.kernels.linear_cross_entropy.triton.tiles import (
    LOG2E,
    TileLaunch,
    bias_of,
    chunks,
    describable,
    finite,
    flags,
    multipliable,
    multiplied,
    operands,
    programs,
    tile_logits,
    tile_of,
    tiles_at_once,
)
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.tuning import launch_for

KINDS = 10
"""Parts of a tile: four of each head, and two of both."""

KEYS = 48
"""Bytes a tile and token that it takes to put the maxima of tiles in order."""

TOGETHER = 16
"""Tokens whose logits in one tile are computed once more by one program."""

NEAR = tl.constexpr(0.5)


@functools.cache
def pairs_launch(dtype: torch.dtype, described: bool, device: torch.device) -> TileLaunch:
    """The launch for tiles of two heads. `described`: the kernel loads them through descriptors."""
    name = "linear_cross_entropy.pairs"
    return TileLaunch(**launch_for(name, device, dtype=dtype_name(dtype), described=described))


def divergence(
    base: Head, other: Head, target: Tensor, ignore_index: int, top_k: int | None, workspace: int
) -> Divergence:
    """Both heads in one pass. `workspace` bounds the bytes of the parts, and of decoded weights."""
    tokens, device = base.tokens, base.hidden.device
    described = [describable(head) for head in (base, other)]
    dtype = torch.promote_types(base.hidden.dtype, other.hidden.dtype)
    config = pairs_launch(dtype, all(described), device)
    states = [TokenState.empty(tokens, device, True) for _ in described]
    logits = [target_logits(head, target, ignore_index) for head in (base, other)]
    difference = torch.zeros(5, tokens, dtype=torch.float64, device=device)
    difference[:2] = -torch.inf
    tops = [_Top(head, config, top_k, workspace) for head in (base, other)] if top_k else []
    if tokens:
        _sweep(base, other, target, logits, states, difference, tops, config, described, workspace)
    first, second = (
        TokenStatistics(state.lse, logit, state.argmax, state.entropy, state.rank)
        for state, logit in zip(states, logits, strict=True)
    )
    totals = [state.total.double() for state in states]
    kld = sums.kullback_leibler(totals[0], totals[1], difference[3], difference[4])
    kld = kld.masked_fill(first.lse.isnan() | second.lse.isnan(), torch.nan).float()
    return Divergence(first, second, kld, sums.overlap(tops[0].keys(), tops[1].keys()) if tops else None)


def _sweep(
    base: Head, other: Head, target: Tensor, logits: list[Tensor], states: list[TokenState],
    difference: Tensor, tops: list[_Top], config: TileLaunch, described: list[bool], workspace: int,
) -> None:  # fmt: skip
    """All chunks of the vocabulary, one after the other, into states, difference and tops."""
    fitting = workspace // ((4 * KINDS + (KEYS if tops else 0)) * base.tokens)
    tiles = triton.cdiv(base.vocabulary, config.columns)
    for head in (base, other):
        tiles = tiles_at_once(tiles, fitting, head, config.columns, workspace)
    parts = torch.empty(KINDS, tiles, base.tokens, device=target.device, dtype=torch.float32)
    pairs = zip(
        chunks(base, tiles * config.columns), chunks(other, tiles * config.columns), strict=True
    )  # fmt: skip
    for (start, weight), (_, other_weight) in pairs:
        columns = weight.shape[0]
        _run_chunk(parts, base, other, weight, other_weight, target, logits, start, config, described)
        _fold_chunk(
            parts, states, logits, difference, start, start + columns == base.vocabulary, config, columns
        )
        for top, maxima in zip(tops, (parts[0], parts[4]), strict=False):
            top.add(maxima[: triton.cdiv(columns, config.columns)], start // config.columns)


def _run_chunk(
    parts: Tensor, base: Head, other: Head, weight: Tensor, other_weight: Tensor, target: Tensor,
    logits: list[Tensor], start: int, config: TileLaunch, described: list[bool],
) -> None:  # fmt: skip
    """The parts of all tiles of a chunk."""
    tokens, columns = base.tokens, weight.shape[0]
    tiles = triton.cdiv(tokens, config.rows) * triton.cdiv(columns, config.columns)
    hidden, weight, strides = operands(base.hidden, weight, config, described[0])
    other_hidden, other_weight, other_strides = operands(other.hidden, other_weight, config, described[1])
    device = base.hidden.device
    launch(
        _tile_pairs, (programs(config, tiles, device),),
        parts, parts.view(torch.int32),
        hidden, weight, bias_of(base), logits[0], base.scale, base.softcap or 1.0,
        other_hidden, other_weight, bias_of(other), logits[1], other.scale, other.softcap or 1.0,
        target, start, tokens, columns, parts.shape[1], *strides, *other_strides,
        D=base.hidden.shape[1], OTHER_D=other.hidden.shape[1],
        BM=config.rows, BN=config.columns, BK=config.step, GROUP=config.group, FLATTEN=config.flatten,
        TMA=described[0], OTHER_TMA=described[1], EVEN=columns % config.columns == 0,
        **flags(base), **{f"OTHER_{flag}": on for flag, on in flags(other).items()},
        num_warps=config.num_warps, num_stages=config.num_stages, device=base.hidden.device,
    )  # fmt: skip


def _fold_chunk(
    parts: Tensor, states: list[TokenState], logits: list[Tensor], difference: Tensor,
    start: int, last: bool, config: TileLaunch, columns: int,
) -> None:  # fmt: skip
    """Put the tiles of a chunk together with what was known before."""
    tokens, tiles = parts.shape[2], triton.cdiv(columns, config.columns)
    grid = (triton.cdiv(tokens, FOLDED),)
    for state, logit, own in zip(states, logits, (parts[:4], parts[4:8]), strict=True):
        launch(
            fold, grid,
            own[0], own[1], own[2], own[3].view(torch.int32), None, logit,
            state.maximum, state.total, state.weighted,
            state.lse, state.entropy, state.rank, state.argmax,
            start, int(start == 0), int(last), tokens, tiles,
            BN=config.columns, EXTRAS=True, MAXIMA=False, T=64, R=FOLDED, num_warps=8, device=parts.device,
        )  # fmt: skip
    launch(
        _fold_difference, grid,
        parts[0], parts[1], parts[4], parts[8], parts[9], difference, tokens, tiles,
        T=32, R=FOLDED, num_warps=8, device=parts.device,
    )  # fmt: skip


class _Top:
    """The tiles with the largest maxima so far, as keys [N, k], then the k largest logits of each token."""

    def __init__(self, head: Head, config: TileLaunch, k: int, workspace: int) -> None:
        self.head, self.config, self.k, self.workspace = head, config, k, workspace
        self.tiles: int = triton.cdiv(head.vocabulary, config.columns)
        shape = head.tokens, min(k, self.tiles)
        lowest = torch.iinfo(torch.int64).min
        self.best = torch.full(shape, lowest, dtype=torch.int64, device=head.hidden.device)

    def add(self, maxima: Tensor, first: int) -> None:
        """Maxima [tiles, N] of tiles that follow each other."""
        numbers = torch.arange(first, first + maxima.shape[0], device=maxima.device)
        both = torch.cat([self.best, sums.ranking(maxima.T, numbers)], 1)
        self.best = both.topk(self.best.shape[1], sorted=False).values

    def keys(self) -> Tensor:
        """The keys of the k largest logits of each token, int64 [N, k], some tokens at a time."""
        width, columns = self.best.shape[1], self.config.columns
        tiles = sums.column_of(self.best).clamp(0, self.tiles - 1)
        keys = torch.empty(self.head.tokens, self.k, dtype=torch.int64, device=tiles.device)
        # Keys of 8 bytes, what they are made of, and what topk needs: 64 bytes a logit are enough.
        step = max(1, self.workspace // (64 * width * columns))
        for start in range(0, self.head.tokens, step):
            rows = slice(start, start + step)
            z = self._logits(rows, tiles[rows])
            within = torch.arange(columns, device=z.device)
            numbers = (tiles[rows, :, None] * columns + within).flatten(1)
            candidates = sums.ranking(z.flatten(1), numbers)
            candidates.masked_fill_(numbers >= self.head.vocabulary, torch.iinfo(torch.int64).min)
            keys[rows] = candidates.topk(self.k, sorted=False).values
        return keys

    def _logits(self, rows: slice, tiles: Tensor) -> Tensor:
        """The logits of tokens in the tiles that they want, fp32 [n, width, columns].

        Pairs of a token and a tile are put in the order of tiles, so that a program has tokens of one tile
        only: as many programs are started as there can be such runs.
        """
        head, config = self.head, self.config
        order = tiles.flatten().sort(stable=True)
        per_tile = torch.zeros(self.tiles, dtype=torch.int64, device=tiles.device)
        per_tile.scatter_add_(0, order.values, torch.ones_like(order.values))
        runs = (per_tile + TOGETHER - 1) // TOGETHER
        run_end, pair_end = runs.cumsum(0), per_tile.cumsum(0)
        most = tiles.numel() // TOGETHER + min(self.tiles, tiles.numel())
        run = torch.arange(most, device=tiles.device)
        tile_of_run = torch.searchsorted(run_end, run, right=True)
        known = tile_of_run.clamp(max=self.tiles - 1)
        first = pair_end[known] - per_tile[known] + (run - run_end[known] + runs[known]) * TOGETHER
        z = torch.empty(*tiles.shape, config.columns, device=tiles.device, dtype=torch.float32)
        hidden = multipliable(head.hidden[rows])
        step = self._chunk()
        for start, weight in chunks(head, step * config.columns):
            weight = multipliable(weight)
            launch(
                _candidates, (most,),
                z, hidden, weight, bias_of(head), order.indices, tile_of_run, first, pair_end,
                start, start // config.columns, tiles.shape[1], self.tiles, weight.shape[0],
                head.scale, head.softcap or 1.0, *hidden.stride(), *weight.stride(),
                D=hidden.shape[1], BM=TOGETHER, BN=config.columns, BK=config.step, **flags(head),
                num_warps=4, num_stages=3, device=hidden.device,
            )  # fmt: skip
        return z

    def _chunk(self) -> int:
        """Tiles of weights that are at hand at once: all, unless they have to be decoded."""
        if not isinstance(self.head.weight, PackedTensor):
            return self.tiles
        return tiles_at_once(self.tiles, self.tiles, self.head, self.config.columns, self.workspace)


@triton.jit
def _load(
    matrix, pointers, k, row, rows, D: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """Rows from `row` on, columns from k on; zeros where there are none."""
    if TMA:
        return matrix.load([row, k])
    else:
        there = (row + tl.arange(0, BLOCK) < rows)[:, None] & (k + tl.arange(0, BK) < D)[None, :]
        return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def _pointers(matrix, row, stride, column_stride, BLOCK: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """Where rows from `row` on begin, or nothing for a descriptor."""
    if TMA:
        return 0
    else:
        r = (row + tl.arange(0, BLOCK)).to(tl.int64)
        return matrix + r[:, None] * stride + tl.arange(0, BK).to(tl.int64)[None, :] * column_stride


@triton.jit
def _tile_pairs(
    parts, counts, hidden, weight, bias, logit_ptr, scale, softcap,
    other_hidden, other_weight, other_bias, other_logit_ptr, other_scale, other_softcap,
    target_ptr, start, N, C, T, h_row, h_col, w_row, w_col, oh_row, oh_col, ow_row, ow_col,
    D: tl.constexpr, OTHER_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    TMA: tl.constexpr, OTHER_TMA: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    OTHER_BIAS: tl.constexpr, OTHER_SCALE: tl.constexpr, OTHER_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The parts of all tiles of a chunk, [KINDS, T, N]: C columns of the vocabulary from `start` on."""
    CLAMP: tl.constexpr = BIAS or OTHER_BIAS or not EVEN
    MOST_D: tl.constexpr = D if D > OTHER_D else OTHER_D
    size = tl.cast(T, tl.int64) * N  # T is no tensor where it is 1
    down = tl.cdiv(N, BM)
    across = tl.cdiv(C, BN)
    for i in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        tile_row, tile_column = tile_of(i, down, across, GROUP)
        row, column = tile_row * BM, tile_column * BN
        p_a = _pointers(hidden, row, h_row, h_col, BM, BK, TMA)
        p_b = _pointers(weight, column, w_row, w_col, BN, BK, TMA)
        p_c = _pointers(other_hidden, row, oh_row, oh_col, BM, BK, OTHER_TMA)
        p_d = _pointers(other_weight, column, ow_row, ow_col, BN, BK, OTHER_TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        other_acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, MOST_D, BK):  # what is beyond a shorter D is 0
            a = _load(hidden, p_a, k, row, N, D, BM, BK, TMA)
            b = _load(weight, p_b, k, column, C, D, BN, BK, TMA)
            acc = multiplied(a, b, acc)
            c = _load(other_hidden, p_c, k, row, N, OTHER_D, BM, BK, OTHER_TMA)
            d = _load(other_weight, p_d, k, column, C, OTHER_D, BN, BK, OTHER_TMA)
            other_acc = multiplied(c, d, other_acc)
            if not TMA:
                p_a += BK * h_col
                p_b += BK * w_col
            if not OTHER_TMA:
                p_c += BK * oh_col
                p_d += BK * ow_col
        z = tile_logits(acc, bias, column, start, C, scale, softcap, BN, BIAS, SCALE, SOFTCAP, EVEN)
        o = tile_logits(
            other_acc, other_bias, column, start, C, other_scale, other_softcap,
            BN, OTHER_BIAS, OTHER_SCALE, OTHER_SOFTCAP, EVEN,
        )  # fmt: skip

        m = row + tl.arange(0, BM)  # [BM]
        inside = m < N
        at = tile_column.to(tl.int64) * N + m
        own = tl.load(target_ptr + m, mask=inside, other=-1) - (start + column)
        logit = tl.load(logit_ptr + m, mask=inside, other=float("inf"))
        other_logit = tl.load(other_logit_ptr + m, mask=inside, other=float("inf"))
        maximum, other_maximum = tl.max(z, 1), tl.max(o, 1)
        counts_of = counted(z, maximum, logit, own, BN)
        other_counts = counted(o, other_maximum, other_logit, own, BN)
        near, other_near = finite(maximum), finite(other_maximum)
        total, weighted, other_total, other_weighted, shift, excess = _sums(
            z, o, near, other_near, BM, BN, CLAMP, 2
        )
        place = parts + at
        tl.store(place, maximum, mask=inside)
        tl.store(place + size, total, mask=inside)
        tl.store(place + 2 * size, weighted, mask=inside)
        tl.store(counts + at + 3 * size, counts_of, mask=inside)
        tl.store(place + 4 * size, other_maximum, mask=inside)
        tl.store(place + 5 * size, other_total, mask=inside)
        tl.store(place + 6 * size, other_weighted, mask=inside)
        tl.store(counts + at + 7 * size, other_counts, mask=inside)
        tl.store(place + 8 * size, shift, mask=inside)
        tl.store(place + 9 * size, excess, mask=inside)


@triton.jit
def _sums(
    z,
    o,
    maximum,
    other_maximum,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CLAMP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The six sums over the columns of a tile, in parts: registers do not hold all exponentials at once."""
    if SPLITS:
        z0, z1 = tl.split(tl.permute(tl.reshape(z, (BM, 2, BN // 2)), (0, 2, 1)))
        o0, o1 = tl.split(tl.permute(tl.reshape(o, (BM, 2, BN // 2)), (0, 2, 1)))
        a0, b0, c0, d0, e0, f0 = _sums(z0, o0, maximum, other_maximum, BM, BN // 2, CLAMP, SPLITS - 1)
        a1, b1, c1, d1, e1, f1 = _sums(z1, o1, maximum, other_maximum, BM, BN // 2, CLAMP, SPLITS - 1)
        return a0 + a1, b0 + b1, c0 + c1, d0 + d1, e0 + e1, f0 + f1
    else:
        y = z - maximum[:, None]
        other_y = o - other_maximum[:, None]
        e, f = tl.exp2(y * LOG2E), tl.exp2(other_y * LOG2E)
        u = y - other_y
        if CLAMP:  # 0 times minus infinity is nothing
            u = tl.where(e > 0.0, u, 0.0)
            y, other_y = tl.maximum(y, -200.0), tl.maximum(other_y, -200.0)
        eu = e * u
        series = 1 / 2 + u * (-1 / 6 + u * (1 / 24 + u * (-1 / 120 + u * (1 / 720 - u * (1 / 5040)))))
        excess = tl.where(tl.abs(u) < NEAR, eu * u * series, f - e + eu)
        if CLAMP:
            excess = tl.where(e > 0.0, excess, f)
        weighted, other_weighted = tl.sum(e * y, 1) * LOG2E, tl.sum(f * other_y, 1) * LOG2E
        return tl.sum(e, 1), weighted, tl.sum(f, 1), other_weighted, tl.sum(eu, 1), tl.sum(excess, 1)


@triton.jit
def _moved(total, shift, excess, below, other_below):
    """The sums of `sums.kullback_leibler` relative to larger maxima, which those here are so far below.

    u grows by the difference of the two. fp64.
    """
    below = tl.maximum(below, -1e9)  # minus infinity: there was nothing
    other_below = tl.maximum(other_below, -1e9)
    factor, other_factor = tl.exp(below), tl.exp(other_below)
    d = below - other_below
    growth = (other_factor - factor + factor * d) * total + (factor - other_factor) * shift
    moved_shift = tl.where(factor > 0.0, factor * (shift + d * total), 0.0)
    return factor * total, moved_shift, other_factor * excess + growth


@triton.jit(do_not_specialize=["tiles"])
def _fold_difference(
    maximum_ptr,
    total_ptr,
    other_maximum_ptr,
    shift_ptr,
    excess_ptr,
    state,
    N,
    tiles,
    T: tl.constexpr,
    R: tl.constexpr,
):
    """Put the tiles of a chunk together with `state`, fp64 [5, N]: two maxima, total, shift and excess."""
    m = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = m < N
    maximum = tl.load(state + m, mask=inside, other=0.0)
    other_maximum = tl.load(state + N + m, mask=inside, other=0.0)
    total = tl.load(state + 2 * tl.cast(N, tl.int64) + m, mask=inside, other=0.0)
    shift = tl.load(state + 3 * tl.cast(N, tl.int64) + m, mask=inside, other=0.0)
    excess = tl.load(state + 4 * tl.cast(N, tl.int64) + m, mask=inside, other=0.0)
    for i in range(0, tiles, T):
        tile = i + tl.arange(0, T)
        at = tile.to(tl.int64)[:, None] * N + m[None, :]  # [T, R]
        there = (tile < tiles)[:, None] & inside[None, :]
        part = tl.load(maximum_ptr + at, mask=there, other=float("-inf")).to(tl.float64)
        other_part = tl.load(other_maximum_ptr + at, mask=there, other=float("-inf")).to(tl.float64)
        merged = tl.maximum(maximum, tl.max(part, 0))
        other_merged = tl.maximum(other_maximum, tl.max(other_part, 0))
        to, other_to = finite(merged), finite(other_merged)
        total, shift, excess = _moved(total, shift, excess, maximum - to, other_maximum - other_to)
        part_total, part_shift, part_excess = _moved(
            tl.load(total_ptr + at, mask=there, other=0.0).to(tl.float64),
            tl.load(shift_ptr + at, mask=there, other=0.0).to(tl.float64),
            tl.load(excess_ptr + at, mask=there, other=0.0).to(tl.float64),
            part - to[None, :],
            other_part - other_to[None, :],
        )
        total += tl.sum(part_total, 0)
        shift += tl.sum(part_shift, 0)
        excess += tl.sum(part_excess, 0)
        maximum, other_maximum = merged, other_merged
    tl.store(state + m, maximum, mask=inside)
    tl.store(state + N + m, other_maximum, mask=inside)
    tl.store(state + 2 * tl.cast(N, tl.int64) + m, total, mask=inside)
    tl.store(state + 3 * tl.cast(N, tl.int64) + m, shift, mask=inside)
    tl.store(state + 4 * tl.cast(N, tl.int64) + m, excess, mask=inside)


@triton.jit(do_not_specialize=["start", "first_tile"])
def _candidates(
    z_ptr, hidden, weight, bias, pair_ptr, tile_ptr, first_ptr, end_ptr,
    start, first_tile, width, tiles, C, scale, softcap, h_row, h_col, w_row, w_col,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits [pairs, BN] of a run of pairs of a token and a tile, all of one tile.

    Pair i is of token i // width. Tiles that are not among the C columns from `start` on, of which the first
    is the tile `first_tile`, are left for other calls.
    """
    i = tl.program_id(0)
    tile = tl.load(tile_ptr + i)
    column = (tile - first_tile) * BN
    if (tile < tiles) & (column >= 0) & (column < C):
        at = tl.load(first_ptr + i) + tl.arange(0, BM)
        inside = at < tl.load(end_ptr + tile)
        pair = tl.load(pair_ptr + at, mask=inside, other=0)
        n = column + tl.arange(0, BN)
        k = tl.arange(0, BK)
        p_a = hidden + (pair // width)[:, None] * h_row + k.to(tl.int64)[None, :] * h_col
        p_b = weight + n[:, None] * w_row + k.to(tl.int64)[None, :] * w_col
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, D, BK):
            there = (k0 + k < D)[None, :]
            a = tl.load(p_a, mask=inside[:, None] & there, other=0.0)
            b = tl.load(p_b, mask=(n < C)[:, None] & there, other=0.0)
            acc = multiplied(a, b, acc)
            p_a += BK * h_col
            p_b += BK * w_col
        z = tile_logits(acc, bias, column, start, C, scale, softcap, BN, BIAS, SCALE, SOFTCAP, False)
        tl.store(z_ptr + pair[:, None] * BN + tl.arange(0, BN)[None, :], z, mask=inside[:, None])
