"""Flash decoding of one query a text: what both kernels for it share, and the kernel that joins the shares.

The tokens of a head are cut into shares, one a program. A share leaves, for each query, its sums of values,
its largest logit in base 2 and its sum of weights; `join` puts these together in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.floats import widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.arguments import scales_are_together, whole_strides
from neuzip.kernels.kv_cache.triton.groups import power_of_two, turn_width, turned
from neuzip.kernels.kv_cache.triton.store import padded
from neuzip.kernels.tuning import launch_for

WIDEST = 256
"""Numbers of a head that a program has registers for."""

QUERIES = 16
"""Rows of a matrix instruction: queries that share a head at most."""

LOG2_E = 1.4426950408889634


def fits(width: int, queries: int) -> bool:
    """Whether attention over packed heads of `width` numbers, with so many queries each, is possible."""
    return width <= WIDEST and queries <= QUERIES


@dataclass(frozen=True)
class ShareSums:
    """What all shares leave, fp32: sums [rows, width], largest logits and weights [rows].

    A row is a share of a query of a text: rows = B * H' * shares.
    """

    shares: int
    group: int
    sums: Tensor
    largest: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, query: Tensor, group: int, shares: int, width: int) -> ShareSums:
        """Memory for `shares` of each query [B, H', D], for values of `width` numbers."""
        rows = query.shape[0] * query.shape[1] * shares
        sums = torch.empty(rows, width, dtype=torch.float32, device=query.device)
        marks = torch.empty(2, rows, dtype=torch.float32, device=query.device)
        return cls(shares, group, sums, marks[0], marks[1])

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of a kernel that writes shares."""
        return self.sums, self.largest, self.weights


def queries_of_a_head(query: Tensor, keys: Heads, values: Heads, first: Tensor, mask: Tensor | None) -> int:
    """How many queries share a head. Raises ValueError for shapes that do not agree or that `fits` denies."""
    batch, queries, width = query.shape
    heads = keys.words.shape[1]
    group = queries // heads
    if queries % heads or width != keys.width or keys.words.shape[:3] != values.words.shape[:3]:
        raise ValueError(f"queries {tuple(query.shape)} for {heads} heads of {keys.width} numbers")
    if not fits(max(width, values.width), group):
        raise ValueError(f"{group} queries a head of {width} numbers; {QUERIES} of {WIDEST} are possible")
    if keys.words.shape[0] != batch or first.shape != (batch,):
        raise ValueError(f"{batch} queries for {keys.words.shape[0]} texts and {len(first)} first tokens")
    if mask is not None and (mask.shape[0] not in (1, batch) or mask.shape[1] < keys.capacity):
        raise ValueError(f"a mask {tuple(mask.shape)} for {batch} texts of {keys.capacity} tokens")
    rows = [query.stride(2), *(heads.words.stride(3) for heads in (keys, values))]
    rows += [] if mask is None else [mask.stride(1)]
    if any(stride != 1 for stride in rows) or not all(scales_are_together(h) for h in (keys, values)):
        raise ValueError("numbers of a query, words of a token, scales of a head, a mask lie side by side")
    return group


@functools.lru_cache(maxsize=4096)
def share_count(
    kernel: str, tokens: int, programs: int, step: int, device: torch.device, **shape: int
) -> int:
    """Into how many shares the tokens of each of `programs` heads are cut.

    As many programs a multiprocessor as the table of `kernel` says for the shape, but none with less than
    `step` tokens.
    """
    table = launch_for(kernel, device, **shape)
    wanted = -(-table["programs"] * multiprocessors(device) // max(programs, 1))
    return int(max(1, min(wanted, -(-tokens // step), table["most_shares"])))


def mask_stride(mask: Tensor | None) -> int:
    """From the mask of a text to that of the next: 0 where all texts share one."""
    return 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)


def is_bool(mask: Tensor | None) -> bool:
    """Whether a mask says which tokens count; else it is added to logits."""
    return mask is not None and mask.dtype == torch.bool


def join(
    query: Tensor,
    keys: Heads,
    values: Heads,
    first: Tensor,
    parts: ShareSums,
    *,
    scaling: float,
    length: int | Tensor,
    mask: Tensor | None,
) -> Tensor:
    """All shares put together, turned back, and the tokens that are kept whole: [B, H', width].

    The result has the query's dtype.
    """
    # The interpreter would cut off what bf16 cannot hold instead of rounding.
    dtype = query.dtype if is_compiled(_join_kernel) else torch.float32
    width, shares = parts.sums.shape[1], parts.shares
    out = torch.empty(*query.shape[:2], width, dtype=dtype, device=query.device)
    config = launch_for("kv_cache.join", query.device)
    launch(
        _join_kernel, (query.shape[1], query.shape[0]),
        out, *parts.arrays, shares, query, keys.first, values.first, first, mask, length,
        LOG2_E * scaling, *query.stride()[:2], mask_stride(mask), *whole_strides(keys),
        *whole_strides(values), keys.capacity,
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask), GROUP=parts.group,
        WHOLE=keys.whole, TURN=turn_width(values), K_WIDTH=query.shape[2], V_WIDTH=width,
        K_COLUMNS=padded(query.shape[2]), V_COLUMNS=padded(width),
        SHARES=triton.next_power_of_2(shares), EACH=min(triton.next_power_of_2(shares), config["shares"]),
        num_warps=config["num_warps"], pdl=True, device=query.device,
    )  # fmt: skip
    return out.to(query.dtype)


@triton.jit
def in_base_2(added):
    """What a mask adds to logits. The lowest number stays one: a text with no other is not one with none."""
    wide = added.to(tl.float32)
    return tl.where(wide == float("-inf"), wide, tl.maximum(wide * 1.4426950408889634, -3e38))


@triton.jit(do_not_specialize=["length_ptr", "capacity"])
def _join_kernel(
    out_ptr, sums_ptr, largest_ptr, weight_ptr, shares, query_ptr, k_ptr, v_ptr, first_ptr,
    mask_ptr, length_ptr, scaling, stride_qb, stride_qh, stride_mb, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt, capacity,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    TURN: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr, SHARES: tl.constexpr, EACH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The shares of one query, weighted by how far their largest logits are below the largest of all."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    query, text = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = text * tl.num_programs(0) + query
    offs_v = tl.arange(0, V_COLUMNS)
    inside = offs_v < V_WIDTH
    offs_s = tl.arange(0, SHARES)
    base = tl.max(tl.load(largest_ptr + row * shares + offs_s, mask=offs_s < shares, other=float("-inf")), 0)
    if WHOLE > 0:
        its = query_ptr + text * stride_qb + query * stride_qh
        begin = tl.load(first_ptr + text).to(tl.int32)
        length = (tl.load(length_ptr) if LENGTH_IS_POINTER else length_ptr).to(tl.int32)
        head = query // GROUP
        logits = _whole_logits(
            its, k_ptr + text * stride_kb + head * stride_kh, stride_kt, mask_ptr, text * stride_mb,
            begin, tl.minimum(length, capacity), scaling, MASK_IS_BOOL, WHOLE, K_WIDTH, K_COLUMNS,
        )  # fmt: skip
        base = tl.maximum(base, tl.max(logits, 0))
    total = tl.zeros([V_COLUMNS], tl.float32)
    weight = tl.zeros([EACH], tl.float32)
    for begin_s in tl.static_range(0, SHARES, EACH):
        share = begin_s + tl.arange(0, EACH)
        there = share < shares
        at = row * shares + share
        factor = tl.exp2(tl.load(largest_ptr + at, mask=there, other=float("-inf")) - base)
        weight += tl.load(weight_ptr + at, mask=there, other=0.0) * factor
        sums = tl.load(
            sums_ptr + at[:, None] * V_WIDTH + offs_v[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(sums * factor[:, None], 0)
    total = tl.reshape(turned(tl.reshape(total, [1, V_COLUMNS]), 1, V_COLUMNS, TURN), [V_COLUMNS])
    all_weights = tl.sum(weight, 0)
    if WHOLE > 0:
        offs_w = tl.arange(0, power_of_two(WHOLE))
        v_ptr += text * stride_vb + head * stride_vh
        v = tl.load(
            v_ptr + offs_w[:, None] * stride_vt + offs_v[None, :],
            mask=(logits > float("-inf"))[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        p = tl.exp2(logits - base)
        total += tl.sum(p[:, None] * widened(v), 0)
        all_weights += tl.sum(p, 0)
    total = total / all_weights
    tl.store(out_ptr + row * V_WIDTH + offs_v, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _whole_logits(
    query_ptr, k_ptr, stride_kt, mask_ptr, mask_offset, begin, length, scaling,
    MASK_IS_BOOL: tl.constexpr, WHOLE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Logits in base 2 of the tokens that are kept whole, `begin` being the first of a text."""
    offs_w = tl.arange(0, power_of_two(WHOLE))
    offs_k = tl.arange(0, COLUMNS)
    token = begin + offs_w
    counts = (offs_w < WHOLE) & (token >= 0) & (token < length)
    q = widened(tl.load(query_ptr + offs_k, mask=offs_k < WIDTH, other=0.0))
    k = tl.load(
        k_ptr + offs_w[:, None] * stride_kt + offs_k[None, :],
        mask=counts[:, None] & (offs_k < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    logits = tl.sum(widened(k) * q[None, :], 1) * scaling
    if mask_ptr is not None:
        seen = tl.load(mask_ptr + mask_offset + token, mask=counts, other=0)
        if MASK_IS_BOOL:
            counts = counts & (seen != 0)
        else:
            logits += in_base_2(seen)
    return tl.where(counts, logits, float("-inf"))
