"""Keys to INT8 and values to E4M3, in Triton: two passes over both, and a small step between them.

    statistics  each share of 256 tokens: sums of the keys, largest values of each channel
    fold        the shares of a head, in their order: means and scales
    codes       each block of 128 tokens: keys smoothed and quantised with 4 scales, values quantised,
                transposed and put in the order in which the products need them

Shares are counted from the begin of a sequence, so that a sequence has the same codes alone and in a pack.
No atomics: the same inputs give the same bits. Numbers below 2^-100 may be quantised to 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neuzip.kernels.attention.quantized import BLOCK, GROUPS, Quantized
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.tuning import launch_for

SHARE = 256
"""Tokens that a program of the first pass takes."""

NUMBERS = 4096
"""Numbers of a program's tile of tokens, or shares, in the first two passes."""

E4M3_MAX = tl.constexpr(448.0)

TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a number of up to 2**22, it makes an integer of it, halves to even: the lowest bits of the sum."""

SMALLEST = tl.constexpr(2.0**-100)
"""Where the inverse of a scale is still a number."""


def quantize(k: Tensor, v: Tensor, bits: int, smooth_v: bool) -> Quantized:
    """Quantise k and v [B, Hkv, Nk, D], bf16 or fp16 (fp32 in the interpreter), with Nk > 0."""
    batch, heads, tokens, _ = k.shape
    capacity = triton.cdiv(tokens, BLOCK) * BLOCK
    outer = (batch, heads)
    strides = *k.stride()[:3], *v.stride()[:3]
    return _quantize(k, v, outer, capacity, strides, batch, tokens, None, bits, smooth_v)


def quantize_packed(
    k: Tensor, v: Tensor, starts: Tensor, longest: int, bits: int, smooth_v: bool
) -> Quantized:
    """Quantise k and v [Tk, Hkv, D] of sequences of at most `longest` tokens; `starts` int32 [S + 1]."""
    tokens, heads, _ = k.shape
    sequences = starts.shape[0] - 1
    capacity = (tokens // BLOCK + sequences) * BLOCK
    strides = 0, k.stride(1), k.stride(0), 0, v.stride(1), v.stride(0)
    return _quantize(k, v, (heads,), capacity, strides, sequences, longest, starts, bits, smooth_v)


def _quantize(
    k: Tensor,
    v: Tensor,
    outer: tuple[int, ...],
    capacity: int,
    strides: tuple[int, ...],
    sequences: int,
    longest: int,
    starts: Tensor | None,
    bits: int,
    smooth_v: bool,
) -> Quantized:
    heads, width, device = k.shape[1], k.shape[-1], k.device
    shares, blocks = triton.cdiv(longest, SHARE), triton.cdiv(longest, BLOCK)
    kinds = 4 if smooth_v else 2
    slots = (
        shares if starts is None else k.shape[0] // SHARE + sequences
    )  # shares that a head has memory for, counted as blocks are
    parts = torch.empty(
        heads if starts is not None else sequences * heads,
        slots,
        kinds,
        width,
        device=device,
        dtype=torch.float32,
    )
    quantized = Quantized(
        torch.empty(*outer, capacity, width, dtype=torch.int8, device=device),
        torch.empty(*outer, capacity // BLOCK, GROUPS, device=device, dtype=torch.float32),
        torch.empty(sequences, heads, width, device=device, dtype=torch.float32),
        torch.empty(*outer, width, capacity, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(sequences, heads, width, device=device, dtype=torch.float32),
        torch.empty(sequences, heads, width, device=device, dtype=torch.float32) if smooth_v else None,
    )
    columns = triton.next_power_of_2(width)
    common = {"D": width, "COLUMNS": columns, "SMOOTH_V": smooth_v}
    total = k.shape[0] if starts is not None else 0
    launch(
        _statistics_kernel, (sequences * heads * shares,),
        parts, k, v, starts, longest, total, heads, shares, slots, *strides,
        SHARE=SHARE, ROWS=NUMBERS // columns, **common, num_warps=8, device=device,
    )  # fmt: skip
    launch(
        _fold_kernel, (sequences * heads,),
        quantized.k_mean, quantized.v_scale, quantized.v_mean, parts, starts, longest, total, heads, slots,
        SHARE=SHARE, FOLDED=NUMBERS // columns, **common, num_warps=4, device=device,
    )  # fmt: skip
    launch(
        _codes_kernel, (sequences * heads * blocks * 2,),
        quantized.k, quantized.k_scale, quantized.v, k, v,
        quantized.k_mean, quantized.v_scale, quantized.v_mean, starts,
        longest, total, heads, blocks, capacity, *strides, LEVELS=2 ** (bits - 1) - 1,
        BLOCK=BLOCK, **common, COMPILED=is_compiled(_codes_kernel), device=device,
        **codes_launch(columns, device),
    )  # fmt: skip
    return quantized


@functools.cache
def codes_launch(columns: int, device: torch.device) -> dict[str, Any]:
    """Options of a launch for a block of `columns` numbers: two programs a multiprocessor where they fit."""
    return dict(launch_for("attention.codes", device, columns=columns))


@triton.jit
def extent(starts_ptr, sequence, longest, total):
    """Where a sequence begins, and its tokens: whatever `starts` holds, all of them are there."""
    if starts_ptr is None:
        start = 0
        tokens = longest
    else:
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + sequence), 0), total)
        end = tl.minimum(tl.maximum(tl.load(starts_ptr + sequence + 1), start), total)
        tokens = tl.minimum(end - start, longest)
    return start, tokens


@triton.jit
def first_share(starts_ptr, outer, head, sequence, start, slots, SHARE: tl.constexpr):
    """Where the shares of a sequence's head begin: those of a pack as its blocks do."""
    if starts_ptr is None:
        return outer.to(tl.int64) * slots
    else:
        return head * slots + start // SHARE + sequence


@triton.jit
def as_e4m3(x, COMPILED: tl.constexpr):
    """fp32 to E4M3, to nearest, halves to even. The interpreter would err: it is given what E4M3 has."""
    if not COMPILED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + 1.5 * 2**14) - 1.5 * 2**14
        x = tl.where(tl.abs(x) < 2.0**-6, small, normal)
        x = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    return x.to(tl.float8e4nv)


@triton.jit
def quotient(x, scale, COMPILED: tl.constexpr):
    """x / scale as a division rounds it, of x that is at most some hundred times as large."""
    if COMPILED:
        # The product with the inverse, and once what it is off by: cheaper than divisions.
        inverse = tl.broadcast_to(
            tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.maximum(scale, SMALLEST)), x.shape
        )
        y = x * inverse
        y = tl.fma(tl.fma(-y, tl.broadcast_to(scale, x.shape), x), inverse, y)
    else:
        y = tl.div_rn(x, tl.broadcast_to(tl.maximum(scale, SMALLEST), x.shape))
    return y


@triton.jit
def rounded(x):
    """Codes: whole numbers from -127 to 127."""
    return (x + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def divided(x, by: tl.constexpr):
    """x / by, rounded once."""
    return tl.div_rn(x, tl.full(x.shape, by, tl.float32))


@triton.jit(do_not_specialize=["longest", "total", "heads", "shares", "slots"])
def _statistics_kernel(
    parts_ptr, k_ptr, v_ptr, starts_ptr, longest, total, heads, shares, slots,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    SHARE: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, COLUMNS: tl.constexpr, SMOOTH_V: tl.constexpr,
):  # fmt: skip
    """Statistics of a share of a head: sums of keys; largest |values|, or largest, least and sums."""
    program = tl.program_id(0)
    share, outer = program % shares, program // shares
    head, sequence = (outer % heads).to(tl.int64), (outer // heads).to(tl.int64)
    start, tokens = extent(starts_ptr, sequence, longest, total)
    if share * SHARE >= tokens:
        return
    rows = share * SHARE + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    k_ptr += sequence * stride_kb + head * stride_kh
    v_ptr += sequence * stride_vb + head * stride_vh
    k_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    v_high = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SMOOTH_V:
        v_high = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        v_low = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
        v_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, SHARE, ROWS):
        there = (i + rows < tokens)[:, None] & (columns < D)[None, :]
        at = (start + i + rows).to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * stride_kt + columns[None, :], mask=there, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at * stride_vt + columns[None, :], mask=there, other=0.0).to(tl.float32)
        k_sum += k
        if SMOOTH_V:
            v_high = tl.maximum(v_high, tl.where(there, v, float("-inf")))
            v_low = tl.minimum(v_low, tl.where(there, v, float("inf")))
            v_sum += v
        else:
            v_high = tl.maximum(v_high, tl.abs(v))
    kinds: tl.constexpr = 4 if SMOOTH_V else 2
    place = first_share(starts_ptr, outer, head, sequence, start, slots, SHARE) + share
    parts_ptr += place * (kinds * D) + columns
    tl.store(parts_ptr, tl.sum(k_sum, 0), mask=columns < D)
    tl.store(parts_ptr + D, tl.max(v_high, 0), mask=columns < D)
    if SMOOTH_V:
        tl.store(parts_ptr + 2 * D, tl.min(v_low, 0), mask=columns < D)
        tl.store(parts_ptr + 3 * D, tl.sum(v_sum, 0), mask=columns < D)


@triton.jit(do_not_specialize=["longest", "total", "heads", "slots"])
def _fold_kernel(
    k_mean_ptr, v_scale_ptr, v_mean_ptr, parts_ptr, starts_ptr, longest, total, heads, slots,
    SHARE: tl.constexpr, FOLDED: tl.constexpr,
    D: tl.constexpr, COLUMNS: tl.constexpr, SMOOTH_V: tl.constexpr,
):  # fmt: skip
    """The mean of a head's keys, and scales (and means) of its values."""
    outer = tl.program_id(0)
    start, tokens = extent(starts_ptr, outer // heads, longest, total)
    begin = first_share(
        starts_ptr, outer, (outer % heads).to(tl.int64), (outer // heads).to(tl.int64), start, slots, SHARE
    )
    mine = tl.cdiv(tokens, SHARE)
    kinds: tl.constexpr = 4 if SMOOTH_V else 2
    columns = tl.arange(0, COLUMNS)
    rows = tl.arange(0, FOLDED)
    k_sum = tl.zeros((FOLDED, COLUMNS), tl.float32)
    v_sum = tl.zeros((FOLDED, COLUMNS), tl.float32)
    v_high = tl.full((FOLDED, COLUMNS), float("-inf"), tl.float32)
    v_low = tl.full((FOLDED, COLUMNS), float("inf"), tl.float32)
    for i in range(0, mine, FOLDED):
        there = (i + rows < mine)[:, None] & (columns < D)[None, :]
        at = begin + i + rows
        parts = parts_ptr + at[:, None] * (kinds * D) + columns[None, :]
        k_sum += tl.load(parts, mask=there, other=0.0)
        v_high = tl.maximum(v_high, tl.load(parts + D, mask=there, other=float("-inf")))
        if SMOOTH_V:
            v_low = tl.minimum(v_low, tl.load(parts + 2 * D, mask=there, other=float("inf")))
            v_sum += tl.load(parts + 3 * D, mask=there, other=0.0)
    number = tl.maximum(tokens, 1).to(tl.float32)
    high = tl.max(v_high, 0)
    at = outer.to(tl.int64) * D + columns
    tl.store(k_mean_ptr + at, tl.div_rn(tl.sum(k_sum, 0), number + tl.zeros_like(high)), mask=columns < D)
    if SMOOTH_V:  # rounding is monotonic: the largest of all differences is that of the extremes
        mean = tl.div_rn(tl.sum(v_sum, 0), number + tl.zeros_like(high))
        high = tl.maximum(high - mean, mean - tl.min(v_low, 0))
        tl.store(v_mean_ptr + at, mean, mask=columns < D)
    high = tl.maximum(high, 0.0)  # of no tokens
    tl.store(v_scale_ptr + at, divided(high, 448.0), mask=columns < D)


@triton.jit(do_not_specialize=["longest", "total", "heads", "blocks"])
def _codes_kernel(
    k_out, k_scale_ptr, v_out, k_ptr, v_ptr, k_mean_ptr, v_scale_ptr, v_mean_ptr, starts_ptr,
    longest, total, heads, blocks, capacity,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    SMOOTH_V: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Codes of a block of a head: of keys with their scales, or of values, transposed."""
    # From the end: what the first pass read last is still in the second-level cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    which, block, outer = program % 2, program // 2 % blocks, program // 2 // blocks
    head, sequence = (outer % heads).to(tl.int64), (outer // heads).to(tl.int64)
    start, tokens = extent(starts_ptr, sequence, longest, total)
    if block * BLOCK >= tokens:
        return
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, COLUMNS)
    real = columns < D
    place = outer.to(tl.int64)  # of a head's memory, and where in it the block begins
    begin = block.to(tl.int64) * BLOCK
    if starts_ptr is not None:
        place = head
        begin += (start // BLOCK + sequence) * BLOCK
    channels = outer.to(tl.int64) * D + columns

    if which == 0:
        there = block * BLOCK + rows < tokens
        at = (start + block * BLOCK + rows).to(tl.int64)[:, None] * stride_kt + columns[None, :]
        at += sequence * stride_kb + head * stride_kh
        k = tl.load(k_ptr + at, mask=there[:, None] & real[None, :], other=0.0).to(tl.float32)
        mean = tl.load(k_mean_ptr + channels, mask=real, other=0.0)
        k = tl.where(there[:, None], k - mean[None, :], 0.0)
        peak = tl.reshape(tl.max(tl.abs(k), 1), [BLOCK // 8, 4, 2])
        scale = divided(tl.max(tl.max(peak, 2), 0), LEVELS)  # [4]
        tl.store(k_scale_ptr + (place * capacity + begin) // BLOCK * 4 + tl.arange(0, 4), scale)
        of_row = tl.reshape(tl.broadcast_to(scale[None, :, None], (BLOCK // 8, 4, 2)), [BLOCK, 1])
        codes = rounded(quotient(k, of_row, COMPILED))
        to = (place * capacity + begin + rows) * D
        tl.store(k_out + to[:, None] + columns[None, :], codes, mask=real[None, :])
    else:
        # Position p of 16 holds token p % 2 + p // 4 * 2 + p // 2 % 2 * 8: see quantized.stored_token.
        order = rows // 16 * 16 + rows % 2 + rows % 16 // 4 * 2 + rows // 2 % 2 * 8
        there = block * BLOCK + order < tokens
        at = (start + block * BLOCK + order).to(tl.int64)[:, None] * stride_vt + columns[None, :]
        at += sequence * stride_vb + head * stride_vh
        v = tl.load(v_ptr + at, mask=there[:, None] & real[None, :], other=0.0).to(tl.float32)
        if SMOOTH_V:
            mean = tl.load(v_mean_ptr + channels, mask=real, other=0.0)
            v = tl.where(there[:, None], v - mean[None, :], 0.0)
        of_column = tl.load(v_scale_ptr + channels, mask=real, other=0.0)[None, :]
        v = as_e4m3(quotient(v, of_column, COMPILED), COMPILED)
        line = (place * D + columns.to(tl.int64)) * capacity + begin
        tl.store(v_out + line[:, None] + rows[None, :], tl.trans(v), mask=real[:, None])
