"""Attention of one query a text over heads in few bits, in Triton: words as matrix instructions want them.

For queries of 16 bits; attend.py does those of 32, and groups that matrix instructions cannot take. A program
is one warp, which takes a share of the tokens of one head, STEP at a time, for up to 16 queries at once. The
words and scales of a step are in flight while the one before is computed.

    S = K Q^T      16 tokens by 8 queries: thread (r, q) has, of the tokens r and r + 8, eight of each 32
                   columns, 32 j + 8 q to 32 j + 8 q + 7
    O += V^T P^T   16 columns by 8 queries, 16 tokens: thread (r, q) has, of the tokens 2 q, 2 q + 1, 2 q + 8
                   and 2 q + 9, the columns 64 C i + 8 C r to 64 C i + 8 C r + 8 C - 1 of each piece i of
                   64 C columns; an instruction takes two of its columns

Operands are fp16 and sums fp32. Codes are exact in fp16. Queries are brought to its range by a power of two.
Of keys, the products of a group are multiplied with its scale when they are summed, and what was added to
codes is subtracted then. Of values, the scale is multiplied into the weight of a token, which is rounded
then: nothing else is. A value is (code - 2^(bits - 1)) scale + middle, and the sum of weights times middles
is an fp32 sum of its own. Middles are few different numbers: rounded to bf16, as an earlier version did, they
have errors that do not average out over many tokens (a relative error of 7e-3 for 32,768 on an H100).

What the center of a block of keys adds to the logits is computed once a share, and where a block begins.

The base of a query is such that its weights times scales fit into fp16. It is raised only when one exceeds it
by 2^RISE, so that sums are seldom multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

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
from neuzip.kernels.kv_cache.triton.groups import block_of, group_width, turn_width
from neuzip.kernels.kv_cache.triton.mma_codes import (
    group_patterns,
    group_sums,
    piece_words,
    plane_rows,
    query_fragments,
    query_numbers,
    query_unit,
    where_counted,
)
from neuzip.kernels.kv_cache.triton.mma_steps import (
    center_logits,
    counted,
    exceed,
    key_products,
    masked_logits,
    over_rows,
    raised_bases,
    value_factors,
    weights_of,
    with_largest_scale,
    with_next_center,
    with_values,
    with_weights,
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
from neuzip.kernels.quantizers.kv_groups import SCALE_UNIT
from neuzip.kernels.tuning import launch_for

STEP = 16
"""Tokens that a program takes at a time."""

LEAST = -3.3e38
"""The base of queries before the first token: less than any logit but minus infinity."""

_STEP, _LEAST = tl.constexpr(STEP), tl.constexpr(LEAST)


def fits(query: Tensor, keys: Heads, values: Heads) -> bool:
    """Whether `attend` is made for them: numbers of 16 bits, scales in bf16, rows one behind the other.

    Groups of keys are whole multiples of 32 numbers, those of values of 64.
    """
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and keys.capacity > 0
        and all(heads.words.stride()[2:] == (words(heads.width, heads.bits), 1) for heads in (keys, values))
        and all(h.group is not None or h.scale.dtype == torch.bfloat16 for h in (keys, values))
        and (keys.scale.shape[3] == 1 or group_width(keys) % 32 == 0)
        and (values.scale.shape[3] == 1 or group_width(values) % 64 == 0)
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
    shape = {
        "width": max(width, values.width), "group": group, "rotated": keys.group is not None,
        "key_bits": keys.bits, "value_bits": values.bits,
    }  # fmt: skip
    shares = _shares(keys.capacity, batch * heads, query.device, shape)
    parts = ShareSums.empty(query, group, shares, values.width)
    stored = _with_a_step(keys), _with_a_step(values)
    numbers = [_together(heads) for heads in stored]
    launch(
        _fragments_kernel, (parts.shares, heads, batch),
        *parts.arrays, query.view(torch.int16), first, mask, length, LOG2_E * scaling,
        *query.stride()[:2], mask_stride(mask),
        *_arguments(stored[0], numbers[0]), *_arguments(stored[1], numbers[1]), keys.capacity,
        stored[0].capacity - STEP, *path_arrays(keys), *center_strides(keys), last_block(keys),
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask),
        HALF=query.dtype == torch.float16, GROUP=group, WHOLE=keys.whole, PATH=path_constants(keys),
        TURN=turn_width(keys), **_constants("K", keys), **_constants("V", values), **_pieces(values),
        K_UNIT=_scale_unit(keys), V_UNIT=_scale_unit(values),
        K_SCALES=numbers[0][0].shape[3], V_SCALES=numbers[1][0].shape[3],
        COMPILED=is_compiled(_fragments_kernel), num_warps=1,
        maxnreg=launch_for("kv_cache.attend_mma", query.device, **shape)["registers"],
        pdl=True, device=query.device,
    )  # fmt: skip
    return join(query, keys, values, first, parts, scaling=scaling, length=length, mask=mask)


def _shares(tokens: int, programs: int, device: torch.device, shape: dict[str, int]) -> int:
    return share_count("kv_cache.attend_mma", tokens, programs, STEP, device, **shape)


def _arguments(heads: Heads, numbers: tuple[Tensor, Tensor | None]) -> tuple[Tensor | int | None, ...]:
    scale, zero = numbers
    strides = *heads.words.stride()[:2], *scale.stride()[:2]
    return heads.words, scale, zero, heads.first_bits, *strides, *first_bit_strides(heads)


def _with_a_step(heads: Heads) -> Heads:
    """Heads with memory for the tokens of one step: a copy, if there is less."""
    missing = STEP - heads.capacity
    if missing <= 0:
        return heads
    return heads.tokens_changed(lambda tensor: F.pad(tensor, (0, 0, 0, missing)))


def _scale_unit(heads: Heads) -> float:
    """The number by which what the kernel makes of a stored scale has to be multiplied."""
    return 1.0 if heads.zero is None else SCALE_UNIT


def _together(heads: Heads) -> tuple[Tensor, Tensor | None]:
    """The bits of scales and zero points, those of 4 or 2 groups in one integer where that is possible."""
    if heads.zero is None:
        return heads.scale.view(torch.int16), None
    arrays = heads.scale, heads.zero
    places = [x for array in arrays for x in (*array.stride()[:2], array.shape[3], array.storage_offset())]
    for dtype in (torch.int32, torch.int16):
        if all(place % dtype.itemsize == 0 for place in places):
            return heads.scale.view(dtype), heads.zero.view(dtype)
    return arrays


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
    """How many pieces of 64 CHUNKS columns a value has, each within a group."""
    each = values.width if values.scale.shape[3] == 1 else min(values.width, group_width(values))
    chunks = {1: 1, 2: 2, 3: 1, 4: 4}[-(-each // 64)]
    return {"PIECES": -(-values.width // (64 * chunks)), "CHUNKS": chunks}


@triton.jit
def _load_keys(
    rows, scale_rows, zero_rows, at, q,
    WIDTHS: tl.constexpr, COUNTS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Keys of the tokens r and r + 8 behind `at`: words, scales and zero points.

    `rows`, here and below, are where a thread's numbers of the first token begin.
    """
    keys = ()
    for u in tl.static_range(2):
        offset = at.to(tl.int64) * ROW + 8 * u * ROW
        words = ()
        for j in tl.static_range((WIDTH + 31) // 32):
            words += (piece_words(rows, offset, q, 4 * j, 1, WIDTHS, COUNTS, 32 * j + 32 <= WIDTH),)
        scales, zeros = _load_factors(scale_rows, zero_rows, at, u, SCALES)
        keys += ((words, scales, zeros),)
    return keys


@triton.jit
def _load_factors(scale_rows, zero_rows, at, U: tl.constexpr, SCALES: tl.constexpr):
    """Scales and zero points, the same where there are none, of the tokens r + 8 U behind `at`."""
    offset = at.to(tl.int64) * SCALES + 8 * U * SCALES
    scales = group_patterns(scale_rows, offset, SCALES)
    return scales, scales if zero_rows is None else group_patterns(zero_rows, offset, SCALES)


@triton.jit
def _load_values(
    rows, at, r,
    WIDTHS: tl.constexpr, COUNTS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Words of values of the tokens 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 behind `at`."""
    values = ()
    for u in tl.static_range(4):
        offset = at.to(tl.int64) * ROW + (8 * (u // 2) + u % 2) * ROW
        pieces = ()
        for i in tl.static_range(PIECES):
            full = 64 * CHUNKS * i + 64 * CHUNKS <= WIDTH
            pieces += (piece_words(rows, offset, r, 8 * i, CHUNKS, WIDTHS, COUNTS, full),)
        values += (pieces,)
    return values


@triton.jit(do_not_specialize=["length_ptr", "capacity", "last_step", "last_block"])
def _fragments_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kz_ptr, kf_ptr, stride_kwb, stride_kwh, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vz_ptr, vf_ptr, stride_vwb, stride_vwh, stride_vsb, stride_vsh, stride_vfb, stride_vfh,
    capacity, last_step, center_ptr, table_ptr, stride_cb, stride_ch, last_block,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, PATH: tl.constexpr, TURN: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_PLANES: tl.constexpr,
    K_ROW: tl.constexpr, K_WIDTH: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr,
    K_FIRST: tl.constexpr, K_SCALES: tl.constexpr, K_UNIT: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_PLANES: tl.constexpr,
    V_ROW: tl.constexpr, V_WIDTH: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_FIRST: tl.constexpr, V_SCALES: tl.constexpr, V_UNIT: tl.constexpr,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr,
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
    first = tl.load(first_ptr + text).to(tl.int32)

    k_rows = plane_rows(kw_ptr + text * stride_kwb + head * stride_kwh + r * K_ROW, q, 1, K_WIDTHS, K_COUNTS)
    v_rows = plane_rows(
        vw_ptr + text * stride_vwb + head * stride_vwh + 2 * q * V_ROW, r, CHUNKS, V_WIDTHS, V_COUNTS
    )
    ks_rows = ks_ptr + text * stride_ksb + head * stride_ksh + r * K_SCALES
    vs_rows = vs_ptr + text * stride_vsb + head * stride_vsh + r * V_SCALES
    kz_rows = None if kz_ptr is None else kz_ptr + text * stride_ksb + head * stride_ksh + r * K_SCALES
    vz_rows = None if vz_ptr is None else vz_ptr + text * stride_vsb + head * stride_vsh + r * V_SCALES
    if mask_ptr is not None:
        mask_ptr += text * stride_mb
    # A step that memory does not hold whole begins earlier; its first tokens do not count again.
    at = tl.minimum(begin, last_step)
    keys = _load_keys(k_rows, ks_rows, kz_rows, at, q, K_WIDTHS, K_COUNTS, K_ROW, K_WIDTH, K_SCALES)
    values = _load_values(v_rows, at, r, V_WIDTHS, V_COUNTS, V_ROW, V_WIDTH, PIECES, CHUNKS)
    factors = (
        _load_factors(vs_rows, vz_rows, at, 0, V_SCALES), _load_factors(vs_rows, vz_rows, at, 1, V_SCALES),
    )  # fmt: skip
    k_extras = _extra_words(kf_ptr, text * stride_kfb + head * stride_kfh, q, 4, BLOCKS, 1, K_FIRST)
    v_extras = _extra_words(vf_ptr, text * stride_vfb + head * stride_vfh, r, 8, PIECES, CHUNKS, V_FIRST)
    query_ptr += text * stride_qb + head * GROUP * stride_qh
    queries, fragments, query_sums, bases, sums, weight_sums = (), (), (), (), (), ()
    zero = tl.zeros([32], tl.float32)
    for n in tl.static_range(TILES):
        row = 8 * n + r
        queries += (
            query_numbers(query_ptr + row * stride_qh, row < GROUP, q, K_WIDTH, TURN, HALF, COMPILED),
        )
    unit, inverse = query_unit(queries)
    product_scaling = scaling * K_UNIT * inverse
    for n in tl.static_range(TILES):
        of_tile = query_fragments(queries[n], unit, COMPILED)
        fragments += (of_tile,)
        query_sums += (group_sums(of_tile, K_GROUPS, EACH, COMPILED),)
        bases += ((zero + _LEAST, zero + _LEAST),)
        of_tile = ()
        for _ in tl.static_range(4 * PIECES * CHUNKS):
            of_tile += ((zero, zero, zero, zero),)
        sums += (of_tile,)
        of_tile = ((zero, zero),)
        for _ in tl.static_range(V_GROUPS):
            of_tile += ((zero, zero),)
        weight_sums += (of_tile,)

    centers = ()
    if center_ptr is not None:
        center_ptr += text * stride_cb + head * stride_ch
        block = block_of(begin - first, PATH)
        next_block = first + (block + 1) * PATH[0]
        centers = center_logits(
            query_ptr, stride_qh, center_ptr, table_ptr, block, last_block, scaling,
            GROUP, K_WIDTH, HALF, PATH,
        )  # fmt: skip

    for begin_of_step in range(begin, end, _STEP):
        counts = counted(r + at, begin_of_step, end, first, WHOLE)
        is_first = r + at == first, r + at + 8 == first
        logits = key_products(
            keys, k_extras, is_first, fragments, query_sums,
            K_GROUPS, BLOCKS, EACH, K_PLANES, K_BITS, kz_ptr is not None, COMPILED,
        )  # fmt: skip
        logits = masked_logits(logits, centers, mask_ptr, r + at, counts, product_scaling, MASK_IS_BOOL)
        if center_ptr is not None:  # noqa: SIM102  (the compiler knows this, not what follows)
            if begin_of_step + (_STEP - 1) >= next_block:  # it begins within this step, or with it
                block += 1
                its_centers = center_logits(
                    query_ptr, stride_qh, center_ptr, table_ptr, block, last_block, scaling,
                    GROUP, K_WIDTH, HALF, PATH,
                )  # fmt: skip
                logits = with_next_center(logits, centers, its_centers, r + at, next_block)
                centers = its_centers
                next_block += PATH[0]
        after = tl.minimum(begin_of_step + _STEP, last_step)
        keys = _load_keys(k_rows, ks_rows, kz_rows, after, q, K_WIDTHS, K_COUNTS, K_ROW, K_WIDTH, K_SCALES)
        scales = where_counted(factors[0][0], counts[0]), where_counted(factors[1][0], counts[1])
        scales = value_factors(
            scales, (factors[0][1], factors[1][1]), is_first,
            V_GROUPS, V_BITS, vz_ptr is not None, vf_ptr is not None, COMPILED,
        )  # fmt: skip
        factors = (
            _load_factors(vs_rows, vz_rows, after, 0, V_SCALES),
            _load_factors(vs_rows, vz_rows, after, 1, V_SCALES),
        )
        scaled = with_largest_scale(logits, scales)
        if exceed(scaled, bases):
            bases, sums, weight_sums = raised_bases(scaled, bases, sums, weight_sums, COMPILED)
        weights = weights_of(logits, bases)
        weight_sums = with_weights(weight_sums, weights, scales)
        token = 2 * q + at
        is_first = token == first, token + 1 == first, token + 8 == first, token + 9 == first
        sums = with_values(
            sums, weights, scales, values, v_extras, is_first,
            PIECES, CHUNKS, V_GROUP, V_PLANES, V_BITS, COMPILED,
        )  # fmt: skip
        values = _load_values(v_rows, after, r, V_WIDTHS, V_COUNTS, V_ROW, V_WIDTH, PIECES, CHUNKS)
        at = after

    rows = (text * tl.num_programs(1) + head) * GROUP
    for n in tl.static_range(TILES):
        for i in tl.static_range(2):
            query = 8 * n + 2 * q + i
            row = (rows + query) * shares + share
            real = query < GROUP
            tl.store(largest_ptr + row, bases[n][i], mask=real & (r == 0))
            tl.store(weight_ptr + row, over_rows(weight_sums[n][0][i], COMPILED), mask=real & (r == 0))
            _store_sums(
                sums_ptr + row * V_WIDTH, real, r, sums[n], weight_sums[n], i,
                PIECES, CHUNKS, V_GROUP, V_WIDTH, V_UNIT, COMPILED,
            )  # fmt: skip


@triton.jit
def _extra_words(
    ptr, offset, n, STRIDE: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr, COUNT: tl.constexpr
):
    """Words of the bits that the first token has more than others, of the pieces n + STRIDE i; or None."""
    if ptr is None:
        extras = None
    else:
        extras = ()
        rows = plane_rows(ptr + tl.zeros([32], tl.int32), n, CHUNKS, (1,), (COUNT,))
        for i in tl.static_range(PIECES):
            extras += (piece_words(rows, offset, n, STRIDE * i, CHUNKS, (1,), (COUNT,), False),)
    return extras


@triton.jit
def _store_sums(
    rows, real, r, sums, weight_sums, QUERY: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Sums of the query 2 q + QUERY, all of a thread's columns: those of codes and those of middles."""
    for i in tl.static_range(PIECES):
        middles = over_rows(weight_sums[1 + 64 * CHUNKS * i // GROUP][QUERY], COMPILED)
        for m in tl.static_range(4 * CHUNKS * i, 4 * CHUNKS * (i + 1), 2):
            even = tl.join(sums[m][QUERY], sums[m + 1][QUERY])
            odd = tl.join(sums[m][2 + QUERY], sums[m + 1][2 + QUERY])
            four = tl.reshape(tl.join(even, odd), [32, 4])
            column = (8 * CHUNKS * (8 * i + r) + 2 * (m - 4 * CHUNKS * i))[:, None] + tl.arange(0, 4)[None, :]
            total = (four + middles[:, None]) * UNIT
            tl.store(rows[:, None] + column, total, mask=real[:, None] & (column < WIDTH))
