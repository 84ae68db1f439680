"""What attention does with a step of 16 tokens by matrix instructions, in Triton: see attend_mma.py.

A warp works on arrays [32], an element a thread. A tile is 8 queries. What a tile has of the tokens r and
r + 8 and the queries 2 q and 2 q + 1 is four arrays, as an instruction leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import exchanged, multiply, pair_of, side_by_side, transposed, twice
from neuzip.kernels.kv_cache.triton.mma_codes import (
    added_to_codes,
    code_numbers,
    code_offset,
    column_codes,
    group_scale,
    scale_pairs,
    scaled_numbers,
)
from neuzip.kernels.kv_cache.triton.shares import in_base_2

RISE = 8.0
"""By how much, in base 2, a logit exceeds its query's base before that is raised."""

_RISE = tl.constexpr(RISE)


@triton.constexpr_function
def _lesser(one, other):
    """The lesser of two constants."""
    return min(one, other)


@triton.jit
def _with_extra(planes, extra, is_first):
    """Words of a piece, and before them the extra bits of the first token, which others have not."""
    if extra is None:
        all_planes = planes
    else:
        all_planes = ((tl.where(is_first, extra[0][0], 0),),)
        all_planes += planes
    return all_planes


@triton.jit
def key_products(
    keys, extras, is_first, fragments, query_sums,
    GROUPS: tl.constexpr, BLOCKS: tl.constexpr, EACH: tl.constexpr, PLANES: tl.constexpr,
    BITS: tl.constexpr, GROUPED: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Query times key for each tile."""
    HAS_EXTRA: tl.constexpr = extras is not None
    ADDED: tl.constexpr = added_to_codes(BITS + HAS_EXTRA, HALF)
    zero = tl.zeros([32], tl.float32)
    sums = ()
    for _ in tl.static_range(len(fragments)):
        sums += ((zero, zero, zero, zero),)
    for g in tl.static_range(GROUPS):
        products = ()
        for _ in tl.static_range(len(fragments)):
            products += ((zero, zero, zero, zero),)
        for j in tl.static_range(g * EACH, _lesser(g * EACH + EACH, BLOCKS)):
            extra = extras[j] if HAS_EXTRA else None
            upper = _with_extra(keys[0][0][j], extra, is_first[0])
            lower = _with_extra(keys[1][0][j], extra, is_first[1])
            for h in tl.static_range(2):
                a = code_numbers(column_codes(upper, PLANES, h), BITS + HAS_EXTRA, HALF, COMPILED)
                b = code_numbers(column_codes(lower, PLANES, h), BITS + HAS_EXTRA, HALF, COMPILED)
                before = products
                products = ()
                for n in tl.static_range(len(fragments)):
                    fragment = fragments[n][2 * j + h]
                    tokens = a[0], b[0], a[1], b[1]
                    products += (multiply(tokens, fragment, before[n], 1, HALF, COMPILED),)
        scales = ()
        offsets = ()
        for u in tl.static_range(2):
            scale = group_scale(keys[u][1], g, GROUPED, COMPILED)
            offset = code_offset(keys[u][2], is_first[u], g, -ADDED, GROUPED, BITS, HAS_EXTRA, COMPILED)
            scales += (scale,)
            offsets += (offset * scale,)
        before = sums
        sums = ()
        for n in tl.static_range(len(fragments)):
            quad = ()
            for i in tl.static_range(4):
                product = products[n][i] * scales[i // 2]
                quad += (before[n][i] + product + offsets[i // 2] * query_sums[n][g][i % 2],)
            sums += (quad,)
    return sums


@triton.jit
def exceed(logits, bases):
    """Whether a logit of a query exceeds its base by RISE."""
    farthest = tl.full([32], 0, tl.float32)
    for n in tl.static_range(len(logits)):
        for i in tl.static_range(2):
            farthest = tl.maximum(farthest, tl.maximum(logits[n][i], logits[n][2 + i]) - bases[n][i])
    return tl.max((farthest > _RISE).to(tl.int32), 0) > 0


@triton.jit
def raised_bases(logits, bases, sums, COMPILED: tl.constexpr):
    """Bases that are the largest logits so far, and sums that have these for a unit."""
    raised = ()
    shrunk = ()
    for n in tl.static_range(len(logits)):
        of_queries = ()
        factors = ()
        for i in tl.static_range(2):
            largest = tl.maximum(logits[n][i], logits[n][2 + i])
            for level in tl.static_range(2, 5):
                largest = tl.maximum(largest, exchanged(largest, 1 << level, COMPILED))
            largest = tl.maximum(largest, bases[n][i])
            of_queries += (largest,)
            factors += (tl.exp2(bases[n][i] - largest),)
        raised += (of_queries,)
        tile = ()
        for m in tl.static_range(len(sums[n])):
            c0, c1, c2, c3 = sums[n][m]
            tile += ((c0 * factors[0], c1 * factors[1], c2 * factors[0], c3 * factors[1]),)  # type: ignore[misc]
        shrunk += (tile,)
    return raised, shrunk


@triton.jit
def rounded_weights(logits, bases, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """P^T of each tile, as B."""
    pairs = ()
    for n in tl.static_range(len(logits)):
        p0, p1 = tl.exp2(logits[n][0] - bases[n][0]), tl.exp2(logits[n][1] - bases[n][1])
        p2, p3 = tl.exp2(logits[n][2] - bases[n][0]), tl.exp2(logits[n][3] - bases[n][1])
        upper, lower = pair_of(p0, p1, HALF, COMPILED), pair_of(p2, p3, HALF, COMPILED)
        pairs += ((transposed(upper, COMPILED), transposed(lower, COMPILED)),)
    return pairs


@triton.jit
def with_values(
    sums, weights, values, extras, is_first,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, PLANES: tl.constexpr, BITS: tl.constexpr,
    GROUPED: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Sums of all tiles plus weights times values of 16 tokens: an instruction for two columns of a thread.

    The last sum is that of the weights themselves, rounded as they are.
    """
    HAS_EXTRA: tl.constexpr = extras is not None
    CODE_BITS: tl.constexpr = BITS + HAS_EXTRA
    CENTRE: tl.constexpr = 2.0 ** (BITS - 1)
    one = twice(tl.full([32], 1, tl.float32), HALF)
    added = _with_product(sums, (one, one, one, one), weights, 4 * PIECES * CHUNKS, HALF, COMPILED)
    for i in tl.static_range(PIECES):
        extra = extras[i] if HAS_EXTRA else None
        planes = ()
        factors = ()
        for u in tl.static_range(0, 4, 2):
            scales = ()
            offsets = ()
            for one in tl.static_range(u, u + 2):
                planes += (_with_extra(values[one][i][0], extra, is_first[one]),)
                scale, zero = (values[one][i][1],), (values[one][i][2],)
                scales += (group_scale(scale, 0, GROUPED, COMPILED),)
                offsets += (code_offset(zero, is_first[one], 0, CENTRE, GROUPED, BITS, HAS_EXTRA, COMPILED),)
            factors += (scale_pairs(scales, offsets, BITS, HALF, COMPILED),)
        for g in tl.static_range(2 * CHUNKS):
            codes = ()
            for u in tl.static_range(0, 4, 2):
                one, other = column_codes(planes[u], PLANES, g), column_codes(planes[u + 1], PLANES, g)
                codes += (side_by_side(one, other, COMPILED),)
            for two in tl.static_range(2):
                operands = ()
                for u in tl.static_range(2):
                    numbers = code_numbers(codes[u][two], CODE_BITS, HALF, COMPILED)
                    scale, middle = factors[u]
                    operands += (scaled_numbers(numbers, scale, middle, BITS, CODE_BITS, HALF, COMPILED),)
                a = operands[0][0], operands[0][1], operands[1][0], operands[1][1]  # type: ignore[misc]
                added = _with_product(added, a, weights, 4 * CHUNKS * i + 2 * g + two, HALF, COMPILED)
    return added


@triton.jit
def _with_product(sums, a, weights, M: tl.constexpr, HALF: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of all tiles, those of instruction M plus its product."""
    added = ()
    for n in tl.static_range(len(sums)):
        tile = ()
        for m in tl.static_range(len(sums[n])):
            tile += ((multiply(a, weights[n], sums[n][m], 1, HALF, COMPILED) if m == M else sums[n][m]),)
        added += (tile,)
    return added


@triton.jit
def masked_logits(
    products, mask_ptr, token, end, first, scaling, WHOLE: tl.constexpr, MASK_IS_BOOL: tl.constexpr
):
    """Logits in base 2 of the tokens `token` and 8 behind it: minus infinity if they do not count here."""
    logits = ()
    there = ()
    added = ()
    for u in tl.static_range(2):
        its = token + 8 * u
        counts = its < end
        if WHOLE > 0:
            counts = counts & ((its < first) | (its >= first + WHOLE))
        more = tl.zeros([32], tl.float32)
        if mask_ptr is not None:
            seen = tl.load(mask_ptr + its, mask=counts, other=0)
            if MASK_IS_BOOL:
                counts = counts & (seen != 0)
            else:
                more = in_base_2(seen)
        there += (counts,)
        added += (more,)
    for n in tl.static_range(len(products)):
        quad = ()
        for i in tl.static_range(4):
            logit = products[n][i] * scaling + added[i // 2]
            quad += (tl.where(there[i // 2], logit, float("-inf")),)
        logits += (quad,)
    return logits
