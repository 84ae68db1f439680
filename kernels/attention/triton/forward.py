"""The products and the softmax of quantised attention, in Triton for Hopper.

A program has 64 queries of one head and goes through the keys, 128 at a time. It loads its queries as they
are, smooths and quantises them. For a thread the columns of a tile of logits have one scale: as [queries,
16, 4, 2] the third axis is a key's group, so the largest logit is found among integers, and one
multiply-add a number brings it under the exponential. Taken as [queries, 8, 2, 4, 2], with the second pair
and the group exchanged, the weights are in the order in which the values are stored, and a thread has of the
operand of the FP8 product what it had of the logits: nothing is exchanged between threads.

Each block's product with the values starts at zero and is added in fp32, since the FP8 instructions of Hopper
sum with 13 bits of fraction (SageAttention2, section 3.4).

A head's numbers are taken in one or two pieces, as 64 + 32 of 80 and 96, and 128 + 128 of 256.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from neuzip.kernels.attention.options import Options, empty_like_queries
from neuzip.kernels.attention.quantized import BLOCK, Quantized
from neuzip.kernels.attention.triton.quantize import (
    as_e4m3,
    divided,
    extent,
    quantize,
    quantize_packed,
    quotient,
    rounded,
)
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.triton.store import as_stored
from neuzip.kernels.tuning import launch_for

TILE = 64
"""Queries of a program, and queries that are smoothed by one mean."""

CACHE = 24 << 20
"""Bytes of keys and values that stay in the second-level cache while all tiles of their heads are done."""

PIECES = ((32, 0), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64), (128, 128))
"""What heads are taken in: the first that has room for their numbers."""

MOST_ROWS = 2**31 - 1
"""Descriptors count rows in int32."""

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
LOG2_448 = tl.constexpr(8.807354922057604)
"""Weights are quantized 448 times as large, the largest number of E4M3, and their sum with them."""


@functools.cache
def forward_launch(width: int, plain: bool, device: torch.device) -> dict[str, Any]:
    """Options of a launch for heads of `width` numbers: as many programs a multiprocessor as have registers.

    Not `plain` are smoothed queries and soft caps, which take more registers.
    """
    return dict(launch_for("attention.forward", device, width=width, plain=plain))


@dataclass(frozen=True)
class AttentionLayout:
    """How many sequences and heads there are, tokens of the longest, and where those of a pack begin."""

    sequences: int
    q_heads: int
    kv_heads: int
    longest_q: int
    longest_k: int
    total_q: int = 0  # of a pack
    total_k: int = 0
    q_starts: Tensor | None = None
    k_starts: Tensor | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, N, D] over k, v [B, Hkv, N, D]: output, and log-sum-exp, empty if not wanted."""
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    out = empty_like_queries(q, _stored(q.dtype))
    lse = torch.empty((batch, heads, queries) if return_lse else 0, device=q.device, dtype=torch.float32)
    layout = AttentionLayout(batch, heads, kv_heads, queries, keys)
    if not q.numel() or not keys:
        return out.zero_().to(q.dtype), lse.fill_(float("-inf"))
    quantized = quantize(k, v, options.bits, options.smooth_v)
    forward(q, k, quantized, layout, options, out, lse)
    return out.to(q.dtype), lse


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    longest_q: int,
    longest_k: int,
    options: Options,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences [T, H, D]: output, and log-sum-exp, empty if not wanted."""
    (tokens, heads, _), (keys, kv_heads) = q.shape, k.shape[:2]
    longest_q, longest_k = min(longest_q, tokens), min(longest_k, keys)
    out = torch.empty(q.shape, dtype=_stored(q.dtype), device=q.device)
    lse = torch.empty((heads, tokens) if return_lse else 0, device=q.device, dtype=torch.float32)
    sequences = q_starts.shape[0] - 1
    if not sequences or not longest_q or not longest_k:
        return out.zero_().to(q.dtype), lse.fill_(float("-inf"))
    layout = AttentionLayout(
        sequences, heads, kv_heads, longest_q, longest_k, tokens, keys, q_starts, k_starts
    )
    quantized = quantize_packed(k, v, k_starts, longest_k, options.bits, options.smooth_v)
    q, k, laid = (x.transpose(0, 1)[None] for x in (q, k, out))
    forward(q, k, quantized, layout, options, laid, lse)
    return out.to(q.dtype), lse


def forward(
    q: Tensor,
    k: Tensor,
    quantized: Quantized,
    layout: AttentionLayout,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of q over quantised keys and values; `k` are these keys as they were, for smoothed queries.

    q [B, Hq, N, D], k [B, Hkv, N, D] and out [B, Hq, N, D], with B = 1 of packed sequences; lse [B, Hq, N],
    or empty.
    """
    width = q.shape[-1]
    plain = not options.smooth_q and options.softcap is None
    first, second = next(pieces for pieces in PIECES if sum(pieces) >= width)
    described = _described(quantized, first)
    packed = layout.q_starts is not None
    tiles = triton.cdiv(layout.longest_q, TILE)
    group = layout.q_heads // layout.kv_heads
    scale = options.scale * (2 * LOG2E / options.softcap if options.softcap else LOG2E)
    # A window of all keys hides none; kept out of the kernel's int32, too.
    window = options.window if options.window is not None and options.window < layout.longest_k else None
    launch(
        _attention_kernel, (tiles * layout.q_heads * layout.sequences,),
        out, lse, q, *described, *(_described(quantized, second) if second else described),
        quantized.k_scale, quantized.k_mean, quantized.v_scale, quantized.v_mean,
        k, layout.q_starts, layout.k_starts,
        scale, options.scale, (options.softcap or 0.0) * LOG2E, window or 0,
        layout.longest_q, layout.longest_k, layout.total_q, layout.total_k, quantized.capacity,
        layout.q_heads, tiles, layout.sequences * layout.q_heads,
        _together(quantized, layout, group) if options.causal else 1,
        *_strides(q, packed), *_strides(k, packed),
        *_strides(out, packed),
        GROUP=group, D=width, D0=first, D1=second, BM=TILE, BN=BLOCK,
        LEVELS=2 ** (options.bits - 1) - 1, CAUSAL=options.causal, WINDOW=window is not None,
        SOFTCAP=options.softcap is not None, SMOOTH_Q=options.smooth_q,
        SMOOTH_V=quantized.v_mean is not None, LSE=lse.numel() > 0,
        COMPILED=is_compiled(_attention_kernel), device=q.device,
        **forward_launch(width, plain, q.device),
    )  # fmt: skip


def _together(quantized: Quantized, layout: AttentionLayout, group: int) -> int:
    """Heads whose tiles are done together, the longest first, while their keys are in the cache."""
    bytes_of_a_head = 2 * layout.longest_k * quantized.width
    return min(layout.q_heads * layout.sequences, max(1, CACHE // bytes_of_a_head) * group)


def _described(quantized: Quantized, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Blocks of some columns of the keys, and of as many channels of the values."""
    rows = quantized.k.view(-1, quantized.width)
    if rows.shape[0] > MOST_ROWS:
        raise ValueError(f"{rows.shape[0]:,} keys of all heads are more than the {MOST_ROWS:,} that fit")
    channels = quantized.v.view(-1, quantized.capacity)
    return (
        TensorDescriptor.from_tensor(rows, [BLOCK, columns]),
        TensorDescriptor.from_tensor(channels, [columns, BLOCK]),
    )


def _strides(x: Tensor, packed: bool) -> tuple[int, ...]:
    """Strides of batches, heads and tokens; 0 for batches of a pack, whose sequences follow each other."""
    return (0, *x.stride()[1:3]) if packed else x.stride()[:3]


def _stored(dtype: torch.dtype) -> torch.dtype:
    """What the kernel writes: the interpreter would cut off what bf16 cannot hold instead of rounding."""
    return dtype if is_compiled(_attention_kernel) else torch.float32


@triton.jit
def place_of(i, tiles, all_heads, together, CAUSAL: tl.constexpr):
    """Tile and head of the i-th program: groups of heads one after the other, in a group long tiles first."""
    if CAUSAL:
        group = i // (together * tiles)
        within = i % (together * tiles)
        width = tl.minimum(all_heads - group * together, together)
        return tiles - 1 - within // width, group * together + within % width
    else:
        return i % tiles, i // tiles


@triton.jit
def queries_of(
    ptr, columns, D: tl.constexpr, there, MEAN: tl.constexpr, count, COMPILED: tl.constexpr
):  # fmt: skip
    """A piece of the queries, fp32, less their mean, and this mean."""
    x = tl.load(ptr + columns[None, :], mask=there & (columns < D)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(x, 0)
    if MEAN:
        mean = mean / count
        mean = mean.to(tl.bfloat16).to(tl.float32) if COMPILED else as_stored(mean, tl.bfloat16)
        x = tl.where(there, x - mean[None, :], 0.0)
    return x, mean


@triton.jit
def mean_products(
    mean, ptr, columns, keys, stride_t, D: tl.constexpr, there, COMPILED: tl.constexpr
):  # fmt: skip
    """The products of the queries' mean with unquantised keys, fp32 [16, BN], every row the same."""
    k = tl.load(
        ptr + keys[:, None] * stride_t + columns[None, :],
        mask=there[:, None] & (columns < D)[None, :], other=0.0,
    )  # fmt: skip
    KIND: tl.constexpr = k.dtype if COMPILED else tl.float32
    rows = tl.broadcast_to(mean[None, :], (16, mean.shape[0]))
    return tl.dot(rows.to(KIND), tl.trans(k.to(KIND)), input_precision="ieee")


@triton.jit
def capped(x, softcap):
    """softcap tanh(u), with x = 2 log2(e) u: through an exponential."""
    return softcap - 2 * softcap / (1.0 + tl.exp2(x))


@triton.jit(
    do_not_specialize=[
        "window", "longest_q", "longest_k", "total_q", "total_k", "heads", "tiles", "all_heads", "together"
    ]
)  # fmt: skip
def _attention_kernel(
    out_ptr, lse_ptr, q_ptr, k_desc, v_desc, k_desc1, v_desc1,
    k_scale_ptr, k_mean_ptr, v_scale_ptr, v_mean_ptr, k_ptr, q_starts_ptr, k_starts_ptr,
    factor, scale, softcap, window, longest_q, longest_k, total_q, total_k, capacity,
    heads, tiles, all_heads, together,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_ot,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTH_Q: tl.constexpr,
    SMOOTH_V: tl.constexpr, LSE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries. factor: from products to log2 of weights, or to what `capped` takes."""
    tile, outer = place_of(tl.program_id(0), tiles, all_heads, together, CAUSAL)
    head, sequence = (outer % heads).to(tl.int64), (outer // heads).to(tl.int64)
    kv_head = head // GROUP
    kv_heads = heads // GROUP
    q_start, queries = extent(q_starts_ptr, sequence, longest_q, total_q)
    k_start, tokens = extent(k_starts_ptr, sequence, longest_k, total_k)
    if tile * BM >= queries:
        return
    kv_outer = sequence * kv_heads + kv_head
    if k_starts_ptr is None:
        place = kv_outer
        begin = 0
    else:
        place = kv_head
        begin = (k_start // BN + sequence.to(tl.int32)) * BN
    row = (place * capacity + begin).to(tl.int32)  # of the keys' descriptor, which counts in int32
    channel = (place * D).to(tl.int32)

    offs_m = tile * BM + tl.arange(0, BM)
    c0 = tl.arange(0, D0)
    there = (offs_m < queries)[:, None]
    at = (q_start + offs_m).to(tl.int64)
    q_ptr += sequence * stride_qb + head * stride_qh
    count = tl.minimum(queries - tile * BM, BM).to(tl.float32)
    x0, mean0 = queries_of(q_ptr + at[:, None] * stride_qt, c0, D, there, SMOOTH_Q, count, COMPILED)
    peak = tl.max(tl.abs(x0), 1)
    if D1 > 0:
        c1 = D0 + tl.arange(0, D1)
        x1, mean1 = queries_of(q_ptr + at[:, None] * stride_qt, c1, D, there, SMOOTH_Q, count, COMPILED)
        peak = tl.maximum(peak, tl.max(tl.abs(x1), 1))
    q_scale = divided(peak, LEVELS)
    q0 = rounded(quotient(x0, q_scale[:, None], COMPILED))
    if D1 > 0:
        q1 = rounded(quotient(x1, q_scale[:, None], COMPILED))
    # What smoothing the keys takes from a row of logits.
    shift = tl.zeros((BM,), tl.float32)
    if LSE or SOFTCAP:
        means = k_mean_ptr + kv_outer * D
        shift = tl.sum(x0 * tl.load(means + c0, mask=c0 < D, other=0.0)[None, :], 1)
        if D1 > 0:
            shift += tl.sum(x1 * tl.load(means + c1, mask=c1 < D, other=0.0)[None, :], 1)
    unit = q_scale * factor
    k_ptr += sequence * stride_kb + kv_head * stride_kh + k_start.to(tl.int64) * stride_kt

    # Keys before `first` and from `stop` on are seen by no query of the tile, those of blocks from `inner`
    # to `outer_end` by all.
    behind = tokens - queries
    stop = tokens
    outer_end = tokens // BN * BN
    first = 0
    inner = 0
    if CAUSAL:
        stop = tl.maximum(tl.minimum(tokens, (tile + 1) * BM + behind), 0)
        outer_end = tl.minimum(tl.maximum(tile * BM + behind + 1, 0) // BN * BN, outer_end)
    if WINDOW:
        first = tl.maximum(tile * BM + behind - window + 1, 0) // BN * BN
        inner = tl.cdiv(tl.maximum(tl.minimum((tile + 1) * BM, queries) + behind - window, 0), BN) * BN
        first = tl.minimum(first, stop)
        inner = tl.minimum(tl.maximum(inner, first), stop)
    outer_end = tl.maximum(outer_end, inner)

    # Of each query: the keys from `limit_before` on and below `limit`.
    own = (
        tl.arange(0, BN // 8)[None, :, None, None] * 8
        + tl.arange(0, 4)[None, None, :, None] * 2
        + tl.arange(0, 2)[None, None, None, :]
    )
    limit = tl.full((BM,), 0, tl.int32) + tokens
    if CAUSAL:
        limit = tl.minimum(limit, offs_m + behind + 1)
    if WINDOW:
        limit_before = offs_m + behind + 1 - window

    zeros4 = tl.zeros((4,), tl.int32)
    scales = k_scale_ptr + (place * capacity + begin) // BN * 4 + tl.arange(0, 4)
    acc0 = tl.zeros((BM, D0), tl.float32)
    acc1 = tl.zeros((BM, D1 if D1 > 0 else 16), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM, 4), tl.float32)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        # 0: blocks that the window cuts, 1: whole ones, 2: those that the diagonal or the end cuts
        lower = first if phase == 0 else (inner if phase == 1 else outer_end)
        upper = inner if phase == 0 else (outer_end if phase == 1 else stop)
        following = tl.load(scales + lower // BN * 4, mask=lower < upper + zeros4, other=0.0)
        for n in range(lower, upper, BN):
            # Loaded an iteration ahead: by the loop's own pipeline it would go through shared memory.
            k_scale = following
            following = tl.load(scales + (n // BN + 1) * 4, mask=n + BN < upper + zeros4, other=0.0)
            s = tl.dot(q0, k_desc.load([row + n, 0]).T, out_dtype=tl.int32)
            if D1 > 0:
                s = tl.dot(q1, k_desc1.load([row + n, D0]).T, s, out_dtype=tl.int32)
            c = unit[:, None] * k_scale[None, :]  # [BM, 4]
            s = tl.reshape(s, [BM, BN // 8, 4, 2])
            if phase == 1 and not SMOOTH_Q and not SOFTCAP:
                peak4 = tl.max(tl.max(s, 3), 1).to(tl.float32) * c  # [BM, 4]
                now = tl.maximum(largest, tl.max(peak4, 1))
                base = now - LOG2_448
                p = tl.exp2(s.to(tl.float32) * c[:, None, :, None] - base[:, None, None, None])
            else:
                x = s.to(tl.float32) * c[:, None, :, None]
                if SMOOTH_Q:
                    keys = n + tl.arange(0, BN)
                    inside = keys < tokens
                    keys = keys.to(tl.int64)
                    more = mean_products(mean0, k_ptr, c0, keys, stride_kt, D, inside, COMPILED)
                    if D1 > 0:
                        more += mean_products(mean1, k_ptr, c1, keys, stride_kt, D, inside, COMPILED)
                    # Taken by number: else the compiler gives x the layout of this small product.
                    more = tl.gather(tl.max(more, 0), tl.arange(0, BN), 0)
                    x += tl.reshape(more * factor, [1, BN // 8, 4, 2])
                if SOFTCAP:
                    x = capped(x + (shift * factor)[:, None, None, None], softcap)
                if phase != 1:
                    seen = own < (limit - n)[:, None, None, None]
                    if WINDOW:
                        seen = seen & (own >= (limit_before - n)[:, None, None, None])
                    x = tl.where(seen, x, float("-inf"))
                now = tl.maximum(largest, tl.max(tl.max(tl.max(x, 3), 1), 1))
                base = tl.where(now == float("-inf"), 0.0, now) - LOG2_448
                p = tl.exp2(x - base[:, None, None, None])
            shrink = tl.exp2(largest - LOG2_448 - base)
            largest = now
            total = total * shrink[:, None] + tl.sum(tl.sum(p, 3), 1)
            # As the values are stored: see quantized.stored_token.
            p = tl.permute(tl.reshape(p, [BM, BN // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
            p = as_e4m3(tl.reshape(p, [BM, BN]), COMPILED)
            column = begin + n
            acc0 = acc0 * shrink[:, None] + tl.dot(p, v_desc.load([channel, column]).T)
            if D1 > 0:
                acc1 = acc1 * shrink[:, None] + tl.dot(p, v_desc1.load([channel + D0, column]).T)

    weight = tl.sum(total, 1)
    sees = weight > 0.0
    share = tl.where(sees, 1.0 / tl.where(sees, weight, 1.0), 0.0)[:, None]
    out_ptr += sequence * stride_ob + head * stride_oh
    store_piece(
        out_ptr + at[:, None] * stride_ot, acc0 * share, c0, D, there, sees, v_scale_ptr + kv_outer * D,
        v_mean_ptr, kv_outer * D, SMOOTH_V,
    )  # fmt: skip
    if D1 > 0:
        store_piece(
            out_ptr + at[:, None] * stride_ot, acc1 * share, c1, D, there, sees, v_scale_ptr + kv_outer * D,
            v_mean_ptr, kv_outer * D, SMOOTH_V,
        )  # fmt: skip
    if LSE:
        lse = (largest - LOG2_448 + tl.log2(tl.where(sees, weight, 1.0))) * LN2
        if not SOFTCAP:
            lse += shift * scale
        lse = tl.where(sees, lse, float("-inf"))
        if q_starts_ptr is None:
            lse_ptr += outer.to(tl.int64) * queries
        else:
            lse_ptr += head * total_q
        tl.store(lse_ptr + at, lse, mask=offs_m < queries)


@triton.jit
def store_piece(
    ptr, x, columns, D: tl.constexpr, there, sees, v_scale_ptr, v_mean_ptr, of, SMOOTH_V: tl.constexpr
):  # fmt: skip
    """Write a piece of the output in the units of the values; 0 for queries that see nothing."""
    real = columns < D
    x = x * tl.load(v_scale_ptr + columns, mask=real, other=0.0)[None, :]
    if SMOOTH_V:
        mean = tl.load(v_mean_ptr + of + columns, mask=real, other=0.0)
        x = tl.where(sees[:, None], x + mean[None, :], 0.0)
    tl.store(ptr + columns[None, :], x.to(ptr.dtype.element_ty), mask=there & real[None, :])
