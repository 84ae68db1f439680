"""Attention of one query a text over heads in few bits, in Triton: flash decoding from the packed words.

For queries in fp32, and what else attend_mma.py is not made for. A program takes a share of the tokens of
one head, for all queries of the head at once, G filled up to 16 as matrix instructions want it. Codes are
made the numbers that they stand for, in fp32, and rounded to the query's dtype. Each share leaves its sums,
its largest logit and its sum of weights; a second kernel puts the shares together in a fixed order. Sums are
fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.floats import widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.arguments import (
    center_strides,
    first_bit_strides,
    last_block,
    path_arrays,
    path_constants,
    plane_counts,
)
from neuzip.kernels.kv_cache.triton.groups import (
    block_of,
    group_width,
    loaded_center,
    scale_of_byte,
    turn_width,
    turned,
)
from neuzip.kernels.kv_cache.triton.shares import (
    LOG2_E,
    QUERIES,
    ShareSums,
    in_base_2,
    is_bool,
    join,
    mask_stride,
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
        *path_arrays(keys), *center_strides(keys), last_block(keys),
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask),
        MULTIPLIED=_multiplied(query.dtype), GROUP=group, QUERIES=QUERIES, STEP=tile["step"],
        WHOLE=keys.whole, PATH=path_constants(keys), TURN=turn_width(keys), **_constants("K", keys),
        **_constants("V", values),
        num_warps=config["num_warps"], num_stages=config["num_stages"], pdl=True, device=query.device,
    )  # fmt: skip
    return join(query, keys, values, first, parts, scaling=scaling, length=length, mask=mask)


def _shares(tokens: int, programs: int, device: torch.device) -> int:
    return share_count("kv_cache.attend", tokens, programs, STEP, device)


def rows_of(heads: Heads) -> tuple[Tensor | None, ...]:
    """Words, scales, zero points or None, and the extra bits of the first token or None."""
    return heads.words, heads.scale, heads.zero, heads.first_bits


def _arguments(heads: Heads) -> tuple[Tensor | int | None, ...]:
    return *rows_of(heads), *heads.words.stride()[:3], *heads.scale.stride()[:2], *first_bit_strides(heads)


def _constants(letter: str, heads: Heads) -> dict[str, Any]:
    """What the kernel knows of keys, "K", or values, "V", when it is compiled."""
    return {
        f"{letter}_BITS": heads.bits, f"{letter}_WIDTHS": plane_widths(heads.bits),
        f"{letter}_COUNTS": plane_counts(heads), f"{letter}_COLUMNS": padded(heads.width),
        f"{letter}_FIRST": words(heads.width, 1), f"{letter}_GROUPS": heads.scale.shape[3],
        f"{letter}_GROUP": group_width(heads),
    }  # fmt: skip


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


@triton.jit
def numbers_of(
    rows, scale_ptr, zero_ptr, scales, mask, first_bits_ptr, first_row,
    BITS: tl.constexpr, WIDTHS: tl.constexpr, COUNTS: tl.constexpr, FIRST_COUNT: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What codes of tokens stand for, fp32 [TOKENS, COLUMNS], still rotated: one rounding.

    `scales` [TOKENS] is where a token's scales and zero points begin.
    """
    codes, half = codes_of(
        rows, mask, first_bits_ptr, first_row, BITS, WIDTHS, COUNTS, FIRST_COUNT, TOKENS, COLUMNS
    )
    if zero_ptr is None:
        scale = widened(tl.load(scale_ptr + scales, mask=mask, other=0.0))[:, None]
        offset = half[:, None]
    else:
        group = tl.arange(0, COLUMNS) // GROUP
        at = scales[:, None] + group[None, :]
        inside = mask[:, None] & (group < GROUPS)[None, :]
        scale = scale_of_byte(tl.load(scale_ptr + at, mask=inside, other=0).to(tl.int32))
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        offset = ((1 << BITS) - 1) / 2 - zero * 2.0 ** (BITS - 7)
    return (codes.to(tl.float32) - offset) * scale


@triton.jit
def _center_logits(
    query_ptr, rows, stride_qh, center_ptr, table_ptr, block, last_block, scaling, real, width,
    COLUMNS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """What the center of a block adds to logits of its tokens, fp32 [QUERIES]; 0 before the first block."""
    columns = tl.arange(0, COLUMNS)
    there = columns < width
    q = tl.load(
        query_ptr + rows[:, None] * stride_qh + columns[None, :],
        mask=real[:, None] & there[None, :],
        other=0.0,
    )
    center = loaded_center(center_ptr, table_ptr, block, last_block, columns, there, width, PATH)
    return tl.where(block >= 0, tl.sum(widened(q) * center[None, :], 1) * scaling, 0.0)


@triton.jit(do_not_specialize=["length_ptr", "capacity", "last_block"])
def _share_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling, k_width, v_width,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kz_ptr, kf_ptr,
    stride_kwb, stride_kwh, stride_kwt, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vz_ptr, vf_ptr,
    stride_vwb, stride_vwh, stride_vwt, stride_vsb, stride_vsh, stride_vfb, stride_vfh, capacity,
    center_ptr, table_ptr, stride_cb, stride_ch, last_block,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, MULTIPLIED: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr, PATH: tl.constexpr, TURN: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_COLUMNS: tl.constexpr,
    K_FIRST: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_FIRST: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, USE_PDL: tl.constexpr,
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
    )  # fmt: skip
    q = turned(widened(q), QUERIES, K_COLUMNS, TURN).to(MULTIPLIED)
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
    if center_ptr is not None:
        center_ptr += text * stride_cb + head * stride_ch
        query_ptr += text * stride_qb
        real = offs_q < GROUP
        block = block_of(begin - first, PATH)
        next_block = first + (block + 1) * PATH[0]
        center_logits = _center_logits(
            query_ptr, queries, stride_qh, center_ptr, table_ptr, block, last_block, scaling, real, k_width,
            K_COLUMNS, PATH,
        )  # fmt: skip
    for at in range(begin, end, STEP):
        tokens = at + rows
        there = tokens < end
        first_row = (first - at).to(tl.int32)
        keys = numbers_of(
            kw_ptr + rows * stride_kwt, ks_ptr, kz_ptr, k_scales + tokens * K_GROUPS, there,
            kf_ptr, first_row,
            K_BITS, K_WIDTHS, K_COUNTS, K_FIRST, K_GROUPS, K_GROUP, STEP, K_COLUMNS,
        ).to(MULTIPLIED)  # fmt: skip
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scaling  # [QUERIES, STEP]
        if center_ptr is not None:
            logits += center_logits[:, None]
            if at + STEP > next_block:  # it begins within this step, or with it
                block += 1
                more = center_logits
                center_logits = _center_logits(
                    query_ptr, queries, stride_qh, center_ptr, table_ptr, block, last_block, scaling, real,
                    k_width, K_COLUMNS, PATH,
                )  # fmt: skip
                more = center_logits - more
                logits += tl.where((tokens >= next_block)[None, :], more[:, None], 0.0)
                next_block += PATH[0]
        if WHOLE > 0:
            there = there & ((tokens < first) | (tokens >= first + WHOLE))
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

        values = numbers_of(
            vw_ptr + rows * stride_vwt, vs_ptr, vz_ptr, v_scales + tokens * V_GROUPS, tokens < end,
            vf_ptr, first_row,
            V_BITS, V_WIDTHS, V_COUNTS, V_FIRST, V_GROUPS, V_GROUP, STEP, V_COLUMNS,
        ).to(MULTIPLIED)  # fmt: skip
        factors = p.to(MULTIPLIED)
        weight = weight * shrink + tl.sum(factors.to(tl.float32), 1)
        sums = sums * shrink[:, None] + tl.dot(factors, values, input_precision="ieee")
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
