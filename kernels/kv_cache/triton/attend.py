"""Attention of one query a text over heads in few bits, in Triton: flash decoding from the packed words.

A program takes a share of the tokens of one head, for all queries of the head at once, G filled up to 16 as
matrix instructions want it. Codes are small integers, exact in bf16 and fp16: products are taken with the
codes, and scales come in afterwards,

    logit = scale_k (q . code - half sum(q)) scaling       half = (2^bits - 1) / 2
    out   = sum p scale_v (code - half)

(with "minmax": + low in place of - half times the scale). In bf16 it is 128 + code that is multiplied, of
up to 6 bits, as that needs no conversion, and half is 128 more. Each share leaves its sums, its largest
logit and its sum of weights; a second kernel puts the shares together in a fixed order. Sums are fp32; q and
p scale_v are rounded to the query's dtype, the latter after division by the largest scale_v of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.shares import (
    LOG2_E,
    QUERIES,
    ShareSums,
    first_bit_strides,
    in_base_2,
    is_bool,
    join,
    mask_stride,
    plane_counts,
    queries_of_a_head,
    share_count,
)
from neuzip.kernels.kv_cache.triton.store import padded
from neuzip.kernels.quantizers import plane_widths, words
from neuzip.kernels.tuning import launch_for

STEP = 64
"""Least tokens of a share."""


def attend(
    query: Tensor,
    keys: Heads,
    values: Heads,
    first: Tensor,
    *,
    scaling: float,
    length: int | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """`kv_cache.attend` for all heads that `shares.fits`: [B, H', D] to [B, H', D'] in the query's dtype.

    Raises ValueError for shapes that do not agree.
    """
    batch, queries, width = query.shape
    group = queries_of_a_head(query, keys, values, first, mask)
    heads = queries // group
    parts = ShareSums.empty(query, group, _shares(keys.capacity, batch * heads, query.device), values.width)
    row_bytes = padded(max(width, values.width)) * query.element_size()
    config = launch_for("kv_cache.attend", query.device)
    tile = launch_for("kv_cache.attend_step", query.device, row_bytes=row_bytes)
    launch(
        _share_kernel, (parts.shares, heads, batch),
        *parts.arrays, query, first, mask, length, LOG2_E * scaling, width, values.width,
        *query.stride()[:2], mask_stride(mask), *_arguments(keys), *_arguments(values), keys.capacity,
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask),
        MULTIPLIED=_multiplied(query.dtype), GROUP=group, QUERIES=QUERIES, STEP=tile["step"],
        K_BITS=keys.bits, K_WIDTHS=plane_widths(keys.bits), K_COUNTS=plane_counts(keys),
        K_COLUMNS=padded(width),
        V_BITS=values.bits, V_WIDTHS=plane_widths(values.bits), V_COUNTS=plane_counts(values),
        V_COLUMNS=padded(values.width),
        FIRST_COUNTS=(words(width, 1), words(values.width, 1)),
        num_warps=config["num_warps"], num_stages=config["num_stages"], pdl=True, device=query.device,
    )  # fmt: skip
    return join(query, parts)


def _shares(tokens: int, programs: int, device: torch.device) -> int:
    return share_count("kv_cache.attend", tokens, programs, STEP, device)


def _arguments(heads: Heads) -> tuple[Tensor | int | None, ...]:
    strides = (*heads.words.stride()[:3], *heads.scale.stride()[:2])
    return heads.words, heads.scale, None, heads.first_bits, *strides, *first_bit_strides(heads)


def _multiplied(dtype: torch.dtype) -> tl.dtype:
    """In what products are taken; the interpreter has no products of bf16."""
    known = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return known[dtype] if is_compiled(_share_kernel) or dtype != torch.bfloat16 else tl.float32


@triton.jit
def _plane(
    rows, mask, COUNT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Fields of WIDTH bits of tokens whose words begin at `rows` [TOKENS]: int32 [TOKENS, COLUMNS].

    A thread has TOGETHER fields that follow each other: those of a word of the widest plane.
    """
    begin = tl.arange(0, COLUMNS // TOGETHER) * TOGETHER
    offs = begin // (32 // WIDTH)
    fields = tl.load(rows[:, None] + offs[None, :], mask=mask[:, None] & (offs < COUNT)[None, :], other=0)
    fields = fields.to(tl.uint32, bitcast=True) >> (begin % (32 // WIDTH) // 4 * WIDTH)[None, :]
    # Field e is 8 (e mod 4) + WIDTH (e div 4) bits up: each binary digit of e has a shift of its own.
    for digit in tl.static_range(5):
        if TOGETHER >> digit == 8:
            fields = tl.join(fields, fields >> WIDTH)
        elif TOGETHER >> digit == 4:
            fields = tl.join(fields, fields >> 16)
        elif TOGETHER >> digit == 2:
            fields = tl.join(fields, fields >> 8)
        elif TOGETHER >> digit > 8:
            fields = tl.join(fields, fields >> (WIDTH * (TOGETHER >> (digit + 3))))
    return tl.reshape(fields, [TOKENS, COLUMNS]) & ((1 << WIDTH) - 1)


@triton.jit
def _factors(codes, KIND: tl.constexpr, BITS: tl.constexpr):
    """Codes as numbers to multiply with, and what has been added to each.

    The bits of a code below 128, under those of the bf16 128, are the bf16 128 + code: nothing is converted.
    """
    if KIND.is_bf16() and BITS < 7:
        return (codes | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True), 128.0
    else:
        return codes.to(KIND), 0.0


@triton.jit
def codes_of(
    rows, mask, first_bits_ptr, first_row, BITS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr,
    FIRST_COUNT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of tokens [TOKENS, COLUMNS], and (2^bits - 1) / 2 of each. `first_row`: which is the first."""
    TOGETHER: tl.constexpr = 32 // WIDTHS[0]
    codes = _plane(rows, mask, COUNTS[0], TOKENS, COLUMNS, WIDTHS[0], TOGETHER)
    begin = COUNTS[0]
    for i in tl.static_range(1, len(WIDTHS)):
        plane = _plane(rows + begin, mask, COUNTS[i], TOKENS, COLUMNS, WIDTHS[i], TOGETHER)
        codes = (codes << WIDTHS[i]) | plane
        begin += COUNTS[i]
    half = tl.full([TOKENS], ((1 << BITS) - 1) / 2, tl.float32)
    if first_bits_ptr is not None:  # noqa: SIM102  (the compiler knows this, not what follows)
        if (first_row >= 0) & (first_row < TOKENS):
            is_first = tl.arange(0, TOKENS) == first_row
            row = first_bits_ptr + tl.zeros([TOKENS], tl.int32)
            codes |= _plane(row, is_first, FIRST_COUNT, TOKENS, COLUMNS, 1, TOGETHER) << BITS
            half = tl.where(is_first, ((2 << BITS) - 1) / 2, half)
    return codes, half


@triton.jit(do_not_specialize=["length_ptr", "capacity"])
def _share_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling, k_width, v_width,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kl_ptr, kf_ptr,
    stride_kwb, stride_kwh, stride_kwt, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vl_ptr, vf_ptr,
    stride_vwb, stride_vwh, stride_vwt, stride_vsb, stride_vsh, stride_vfb, stride_vfh, capacity,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, MULTIPLIED: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, STEP: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_COLUMNS: tl.constexpr,
    FIRST_COUNTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head: sums [QUERIES, V_COLUMNS], the largest logit (base 2) and the sum of weights."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    share, shares = tl.program_id(0), tl.num_programs(0)
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    length = (tl.load(length_ptr) if LENGTH_IS_POINTER else length_ptr).to(tl.int32)
    length = tl.minimum(length, capacity)
    each = tl.cdiv(tl.cdiv(length, shares), STEP) * STEP
    begin = share * each
    end = tl.minimum(begin + each, length)

    offs_q = tl.arange(0, QUERIES)
    offs_k = tl.arange(0, K_COLUMNS)
    offs_v = tl.arange(0, V_COLUMNS)
    queries = head * GROUP + offs_q
    q = tl.load(
        query_ptr + text * stride_qb + queries[:, None] * stride_qh + offs_k[None, :],
        mask=(offs_q < GROUP)[:, None] & (offs_k < k_width)[None, :], other=0.0,
    ).to(MULTIPLIED)  # fmt: skip
    q_sum = tl.sum(q.to(tl.float32), 1)
    first = tl.load(first_ptr + text)

    kw_ptr += text * stride_kwb + head * stride_kwh + begin.to(tl.int64) * stride_kwt
    vw_ptr += text * stride_vwb + head * stride_vwh + begin.to(tl.int64) * stride_vwt
    k_scales = text * stride_ksb + head * stride_ksh
    v_scales = text * stride_vsb + head * stride_vsh
    if kf_ptr is not None:
        kf_ptr += text * stride_kfb + head * stride_kfh
    if vf_ptr is not None:
        vf_ptr += text * stride_vfb + head * stride_vfh

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, V_COLUMNS], tl.float32)
    rows = tl.arange(0, STEP)
    for at in range(begin, end, STEP):
        tokens = at + rows
        there = tokens < end
        first_row = (first - at).to(tl.int32)
        codes, half = codes_of(
            kw_ptr + rows * stride_kwt, there, kf_ptr, first_row,
            K_BITS, K_WIDTHS, K_COUNTS, FIRST_COUNTS[0], STEP, K_COLUMNS,
        )  # fmt: skip
        scale = tl.load(ks_ptr + k_scales + tokens, mask=there, other=0.0).to(tl.float32)
        numbers, added = _factors(codes, MULTIPLIED, K_BITS)
        products = tl.dot(q, tl.trans(numbers), input_precision="ieee")  # [QUERIES, STEP]
        if kl_ptr is None:
            logits = (products - q_sum[:, None] * (half + added)[None, :]) * scale[None, :]
        else:
            low = tl.load(kl_ptr + k_scales + tokens, mask=there, other=0.0).to(tl.float32)
            logits = products * scale[None, :] + q_sum[:, None] * (low - added * scale)[None, :]
        logits = logits * scaling
        if mask_ptr is not None:
            seen = tl.load(mask_ptr + text * stride_mb + tokens, mask=there, other=0)
            if MASK_IS_BOOL:
                there = there & (seen != 0)
            else:
                logits += in_base_2(seen)[None, :]
        logits = tl.where(there[None, :], logits, float("-inf"))

        now = tl.maximum(largest, tl.max(logits, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no infinity less infinity
        p = tl.exp2(logits - base[:, None])  # [QUERIES, STEP]
        shrink = tl.exp2(largest - base)
        largest = now
        weight = weight * shrink + tl.sum(p, 1)

        inside = tokens < end
        codes, half = codes_of(
            vw_ptr + rows * stride_vwt, inside, vf_ptr, first_row,
            V_BITS, V_WIDTHS, V_COUNTS, FIRST_COUNTS[1], STEP, V_COLUMNS,
        )  # fmt: skip
        scale = tl.load(vs_ptr + v_scales + tokens, mask=inside, other=0.0).to(tl.float32)
        unit = tl.max(scale, 0)
        unit = tl.where(unit == 0, 1.0, unit)
        factors = (p * (scale / unit)[None, :]).to(MULTIPLIED)
        numbers, added = _factors(codes, MULTIPLIED, V_BITS)
        if vl_ptr is None:
            half += added
        else:
            half = added + tl.zeros_like(half)
        part = tl.dot(factors, numbers, input_precision="ieee")  # [QUERIES, V_COLUMNS]
        part = (part - tl.sum(factors.to(tl.float32) * half[None, :], 1)[:, None]) * unit
        if vl_ptr is not None:
            low = tl.load(vl_ptr + v_scales + tokens, mask=inside, other=0.0).to(tl.float32)
            part += tl.sum(p * low[None, :], 1)[:, None]
        sums = sums * shrink[:, None] + part
        kw_ptr += STEP * stride_kwt
        vw_ptr += STEP * stride_vwt

    real = offs_q < GROUP
    row = (text * heads * GROUP + queries) * shares + share
    tl.store(largest_ptr + row, largest, mask=real)
    tl.store(weight_ptr + row, weight, mask=real)
    tl.store(
        sums_ptr + row[:, None] * v_width + offs_v[None, :], sums,
        mask=real[:, None] & (offs_v < v_width)[None, :],
    )  # fmt: skip
