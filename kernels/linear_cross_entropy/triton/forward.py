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

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.linear_cross_entropy.head import Head, TokenStatistics
from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.ops import PackedTensor

SEGMENT = 4096
"""Targets whose packed rows are decoded at a time."""

FOLDED = 32
"""Tokens that a program folds."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Launch:
    """A tile, the step of its sums over D, and how its kernel is launched."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    group: int  # columns of tiles that are worked through together, for the second-level cache
    programs: int  # a multiprocessor
    flatten: bool  # tiles and steps are one loop: the next tile is being loaded while this one ends


def _configuration(dtype: torch.dtype, tokens: int, described: bool, extras: bool) -> Launch:
    """What was fastest on an H200 (benchmarks/notes). All widths are powers of two."""
    if dtype == torch.float32:
        return Launch(64, 64, 32, 8, 2, 16, 1, flatten=False)
    if not described:
        return Launch(64 if tokens <= 64 else 128, 128, 64, 8, 2, 16, 1, flatten=False)
    if tokens <= 64:
        return Launch(64, 128, 64, 4, 4, 16, 2, flatten=True)
    if tokens <= 128:
        return Launch(128, 128, 64, 8, 3, 16, 1, flatten=True)
    # One loop takes more power, which slows the card down; with more to do at the end of a tile it pays.
    return Launch(256, 128, 64, 8, 3, 16, 1, flatten=extras)


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
    found = _run(head, target, ignore_index, workspace, extras=False, maxima=maxima)
    return found.lse, found.target_logit, maxima


def token_statistics(head: Head, target: Tensor, ignore_index: int, workspace: int) -> TokenStatistics:
    """The statistics of each token. `workspace` bounds the bytes of the parts, and of decoded weights."""
    return _run(head, target, ignore_index, workspace, extras=True, maxima=None)


def tile_columns(head: Head) -> int:
    """Columns of the vocabulary in a tile of `forward`."""
    return _configuration(head.hidden.dtype, head.tokens, describable(head), extras=False).columns


def _run(
    head: Head, target: Tensor, ignore_index: int, workspace: int, extras: bool, maxima: Tensor | None
) -> TokenStatistics:
    tokens, device = head.tokens, head.hidden.device
    described = describable(head)
    launch = _configuration(head.hidden.dtype, tokens, described, extras)
    state = State.empty(tokens, device, extras)
    logit = target_logits(head, target, ignore_index)
    if not tokens:
        return TokenStatistics(state.lse, logit, state.argmax, state.entropy, state.rank)
    kinds = 4 if extras else 2
    tiles = triton.cdiv(head.vocabulary, launch.columns)
    room = workspace - 12 * tokens  # what is known after a chunk
    at_once = tiles_at_once(tiles, room // (4 * kinds * tokens), head, launch.columns, workspace)
    parts = torch.empty(kinds, at_once, tokens, device=device)
    counts = parts[-1].view(torch.int32)
    for start, weight in chunks(head, at_once * launch.columns):
        columns = weight.shape[0]
        hidden, weight, strides = operands(head.hidden, weight, launch, described)
        down, across = triton.cdiv(tokens, launch.rows), triton.cdiv(columns, launch.columns)
        with torch.cuda.device_of(head.hidden), LAUNCHING:
            _tile_statistics[(programs(launch, down * across, device),)](
                parts[0], parts[1], parts[2 % kinds], counts, hidden, weight, bias_of(head), target, logit,
                start, tokens, columns, head.scale, head.softcap or 1.0, *strides,
                D=head.hidden.shape[1], BM=launch.rows, BN=launch.columns, BK=launch.step, GROUP=launch.group,
                TMA=described, EXTRAS=extras, EVEN=columns % launch.columns == 0, FLATTEN=launch.flatten,
                **flags(head), num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
            fold[(triton.cdiv(tokens, FOLDED),)](
                parts[0], parts[1], parts[2 % kinds], counts,
                None if maxima is None else maxima.view(torch.int16), logit,
                state.maximum, state.total, state.weighted,
                state.lse, state.entropy, state.rank, state.argmax,
                start, int(start == 0), int(start + columns == head.vocabulary), tokens, across,
                BN=launch.columns, EXTRAS=extras, MAXIMA=maxima is not None, T=64, R=FOLDED, num_warps=8,
            )  # fmt: skip
    return TokenStatistics(state.lse, logit, state.argmax, state.entropy, state.rank)


@dataclass(frozen=True)
class State:
    """What is known of each token after a chunk, [N], and after the last one."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    lse: Tensor
    entropy: Tensor
    rank: Tensor
    argmax: Tensor

    @classmethod
    def empty(cls, tokens: int, device: torch.device, extras: bool) -> State:
        """Memory for it, which the first chunk writes. Without extras there are only three of them."""
        some = tokens if extras else 0
        numbers = [torch.empty(n, device=device) for n in (tokens, tokens, some, tokens, some)]
        places = [torch.empty(some, dtype=torch.int64, device=device) for _ in range(2)]
        return cls(*numbers, *places)


def target_logits(head: Head, target: Tensor, ignore_index: int) -> Tensor:
    """The logits of the targets, fp32 [N]; NaN for those that are ignored or outside the vocabulary."""
    out = torch.empty(head.tokens, device=head.hidden.device)
    hidden, weight, d = head.hidden, head.weight, head.hidden.shape[1]
    depth = _configuration(hidden.dtype, head.tokens, described=False, extras=False).step  # see `multiplied`
    step = SEGMENT if isinstance(weight, PackedTensor) else max(1, head.tokens)
    for start in range(0, head.tokens, step):
        rows = slice(start, start + step)
        part, ids = hidden[rows], target[rows]
        if isinstance(weight, PackedTensor):
            chosen = packed_linear.rows(weight, ids.clamp(0, head.vocabulary - 1))
        else:
            chosen = weight
        part, chosen = multipliable(part), multipliable(chosen)
        with torch.cuda.device_of(hidden), LAUNCHING:
            _target_logits[(triton.cdiv(part.shape[0], 64),)](
                out[rows], part, chosen, bias_of(head), ids, ignore_index, part.shape[0], head.vocabulary,
                head.scale, head.softcap or 1.0, *part.stride(), *chosen.stride(),
                D=d, B=64, BK=depth, CHOSEN=isinstance(weight, PackedTensor), **flags(head),
                num_warps=8, num_stages=2,
            )  # fmt: skip
    return out


def tiles_at_once(tiles: int, fitting: int, head: Head, columns: int, workspace: int) -> int:
    """Columns of tiles in a chunk, at least one: chunks are as large as fits, and of about the same size."""
    if isinstance(head.weight, PackedTensor):
        row_bytes = head.weight.shape[1] * head.hidden.element_size()
        fitting = min(fitting, workspace // max(1, row_bytes * columns))
    number = triton.cdiv(tiles, max(1, fitting))
    return int(triton.cdiv(tiles, number))


def chunks(head: Head, columns: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weights, so many at a time, with the first one's number. Decoded into the same memory."""
    weight, (v, d) = head.weight, head.weight.shape
    packed = isinstance(weight, PackedTensor)
    buffer = torch.empty(min(v, columns), d, dtype=weight.dtype, device=weight.device) if packed else None
    for start in range(0, v, columns):
        rows = slice(start, min(start + columns, v))
        if isinstance(weight, PackedTensor):
            assert buffer is not None
            yield start, packed_linear.decode(weight, rows, out=buffer[: rows.stop - start])
        else:
            yield start, weight[rows]


def operands(
    hidden: Tensor, weight: Tensor, launch: Launch, described: bool
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, tuple[int, ...]]:
    """Hidden states and weights as a kernel takes them, as descriptors or as they are, and their strides."""
    hidden, weight = multipliable(hidden), multipliable(weight)
    strides = *hidden.stride(), *weight.stride()
    if not described:
        return hidden, weight, strides
    return (
        TensorDescriptor.from_tensor(hidden, [launch.rows, launch.step]),
        TensorDescriptor.from_tensor(weight, [launch.columns, launch.step]),
        strides,
    )


def multipliable(matrix: Tensor) -> Tensor:
    """The same values; in fp32 for the interpreter, which would multiply bf16 as integers of their bits."""
    compiled = isinstance(_tile_statistics, triton.JITFunction)
    return matrix if compiled or matrix.dtype != torch.bfloat16 else matrix.float()


def describable(head: Head) -> bool:
    """Whether the tensor memory accelerator can read hidden states and weights, as they are or decoded.

    It takes rows of neighbours that begin at multiples of 16 bytes.
    """
    hidden, weight = head.hidden, head.weight
    if isinstance(weight, PackedTensor):
        right = weight.shape[1] * hidden.element_size() % 16 == 0 and weight.shape[1] > 0
    else:
        right = aligned(weight)
    return right and aligned(hidden) and has_accelerator(hidden.device)


def aligned(matrix: Tensor) -> bool:
    """Whether rows of neighbours begin at multiples of 16 bytes."""
    row, column = matrix.stride()
    fitting = row * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return column == 1 and row >= matrix.shape[1] > 0 and fitting


@functools.cache
def has_accelerator(device: torch.device) -> bool:
    """And shared memory for the tiles that go with it: Hopper, Blackwell of data centers, the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def flags(head: Head) -> dict[str, bool]:
    """What turns products into logits, as the kernels are told."""
    return {"BIAS": head.bias is not None, "SCALE": head.scale != 1.0, "SOFTCAP": head.softcap is not None}


def bias_of(head: Head) -> Tensor | None:
    """The bias as the kernels take it: without strides."""
    return None if head.bias is None else head.bias.contiguous()


def programs(launch: Launch, tiles: int, device: torch.device) -> int:
    """As many as run at once, if there is a tile for each."""
    return min(tiles, launch.programs * multiprocessors(device))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; for the interpreter two, so that programs share work there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def tile_of(i, down, across, GROUP: tl.constexpr):
    """Row and column of the i-th tile: in groups of GROUP columns, all rows of a group before the next."""
    group = i // (GROUP * down)
    within = i % (GROUP * down)
    width = tl.minimum(across - group * GROUP, GROUP)
    return within // width, group * GROUP + within % width


@triton.jit
def multiplied(a, b, acc):
    """acc + a @ b.T. fp32 step by step: thousands of products added one by one lose more than torch's do."""
    if a.dtype == tl.float32:
        part = tl.dot(a, b.T, input_precision="ieee")
        # A plain sum would be made part of the product again.
        return tl.fma(part, tl.full(part.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(a, b.T, acc, input_precision="ieee")


@triton.jit
def products(
    hidden, weight, row, column, N, C, h_row, h_col, w_row, w_col,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """hidden[row :] @ weight[column :].T, fp32 [BM, BN]; zeros where there are no rows."""
    acc = tl.zeros((BM, BN), tl.float32)
    if TMA:
        for k in range(0, D, BK):
            a = hidden.load([row, k])
            b = weight.load([column, k])
            acc = multiplied(a, b, acc)
    else:
        m = row + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        k = tl.arange(0, BK)
        p_a = hidden + m.to(tl.int64)[:, None] * h_row + k.to(tl.int64)[None, :] * h_col
        p_b = weight + n.to(tl.int64)[:, None] * w_row + k.to(tl.int64)[None, :] * w_col
        for k0 in range(0, D, BK):
            inside = (k0 + k < D)[None, :]
            a = tl.load(p_a, mask=(m < N)[:, None] & inside, other=0.0)
            b = tl.load(p_b, mask=(n < C)[:, None] & inside, other=0.0)
            acc = multiplied(a, b, acc)
            p_a += BK * h_col
            p_b += BK * w_col
    return acc


@triton.jit
def transformed(z, bias, scale, softcap, BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """From products to logits; `bias` has the shape of z or broadcasts to it."""
    if BIAS:
        z = z + bias
    if SCALE:
        z = z * scale
    if SOFTCAP:  # tanh through an exponential: its error is smallest where z is large
        z = softcap - 2 * softcap / (1.0 + tl.exp2(z * (2 * LOG2E / softcap)))
    return z


@triton.jit
def tile_logits(
    acc, bias, column, start, C, scale, softcap,
    BN: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Logits of a tile; minus infinity beyond the C columns of the chunk."""
    n = column + tl.arange(0, BN)
    b = 0.0
    if BIAS:
        b = tl.load(bias + start + n, mask=n < C, other=0.0).to(tl.float32)[None, :]
    z = transformed(acc, b, scale, softcap, BIAS, SCALE, SOFTCAP)
    if not EVEN:
        z = tl.where((n < C)[None, :], z, float("-inf"))
    return z


@triton.jit
def finite(maximum):
    """A maximum as something to subtract: minus infinity less itself would be NaN, less 0 it stays."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


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
    """Of B tokens: all products with the B rows of their targets, of which the diagonal is what is wanted.

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
