"""Attention of one query a text over heads in few bits, in Triton: words as matrix instructions want them.

For queries of 16 bits; attend.py does those of 32, and groups that matrix instructions cannot take. A program
is one warp, which takes a share of the tokens of one head, STEP at a time, for up to 16 queries at once. The
words and scales of a step are in flight while the one before is computed.

    S = K Q^T      16 tokens by 8 queries: thread (r, q) has, of the tokens r and r + 8, eight of each 32
                   columns, 32 j + 8 q to 32 j + 8 q + 7
    O += V^T P^T   16 columns by 8 queries, 16 tokens: thread (r, q) has columns 8 C r to 8 C r + 8 C - 1 of
                   the tokens 2 q, 2 q + 1, 2 q + 8, 2 q + 9, where C is the width over 64, rounded up; an
                   instruction takes two of its columns

A byte beside it makes a number of a code: the bf16 128 + code, or the fp16 1024 + code. Of keys, the products
of a group are multiplied with its scale when they are summed, and what was added to codes is subtracted then.
Values are made the numbers that they stand for, rounded once, for what is added to codes would drown the sums
of a share. The weights of a share's tokens have a unit, the base of their query, which is raised to the
largest logit only when a logit exceeds it by RISE: so sums are seldom multiplied. All sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.arguments import first_bit_strides, plane_counts
from neuzip.kernels.kv_cache.triton.groups import group_width, turn_width
from neuzip.kernels.kv_cache.triton.mma_codes import (
    group_patterns,
    group_sums,
    piece_words,
    query_fragments,
)
from neuzip.kernels.kv_cache.triton.mma_steps import (
    exceed,
    key_products,
    masked_logits,
    raised_bases,
    rounded_weights,
    with_values,
)
from neuzip.kernels.kv_cache.triton.shares import (
    LOG2_E,
    ShareSums,
    is_bool,
    join,
    mask_stride,
    queries_of_a_head,
    share_count,
)
from neuzip.kernels.quantizers import plane_widths, words

STEP = 16
"""Tokens that a program takes at a time."""

LEAST = -3.3e38
"""The base of queries before the first token: less than any logit but minus infinity."""

_STEP, _LEAST = tl.constexpr(STEP), tl.constexpr(LEAST)


def fits(query: Tensor, keys: Heads, values: Heads) -> bool:
    """Whether `attend` is made for them: numbers of 16 bits, scales in bf16, rows one behind the other.

    Groups of keys are whole multiples of 32 numbers, those of values of 8.
    """
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and keys.capacity > 0
        and all(heads.words.stride()[2:] == (words(heads.width, heads.bits), 1) for heads in (keys, values))
        and all(h.group is not None or h.scale.dtype == torch.bfloat16 for h in (keys, values))
        and (keys.scale.shape[3] == 1 or group_width(keys) % 32 == 0)
        and (values.scale.shape[3] == 1 or group_width(values) % 8 == 0)
    )


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
    """`kv_cache.attend` for heads that `fits` allows: [B, H', D] to [B, H', D'] in the query's dtype.

    Raises ValueError for shapes that do not agree.
    """
    batch, queries, width = query.shape
    group = queries_of_a_head(query, keys, values, first, mask)
    heads = queries // group
    widest = max(width, values.width)
    shares = _shares(keys.capacity, batch * heads, widest, group, query.device)
    parts = ShareSums.empty(query, group, shares, values.width)
    k_numbers = _together(keys)
    launch(
        _fragments_kernel, (parts.shares, heads, batch),
        *parts.arrays, query.view(torch.int16), first, mask, length, LOG2_E * scaling,
        *query.stride()[:2], mask_stride(mask),
        *_arguments(keys, k_numbers), *_arguments(values, _each(values)), keys.capacity,
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask),
        HALF=query.dtype == torch.float16, GROUP=group, WHOLE=keys.whole, TURN=turn_width(keys),
        **_constants("K", keys), **_constants("V", values), **_pieces(values), K_SCALES=k_numbers[0].shape[3],
        COMPILED=is_compiled(_fragments_kernel), num_warps=1, pdl=True, device=query.device,
    )  # fmt: skip
    return join(query, keys, values, first, parts, scaling=scaling, length=length, mask=mask)


def _shares(tokens: int, programs: int, width: int, group: int, device: torch.device) -> int:
    return share_count("kv_cache.attend_mma", tokens, programs, STEP, device, width=width, group=group)


def _arguments(heads: Heads, numbers: tuple[Tensor, Tensor | None]) -> tuple[Tensor | int | None, ...]:
    scale, zero = numbers
    strides = *heads.words.stride()[:2], *scale.stride()[:2]
    return heads.words, scale, zero, heads.first_bits, *strides, *first_bit_strides(heads)


def _together(heads: Heads) -> tuple[Tensor, Tensor | None]:
    """The bits of scales and zero points, those of 4 or 2 groups in one integer where that is possible."""
    if heads.zero is None:
        return _each(heads)
    arrays = heads.scale, heads.zero
    places = [x for array in arrays for x in (*array.stride()[:2], array.shape[3], array.storage_offset())]
    for dtype in (torch.int32, torch.int16):
        if all(place % dtype.itemsize == 0 for place in places):
            return heads.scale.view(dtype), heads.zero.view(dtype)
    return _each(heads)


def _each(heads: Heads) -> tuple[Tensor, Tensor | None]:
    """The bits of scales and zero points, those of a group each."""
    if heads.zero is None:
        return heads.scale.view(torch.int16), None
    return heads.scale, heads.zero


def _constants(letter: str, heads: Heads) -> dict[str, Any]:
    """What the kernel knows of keys, "K", or values, "V", when it is compiled."""
    widths, extra = plane_widths(heads.bits), heads.first_bits is not None
    return {
        f"{letter}_BITS": heads.bits, f"{letter}_WIDTHS": widths, f"{letter}_COUNTS": plane_counts(heads),
        f"{letter}_PLANES": ((1, *widths) if extra else widths), f"{letter}_ROW": heads.words.shape[3],
        f"{letter}_WIDTH": heads.width, f"{letter}_GROUPS": heads.scale.shape[3],
        f"{letter}_GROUP": group_width(heads), f"{letter}_FIRST": words(heads.width, 1),
    }  # fmt: skip


def _pieces(values: Heads) -> dict[str, int]:
    """How many pieces a thread's columns of a value are, each within a group, and 8s of columns of one."""
    chunks = -(-values.width // 64)
    is_whole = chunks != 3 and (values.scale.shape[3] == 1 or group_width(values) % (8 * chunks) == 0)
    return {"PIECES": 1 if is_whole else chunks, "CHUNKS": chunks if is_whole else 1}


@triton.jit
def _load_step(
    kw_ptr, ks_ptr, kz_ptr, vw_ptr, vs_ptr, vz_ptr, at, last, r, q,
    K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_ROW: tl.constexpr, K_WIDTH: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_ROW: tl.constexpr, V_WIDTH: tl.constexpr,
    V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What is stored of the tokens from `at` on; of the token `last` in place of those behind it.

    Of keys the tokens r and r + 8, of values 2 q, 2 q + 1, 2 q + 8 and 2 q + 9: words, scales, low ends.
    """
    keys = ()
    for u in tl.static_range(2):
        token = tl.minimum(8 * u + r + at, last)
        words = ()
        for j in tl.static_range((K_WIDTH + 31) // 32):
            rows = kw_ptr + token * K_ROW
            words += (piece_words(rows, 4 * j + q, 1, K_WIDTHS, K_COUNTS, 32 * j + 32 <= K_WIDTH),)
        scales = group_patterns(ks_ptr, token, K_SCALES)
        keys += ((words, scales, scales if kz_ptr is None else group_patterns(kz_ptr, token, K_SCALES)),)
    values = ()
    for u in tl.static_range(4):
        token = tl.minimum(2 * q + (8 * (u // 2) + u % 2) + at, last)
        pieces = ()
        for i in tl.static_range(PIECES):
            n = r * PIECES + i
            rows = vw_ptr + token * V_ROW
            words = piece_words(rows, n, CHUNKS, V_WIDTHS, V_COUNTS, 64 * PIECES * CHUNKS == V_WIDTH)
            group = tl.minimum(8 * CHUNKS * n // V_GROUP, V_GROUPS - 1)
            scale = tl.load(vs_ptr + token * V_GROUPS + group)
            pieces += (
                (words, scale, scale if vz_ptr is None else tl.load(vz_ptr + token * V_GROUPS + group)),
            )
        values += (pieces,)
    return keys, values


@triton.jit(do_not_specialize=["length_ptr", "capacity"])
def _fragments_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kz_ptr, kf_ptr, stride_kwb, stride_kwh, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vz_ptr, vf_ptr, stride_vwb, stride_vwh, stride_vsb, stride_vsh, stride_vfb, stride_vfh,
    capacity,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, TURN: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_PLANES: tl.constexpr,
    K_ROW: tl.constexpr, K_WIDTH: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr,
    K_FIRST: tl.constexpr, K_SCALES: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_PLANES: tl.constexpr,
    V_ROW: tl.constexpr, V_WIDTH: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_FIRST: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr,
    USE_PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head: sums for up to 16 queries, their largest logits (base 2), sums of weights."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (GROUP + 7) // 8
    BLOCKS: tl.constexpr = (K_WIDTH + 31) // 32
    EACH: tl.constexpr = BLOCKS if K_GROUPS == 1 else K_GROUP // 32
    t = tl.arange(0, 32)
    r, q = t // 4, t % 4
    share, shares = tl.program_id(0), tl.num_programs(0)
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = (tl.load(length_ptr) if LENGTH_IS_POINTER else length_ptr).to(tl.int32)
    length = tl.minimum(length, capacity)
    each = tl.cdiv(tl.cdiv(length, shares), _STEP) * _STEP
    begin = share * each
    end = tl.minimum(begin + each, length)
    last = tl.maximum(end - 1, 0)
    first = tl.load(first_ptr + text).to(tl.int32)

    kw_ptr += text * stride_kwb + head * stride_kwh
    vw_ptr += text * stride_vwb + head * stride_vwh
    ks_ptr += text * stride_ksb + head * stride_ksh
    vs_ptr += text * stride_vsb + head * stride_vsh
    if kz_ptr is not None:
        kz_ptr += text * stride_ksb + head * stride_ksh
    if vz_ptr is not None:
        vz_ptr += text * stride_vsb + head * stride_vsh
    if mask_ptr is not None:
        mask_ptr += text * stride_mb
    step = _load_step(
        kw_ptr, ks_ptr, kz_ptr, vw_ptr, vs_ptr, vz_ptr, begin, last, r, q,
        K_WIDTHS, K_COUNTS, K_ROW, K_WIDTH, K_SCALES,
        V_WIDTHS, V_COUNTS, V_ROW, V_WIDTH, V_GROUPS, V_GROUP, PIECES, CHUNKS,
    )  # fmt: skip
    k_extras = _extra_words(kf_ptr, text * stride_kfb + head * stride_kfh, q, 4, BLOCKS, 1, K_FIRST)
    v_extras = _extra_words(
        vf_ptr, text * stride_vfb + head * stride_vfh, r * PIECES, 1, PIECES, CHUNKS, V_FIRST
    )
    query_ptr += text * stride_qb + head * GROUP * stride_qh
    fragments, query_sums, bases, sums = (), (), (), ()
    zero = tl.zeros([32], tl.float32)
    for n in tl.static_range(TILES):
        row = 8 * n + r
        of_tile = query_fragments(query_ptr + row * stride_qh, row < GROUP, q, K_WIDTH, TURN, HALF, COMPILED)
        fragments += (of_tile,)
        query_sums += (group_sums(of_tile, K_GROUPS, EACH, HALF, COMPILED),)
        bases += ((zero + _LEAST, zero + _LEAST),)
        of_tile = ()
        for _ in tl.static_range(4 * PIECES * CHUNKS + 1):
            of_tile += ((zero, zero, zero, zero),)
        sums += (of_tile,)

    for at in range(begin, end, _STEP):
        keys, values = step
        step = _load_step(
            kw_ptr, ks_ptr, kz_ptr, vw_ptr, vs_ptr, vz_ptr, at + _STEP, last, r, q,
            K_WIDTHS, K_COUNTS, K_ROW, K_WIDTH, K_SCALES,
            V_WIDTHS, V_COUNTS, V_ROW, V_WIDTH, V_GROUPS, V_GROUP, PIECES, CHUNKS,
        )  # fmt: skip
        token = 2 * q + at
        logits = key_products(
            keys, k_extras, (r + at == first, r + at + 8 == first), fragments, query_sums,
            K_GROUPS, BLOCKS, EACH, K_PLANES, K_BITS, kz_ptr is not None, HALF, COMPILED,
        )  # fmt: skip
        logits = masked_logits(logits, mask_ptr, r + at, end, first, scaling, WHOLE, MASK_IS_BOOL)
        if exceed(logits, bases):
            bases, sums = raised_bases(logits, bases, sums, COMPILED)
        weights = rounded_weights(logits, bases, HALF, COMPILED)
        is_first = token == first, token + 1 == first, token + 8 == first, token + 9 == first
        sums = with_values(
            sums, weights, values, v_extras, is_first,
            PIECES, CHUNKS, V_PLANES, V_BITS, vz_ptr is not None, HALF, COMPILED,
        )  # fmt: skip

    rows = (text * tl.num_programs(1) + head) * GROUP
    for n in tl.static_range(TILES):
        for i in tl.static_range(2):
            query = 8 * n + 2 * q + i
            row = (rows + query) * shares + share
            real = query < GROUP
            tl.store(largest_ptr + row, bases[n][i], mask=real & (r == 0))
            tl.store(weight_ptr + row, sums[n][4 * PIECES * CHUNKS][i], mask=real & (r == 0))
            _store_sums(sums_ptr + row * V_WIDTH, real, r, sums[n], i, V_WIDTH)


@triton.jit
def _extra_words(
    ptr, offset, n, STRIDE: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr, COUNT: tl.constexpr
):
    """Words of the bits that the first token has more than others, of the pieces n + STRIDE i; or None."""
    if ptr is None:
        extras = None
    else:
        extras = ()
        for i in tl.static_range(PIECES):
            rows = ptr + offset + tl.zeros([32], tl.int32)
            extras += (piece_words(rows, n + STRIDE * i, CHUNKS, (1,), (COUNT,), False),)
    return extras


@triton.jit
def _store_sums(rows, real, r, sums, QUERY: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of the query 2 q + QUERY: all of a thread's columns."""
    for m in tl.static_range(0, len(sums) - 1, 2):
        even = tl.join(sums[m][QUERY], sums[m + 1][QUERY])
        odd = tl.join(sums[m][2 + QUERY], sums[m + 1][2 + QUERY])
        four = tl.reshape(tl.join(even, odd), [32, 4])
        column = (2 * (len(sums) - 1) * r + 2 * m)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(rows[:, None] + column, four, mask=real[:, None] & (column < WIDTH))
