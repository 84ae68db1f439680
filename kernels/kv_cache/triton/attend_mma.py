"""Attention of one query a text over heads in few bits, in Triton: words as matrix instructions want them.

For heads of up to 128 numbers and queries of 16 bits; attend.py does the others, with the same
formulas. A program is one warp, which takes a share of the tokens of one head, STEP at a time, for up to 16
queries at once. The words and scales of a step are in flight while the one before is computed.

    S = Q K^T    16 queries by 8 tokens: thread (r, q) has columns 32 q to 32 q + 31 of token r
    O += P V     16 queries by 8 columns, 16 tokens: thread (r, q) has columns 16 r to 16 r + 15 of tokens 2 q
                 and 2 q + 1 of the first 8 and of the others; instruction j takes columns 16 r + j

What a thread gets of S is what it gives of P. A byte beside it makes a number of a code: the bf16 128 + code,
or the fp16 1024 + code; codes of 8 bits are two numbers in bf16. What has been added is subtracted from the
logits of keys, and from the numbers of values: their sums are over all tokens of a share, and would lose what
is small beside it. Sums are fp32. P scale_v is rounded to the query's dtype, after division by the largest
scale_v so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.device.mma_fragments import multiply, side_by_side
from neuzip.kernels.kv_cache.ops import Heads
from neuzip.kernels.kv_cache.triton.mma_codes import (
    added_to_codes,
    centred_numbers,
    code_numbers,
    column_codes,
    extra_bits,
    extra_numbers,
    key_words,
    of_quad,
    query_fragments,
    value_words,
)
from neuzip.kernels.kv_cache.triton.shares import (
    LOG2_E,
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
from neuzip.kernels.quantizers import plane_widths, words

WIDEST = 128
"""Numbers of a head that a warp has registers for."""

STEP = 16
"""Tokens that a program takes at a time."""

_STEP = tl.constexpr(STEP)


def fits(query: Tensor, keys: Heads, values: Heads) -> bool:
    """Whether `attend` is made for them: numbers of 16 bits, rows of words one behind the other."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and keys.capacity > 0
        and max(keys.width, values.width) <= WIDEST
        and all(heads.words.stride()[2:] == (words(heads.width, heads.bits), 1) for heads in (keys, values))
        and all(heads.scale.stride(2) == 1 for heads in (keys, values))
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
    parts = ShareSums.empty(query, group, _shares(keys.capacity, batch * heads, query.device), values.width)
    launch(
        _fragments_kernel, (parts.shares, heads, batch),
        *parts.arrays, query.view(torch.int16), first, mask, length, LOG2_E * scaling,
        *query.stride()[:2], mask_stride(mask), *_arguments(keys), *_arguments(values), keys.capacity,
        LENGTH_IS_POINTER=isinstance(length, Tensor), MASK_IS_BOOL=is_bool(mask),
        HALF=query.dtype == torch.float16, GROUP=group,
        K_BITS=keys.bits, K_WIDTHS=plane_widths(keys.bits), K_COUNTS=plane_counts(keys), K_WIDTH=width,
        V_BITS=values.bits, V_WIDTHS=plane_widths(values.bits), V_COUNTS=plane_counts(values),
        V_WIDTH=values.width, K_ROW=keys.words.shape[3], V_ROW=values.words.shape[3],
        COMPILED=is_compiled(_fragments_kernel), num_warps=1, pdl=True, device=query.device,
    )  # fmt: skip
    return join(query, parts)


def _shares(tokens: int, programs: int, device: torch.device) -> int:
    return share_count("kv_cache.attend_mma", tokens, programs, STEP, device)


def _arguments(heads: Heads) -> tuple[Tensor | int | None, ...]:
    strides = *heads.words.stride()[:2], *heads.scale.stride()[:2]
    return heads.words, heads.scale, None, heads.first_bits, *strides, *first_bit_strides(heads)


@triton.jit
def _load_step(
    kw_ptr, ks_ptr, kl_ptr, vw_ptr, vs_ptr, vl_ptr, at, last, r, q,
    K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_ROW: tl.constexpr,
    V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_ROW: tl.constexpr,
):  # fmt: skip
    """Words of keys and of values of the tokens from `at` on, then scales and low ends; none behind `last`.

    Tokens 8 b + r for keys, for values and scales 8 b + 2 q and 8 b + 2 q + 1; b is 0 to STEP / 8 - 1.
    """
    of_keys = ()
    of_values = ()
    numbers = ()
    for b in tl.static_range(_STEP // 8):
        token = tl.minimum(8 * b + r + at, last).to(tl.int64)
        of_keys += (key_words(kw_ptr + token * K_ROW, q, K_WIDTHS, K_COUNTS),)
        pair = ()
        of_pair = ()
        for i in tl.static_range(2):
            token = tl.minimum(8 * b + 2 * q + i + at, last).to(tl.int64)
            pair += (value_words(vw_ptr + token * V_ROW, r, V_WIDTHS, V_COUNTS),)
            k_scale, v_scale = _number_at(ks_ptr, token), _number_at(vs_ptr, token)
            of_pair += ((k_scale, v_scale, _number_at(kl_ptr, token), _number_at(vl_ptr, token)),)
        of_values += (pair,)
        numbers += (of_pair,)
    return of_keys, of_values, numbers


@triton.jit
def _number_at(ptr, at):
    """A number of an array as fp32; 0 where there is no array."""
    if ptr is None:
        number = tl.zeros([32], tl.float32)
    else:
        number = widened(tl.load(ptr + at))
    return number


@triton.jit
def _products(
    of_keys, fragments, BITS: tl.constexpr, WIDTHS: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr
):
    """S of a step, of codes with something added."""
    products = ()
    for b in tl.static_range(len(of_keys)):
        product = _four_zeros()
        for g in tl.static_range(8):
            digits = code_numbers(column_codes(of_keys[b], WIDTHS, g), BITS, HALF, COMPILED)
            for d in tl.static_range(len(digits)):
                product = multiply(fragments[g], digits[d], product, 1, HALF, COMPILED)
        products += (product,)
    return products


@triton.jit
def _four_zeros():
    zero = tl.zeros([32], tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _with_first_key(products, fragments, word, row, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Add what the extra bits of the first token are worth, which is `row` tokens behind this thread's."""
    added = ()
    for b in tl.static_range(len(products)):
        product = products[b]
        for g in tl.static_range(8):
            bits = extra_bits(word, row == 8 * b, g)
            product = multiply(fragments[g], extra_numbers(bits, HALF, COMPILED), product, 1, HALF, COMPILED)
        added += (product,)
    return added


@triton.jit
def _middle(token, first, BITS: tl.constexpr, FIRST: tl.constexpr):
    """Half of the largest code: of all tokens, or another of the first."""
    half = tl.full([32], ((1 << BITS) - 1) / 2, tl.float32)
    return tl.where(token == first, half + (1 << BITS) / 2, half) if FIRST else half


@triton.jit
def _terms(
    numbers, mask_ptr, token, end, first, scaling, BITS: tl.constexpr, LOW: tl.constexpr,
    FIRST: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """How products become logits, of the tokens 2 q and 2 q + 1 of each 8: `token` is the first of a thread.

    Whether a token counts; what its product is multiplied with, what the sum of the query; what is added.
    """
    ADDED: tl.constexpr = added_to_codes(BITS, HALF)
    terms = ()
    for b in tl.static_range(len(numbers)):
        for i in tl.static_range(2):
            scale, _, low, _ = numbers[b][i]
            its = token + (8 * b + i)
            there, added = its < end, tl.zeros([32], tl.float32)
            if LOW:
                offset = (low - ADDED * scale) * scaling
            else:
                offset = -(_middle(its, first, BITS, FIRST) + ADDED) * (scale * scaling)
            if mask_ptr is not None:
                seen = tl.load(mask_ptr + its, mask=there, other=0)
                if MASK_IS_BOOL:
                    there = there & (seen != 0)
                else:
                    added = in_base_2(seen)
            terms += ((there, scale * scaling, offset, added),)
    return terms


@triton.jit
def _logits(products, terms, q_sum, ROW: tl.constexpr):
    """Logits of query r (ROW 0) or r + 8 (ROW 1), -inf for tokens that do not count."""
    logits = ()
    for n in tl.static_range(len(terms)):
        there, factor, offset, added = terms[n]
        logit = products[n // 2][2 * ROW + n % 2] * factor + (q_sum * offset + added)
        logits += (tl.where(there, logit, float("-inf")),)
    return logits


@triton.jit
def _largest_scale(numbers, token, end, unit):
    """That of all values so far."""
    for b in tl.static_range(len(numbers)):
        for i in tl.static_range(2):
            unit = tl.maximum(unit, tl.where(token + (8 * b + i) < end, numbers[b][i][1], 0.0))
    return of_quad(unit, True)


@triton.jit
def _value_weights(
    logits, numbers, state, inverse, shrink_of_unit, token, first, BITS: tl.constexpr, LOW: tl.constexpr,
    FIRST: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """What values are multiplied with, a pair of tokens for each 8; by what sums shrink; the new state.

    The state of a query is its largest logit; and of this thread's tokens the sum of weights, what is to be
    subtracted from the sums, in units, and what is to be added for the middles between lowest and highest.
    """
    CENTRE: tl.constexpr = 2.0 ** (BITS - 1)
    largest, weight, subtracted, middles = state
    now = logits[0]
    for n in tl.static_range(1, len(logits)):
        now = tl.maximum(now, logits[n])
    now = tl.maximum(largest, of_quad(now, True))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no infinity less infinity
    shrink = tl.exp2(largest - base)
    weight *= shrink
    middles *= shrink
    shrink *= shrink_of_unit
    subtracted *= shrink
    pairs = ()
    for b in tl.static_range(len(numbers)):
        p = tl.exp2(logits[2 * b] - base), tl.exp2(logits[2 * b + 1] - base)
        pair, w0, w1 = _pair_of(
            p[0] * (numbers[b][0][1] * inverse), p[1] * (numbers[b][1][1] * inverse), HALF, COMPILED
        )
        pairs += (pair,)
        weight += p[0] + p[1]
        half0 = _middle(token + 8 * b, first, BITS, FIRST)
        half1 = _middle(token + (8 * b + 1), first, BITS, FIRST)
        subtracted += w0 * (half0 - CENTRE) + w1 * (half1 - CENTRE)
        if LOW:  # of codes less half nothing cancels that was rounded
            middles += p[0] * (numbers[b][0][3] + half0 * numbers[b][0][1])
            middles += p[1] * (numbers[b][1][3] + half1 * numbers[b][1][1])
    return pairs, shrink, (now, weight, subtracted, middles)


@triton.jit
def _pair_of(first, second, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Two fp32 rounded to 16 bits, as a pair and as fp32."""
    KIND: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    first, second = rounded(first, KIND, COMPILED), rounded(second, KIND, COMPILED)
    low, high = first.to(tl.int16, bitcast=True).to(tl.int32), second.to(tl.int16, bitcast=True).to(tl.int32)
    return (low & 0xFFFF) | (high << 16), widened(first), widened(second)


@triton.jit
def _shrunk(sums, upper, lower, BESIDE: tl.constexpr):
    """Sums times a factor for query r, and one for r + 8 if there is any."""
    shrunk = ()
    for j in tl.static_range(16):
        c0, c1, c2, c3 = sums[j]
        if BESIDE == 2:
            c2, c3 = c2 * lower, c3 * lower
        shrunk += ((c0 * upper, c1 * upper, c2, c3),)
    return shrunk


@triton.jit
def _with_values(
    sums,
    upper,
    lower,
    words,
    BITS: tl.constexpr,
    WIDTHS: tl.constexpr,
    HALF: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Sums plus weights times values, of 16 tokens an instruction."""
    added = sums
    for b in tl.static_range(0, len(words), 2):
        a = upper[b], lower[b], upper[b + 1], lower[b + 1]
        before = added
        added = ()
        for g in tl.static_range(4):
            low = column_codes(words[b][0], WIDTHS, g), column_codes(words[b][1], WIDTHS, g)
            first = side_by_side(low[0], low[1], COMPILED)
            high = column_codes(words[b + 1][0], WIDTHS, g), column_codes(words[b + 1][1], WIDTHS, g)
            then = side_by_side(high[0], high[1], COMPILED)
            for two in tl.static_range(2):
                k0 = code_numbers(first[two], BITS, HALF, COMPILED)
                k8 = code_numbers(then[two], BITS, HALF, COMPILED)
                centred0 = centred_numbers(k0[0], BITS, HALF, COMPILED)
                centred8 = centred_numbers(k8[0], BITS, HALF, COMPILED)
                for i in tl.static_range(2):
                    product = before[4 * g + 2 * two + i]
                    product = multiply(a, (centred0[i], centred8[i]), product, 1, HALF, COMPILED)
                    for d in tl.static_range(1, len(k0)):
                        product = multiply(a, (k0[d][i], k8[d][i]), product, 1, HALF, COMPILED)
                    added += (product,)
    return added


@triton.jit
def _with_first_value(sums, upper, lower, word, row, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Add what the extra bits of the first token are worth, `row` tokens behind this thread's first."""
    added = sums
    for b in tl.static_range(0, len(upper), 2):
        a = upper[b], lower[b], upper[b + 1], lower[b + 1]
        before = added
        added = ()
        for g in tl.static_range(4):
            bits = extra_bits(word, row == 8 * b, g), extra_bits(word, row == 8 * b + 1, g)
            first = side_by_side(bits[0], bits[1], COMPILED)
            bits = extra_bits(word, row == 8 * b + 8, g), extra_bits(word, row == 8 * b + 9, g)
            then = side_by_side(bits[0], bits[1], COMPILED)
            for two in tl.static_range(2):
                k0, k8 = extra_numbers(first[two], HALF, COMPILED), extra_numbers(then[two], HALF, COMPILED)
                for i in tl.static_range(2):
                    added += (multiply(a, (k0[i], k8[i]), before[4 * g + 2 * two + i], 1, HALF, COMPILED),)
    return added


@triton.jit(do_not_specialize=["length_ptr", "capacity"])
def _fragments_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kl_ptr, kf_ptr, stride_kwb, stride_kwh, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vl_ptr, vf_ptr, stride_vwb, stride_vwh, stride_vsb, stride_vsh, stride_vfb, stride_vfh,
    capacity,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_WIDTH: tl.constexpr,
    K_ROW: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_WIDTH: tl.constexpr,
    V_ROW: tl.constexpr, USE_PDL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head: sums for up to 16 queries, their largest logits (base 2), sums of weights."""
    if USE_PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    BESIDE: tl.constexpr = 2 if GROUP > 8 else 1  # queries of a thread: r, or r and r + 8
    K_FIRST: tl.constexpr = kf_ptr is not None
    V_FIRST: tl.constexpr = vf_ptr is not None
    t = tl.arange(0, 32)
    r, q = t // 4, t % 4
    share, shares = tl.program_id(0), tl.num_programs(0)
    head, text = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
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
    if kl_ptr is not None:
        kl_ptr += text * stride_ksb + head * stride_ksh
    if vl_ptr is not None:
        vl_ptr += text * stride_vsb + head * stride_vsh
    if mask_ptr is not None:
        mask_ptr += text * stride_mb
    step = _load_step(
        kw_ptr, ks_ptr, kl_ptr, vw_ptr, vs_ptr, vl_ptr, begin, last, r, q,
        K_WIDTHS, K_COUNTS, K_ROW, V_WIDTHS, V_COUNTS, V_ROW,
    )  # fmt: skip
    query_ptr += text * stride_qb + head * GROUP * stride_qh
    fragments, q_sums = query_fragments(query_ptr, stride_qh, r, q, GROUP, K_WIDTH, HALF)

    zero, none = tl.zeros([32], tl.float32), tl.zeros([32], tl.int32)
    unit = zero + 2.0**-120  # less than a scale that matters, and 1 / unit is a number
    upper_state = zero - float("inf"), zero, zero, zero
    lower_state = upper_state
    lower = ()
    for _ in tl.static_range(_STEP // 8):
        lower += (none,)
    sums = ()
    for _ in tl.static_range(16):
        sums += (_four_zeros(),)
    for at in range(begin, end, _STEP):
        of_keys, of_values, numbers = step
        step = _load_step(
            kw_ptr, ks_ptr, kl_ptr, vw_ptr, vs_ptr, vl_ptr, at + _STEP, last, r, q,
            K_WIDTHS, K_COUNTS, K_ROW, V_WIDTHS, V_COUNTS, V_ROW,
        )  # fmt: skip
        token = 2 * q + at
        with_first = (first >= at) & (first < at + _STEP)
        products = _products(of_keys, fragments, K_BITS, K_WIDTHS, HALF, COMPILED)
        if K_FIRST:  # noqa: SIM102  (the compiler knows this, not what follows)
            if with_first:
                bits = kf_ptr + text * stride_kfb + head * stride_kfh + q
                word = tl.load(bits, mask=32 * q < K_WIDTH, other=0)
                products = _with_first_key(products, fragments, word, first - at - r, HALF, COMPILED)
        terms = _terms(
            numbers, mask_ptr, token, end, first, scaling, K_BITS, kl_ptr is not None, K_FIRST,
            MASK_IS_BOOL, HALF,
        )  # fmt: skip

        before = unit
        unit = _largest_scale(numbers, token, end, unit)
        inverse = 1.0 / unit
        of_unit = tl.where(unit == before, 1.0, before * inverse)
        upper, shrink, upper_state = _value_weights(
            _logits(products, terms, q_sums[0], 0), numbers, upper_state, inverse, of_unit, token, first,
            V_BITS, vl_ptr is not None, V_FIRST, HALF, COMPILED,
        )  # fmt: skip
        lower_shrink = shrink
        if BESIDE == 2:
            lower, lower_shrink, lower_state = _value_weights(
                _logits(products, terms, q_sums[1], 1), numbers, lower_state, inverse, of_unit, token,
                first, V_BITS, vl_ptr is not None, V_FIRST, HALF, COMPILED,
            )  # fmt: skip
        sums = _shrunk(sums, shrink, lower_shrink, BESIDE)
        sums = _with_values(sums, upper, lower, of_values, V_BITS, V_WIDTHS, HALF, COMPILED)
        if V_FIRST:  # noqa: SIM102
            if with_first:
                bits = vf_ptr + text * stride_vfb + head * stride_vfh + r // 2
                word = tl.load(bits, mask=r // 2 * 32 < V_WIDTH, other=0) >> (r % 2 * 4)
                sums = _with_first_value(sums, upper, lower, word, first - token, HALF, COMPILED)

    row = ((text * heads + head) * GROUP + r) * shares + share
    _store(sums_ptr, largest_ptr, weight_ptr, row, r < GROUP, q, sums, unit, upper_state, 0, V_WIDTH)
    if BESIDE == 2:
        row += 8 * shares
        _store(sums_ptr, largest_ptr, weight_ptr, row, r + 8 < GROUP, q, sums, unit, lower_state, 1, V_WIDTH)


@triton.jit
def _store(
    sums_ptr, largest_ptr, weight_ptr, row, real, q, sums, unit, state, ROW: tl.constexpr, WIDTH: tl.constexpr
):
    """What a share has of the queries r (ROW 0) or r + 8 (ROW 1): columns 32 q to 32 q + 31 of each."""
    largest, weight, subtracted, middles = state
    tl.store(largest_ptr + row, largest, mask=real & (q == 0))
    tl.store(weight_ptr + row, of_quad(weight, False), mask=real & (q == 0))
    offset = of_quad(middles, False) - of_quad(subtracted, False) * unit
    for c in tl.static_range(2):
        for j in tl.static_range(0, 16, 4):
            even = tl.join(sums[j][2 * ROW + c], sums[j + 2][2 * ROW + c])
            odd = tl.join(sums[j + 1][2 * ROW + c], sums[j + 3][2 * ROW + c])
            four = tl.reshape(tl.join(even, odd), [32, 4]) * unit[:, None] + offset[:, None]
            column = (32 * q + (16 * c + j))[:, None] + tl.arange(0, 4)[None, :]
            inside = real[:, None] & (column < WIDTH)
            tl.store(sums_ptr + row[:, None] * WIDTH + column, four, mask=inside)
