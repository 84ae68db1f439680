"""What attention does with a step of 16 tokens by matrix instructions, in Triton: see attend_mma.py.

A warp works on arrays [32], an element a thread. A tile is 8 queries. What a tile has of the tokens r and
r + 8 and the queries 2 q and 2 q + 1 is four arrays, as an instruction leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.device.mma_fragments import exchanged, float_of, multiply, pair_of, transposed
from neuzip.kernels.kv_cache.triton.groups import loaded_center, power_of_two
from neuzip.kernels.kv_cache.triton.mma_codes import (
    code_offset,
    group_scale,
    key_numbers,
    value_numbers,
    words_of_two,
)
from neuzip.kernels.kv_cache.triton.shares import in_base_2

RISE = 8.0
"""By how much, in base 2, a weight times a scale may exceed 2^7 before the base of its query is raised."""

START = 7.0
"""The binary exponent of the largest weight times scale when a base has been raised.

An fp16 ends at 2^16, and has all its bits down to 2^-14.
"""

LEAST_SCALE = 2.0**-60
"""Scales below count as this one when bases are raised: or weights of values that are 0 had no bound."""

_RISE, _START, _LEAST_SCALE = tl.constexpr(RISE), tl.constexpr(START), tl.constexpr(LEAST_SCALE)


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
    BITS: tl.constexpr, GROUPED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Query times key for each tile, in the unit of the fragments and of `group_scale`."""
    HAS_EXTRA: tl.constexpr = extras is not None
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
                a = key_numbers(upper, PLANES, h, COMPILED)
                b = key_numbers(lower, PLANES, h, COMPILED)
                before = products
                products = ()
                for n in tl.static_range(len(fragments)):
                    fragment = fragments[n][2 * j + h]
                    tokens = a[0], b[0], a[1], b[1]
                    products += (multiply(tokens, fragment, before[n], 1, True, COMPILED),)
        scales = ()
        offsets = ()
        for u in tl.static_range(2):
            scales += (group_scale(keys[u][1], g, GROUPED),)
            offsets += (code_offset(keys[u][2], is_first[u], g, -1024.0, GROUPED, BITS, HAS_EXTRA, COMPILED),)
        before = sums
        sums = ()
        for n in tl.static_range(len(fragments)):
            quad = ()
            for i in tl.static_range(4):
                product = products[n][i] + offsets[i // 2] * query_sums[n][g][i % 2]
                quad += (before[n][i] + product * scales[i // 2],)
            sums += (quad,)
    return sums


@triton.jit
def value_factors(
    scales, zeros, is_first, GROUPS: tl.constexpr, BITS: tl.constexpr, GROUPED: tl.constexpr,
    HAS_EXTRA: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Scale, and what code 2^(BITS - 1) stands for, of each group of the values of the tokens r and r + 8."""
    factors = ()
    for u in tl.static_range(2):
        of_token = ()
        for g in tl.static_range(GROUPS):
            scale = group_scale(scales[u], g, GROUPED)
            offset = code_offset(
                zeros[u], is_first[u], g, 2.0 ** (BITS - 1), GROUPED, BITS, HAS_EXTRA, COMPILED
            )
            of_token += ((scale, offset * scale),)
        factors += (of_token,)
    return factors


@triton.jit
def with_largest_scale(logits, factors):
    """Logits in base 2 plus the logarithm, not exact, of a token's largest scale."""
    logarithms = ()
    for u in tl.static_range(2):
        largest = tl.maximum(factors[u][0][0], _LEAST_SCALE)
        for g in tl.static_range(1, len(factors[u])):
            largest = tl.maximum(largest, factors[u][g][0])
        # Bits of an fp32 as an integer are its logarithm but for 0.09.
        logarithms += (largest.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0,)
    scaled = ()
    for n in tl.static_range(len(logits)):
        quad = ()
        for i in tl.static_range(4):
            quad += (logits[n][i] + logarithms[i // 2],)
        scaled += (quad,)
    return scaled


@triton.jit
def exceed(scaled, bases):
    """Whether a weight of a query times its scale would exceed 2^(START + RISE)."""
    farthest = tl.full([32], 0, tl.float32)
    for n in tl.static_range(len(scaled)):
        for i in tl.static_range(2):
            farthest = tl.maximum(farthest, tl.maximum(scaled[n][i], scaled[n][2 + i]) - bases[n][i])
    return tl.max((farthest > _START + _RISE).to(tl.int32), 0) > 0


@triton.jit
def raised_bases(scaled, bases, sums, weights, COMPILED: tl.constexpr):
    """Bases that leave weights times scales of up to 2^START, and sums that have these for a unit."""
    raised = ()
    shrunk = ()
    shrunk_weights = ()
    for n in tl.static_range(len(scaled)):
        of_queries = ()
        factors = ()
        for i in tl.static_range(2):
            largest = tl.maximum(scaled[n][i], scaled[n][2 + i])
            for level in tl.static_range(2, 5):
                largest = tl.maximum(largest, exchanged(largest, 1 << level, COMPILED))
            largest = tl.maximum(largest - _START, bases[n][i])
            of_queries += (largest,)
            factors += (tl.exp2(bases[n][i] - largest),)
        raised += (of_queries,)
        tile = ()
        for m in tl.static_range(len(sums[n])):
            c0, c1, c2, c3 = sums[n][m]
            tile += ((c0 * factors[0], c1 * factors[1], c2 * factors[0], c3 * factors[1]),)  # type: ignore[misc]
        shrunk += (tile,)
        two = ()
        for g in tl.static_range(len(weights[n])):
            two += ((weights[n][g][0] * factors[0], weights[n][g][1] * factors[1]),)  # type: ignore[misc]
        shrunk_weights += (two,)
    return raised, shrunk, shrunk_weights


@triton.jit
def weights_of(logits, bases):
    """Weights P of the tokens r and r + 8, fp32."""
    weights = ()
    for n in tl.static_range(len(logits)):
        quad = ()
        for i in tl.static_range(4):
            quad += (tl.exp2(logits[n][i] - bases[n][i % 2]),)
        weights += (quad,)
    return weights


@triton.jit
def with_weights(sums, weights, factors):
    """Sums of weights of each query, and of weights times the middle of each group, plus those of a step.

    fp32, never rounded to 16 bits: an error that all columns of a group share does not average out.
    """
    added = ()
    for n in tl.static_range(len(weights)):
        p0, p1, p2, p3 = weights[n]
        two = ((sums[n][0][0] + (p0 + p2), sums[n][0][1] + (p1 + p3)),)
        for g in tl.static_range(len(factors[0])):
            upper, lower = factors[0][g][1], factors[1][g][1]
            even = sums[n][1 + g][0] + p0 * upper + p2 * lower
            two += ((even, sums[n][1 + g][1] + p1 * upper + p3 * lower),)
        added += (two,)
    return added


@triton.jit
def scaled_weights(weights, factors, G: tl.constexpr, COMPILED: tl.constexpr):
    """P^T of each tile times the scales of group G, rounded to fp16, as B."""
    upper, lower = factors[0][G][0], factors[1][G][0]
    pairs = ()
    for n in tl.static_range(len(weights)):
        p0, p1, p2, p3 = weights[n]
        one = pair_of(p0 * upper, p1 * upper, True, COMPILED)
        other = pair_of(p2 * lower, p3 * lower, True, COMPILED)
        pairs += ((transposed(one, COMPILED), transposed(other, COMPILED)),)
    return pairs


@triton.jit
def with_values(
    sums, weights, factors, values, extras, is_first,
    PIECES: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr,
    BITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Sums of all tiles plus weights times values of 16 tokens, an instruction for two columns a thread."""
    HAS_EXTRA: tl.constexpr = extras is not None
    CENTRE: tl.constexpr = 2.0 ** (BITS - 1)
    added = sums
    scaled = scaled_weights(weights, factors, 0, COMPILED)
    for i in tl.static_range(PIECES):
        if i > 0 and 64 * CHUNKS * i % GROUP == 0:
            scaled = scaled_weights(weights, factors, 64 * CHUNKS * i // GROUP, COMPILED)
        extra = extras[i] if HAS_EXTRA else None
        planes = ()
        for u in tl.static_range(4):
            planes += (_with_extra(values[u][i], extra, is_first[u]),)
        upper = words_of_two(planes[0], planes[1], COMPILED)  # type: ignore[misc]
        lower = words_of_two(planes[2], planes[3], COMPILED)  # type: ignore[misc]
        for g in tl.static_range(2 * CHUNKS):
            for two in tl.static_range(2):
                one = value_numbers(upper[two], PLANES, g, CENTRE, COMPILED)
                other = value_numbers(lower[two], PLANES, g, CENTRE, COMPILED)
                a = one[0], one[1], other[0], other[1]
                added = _with_product(added, a, scaled, 4 * CHUNKS * i + 2 * g + two, COMPILED)
    return added


@triton.jit
def _with_product(sums, a, weights, M: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of all tiles, those of instruction M plus its product."""
    added = ()
    for n in tl.static_range(len(sums)):
        tile = ()
        for m in tl.static_range(len(sums[n])):
            tile += ((multiply(a, weights[n], sums[n][m], 1, True, COMPILED) if m == M else sums[n][m]),)
        added += (tile,)
    return added


@triton.jit
def over_rows(number, COMPILED: tl.constexpr):
    """The sum over all r of what threads (r, q) have."""
    total = number
    for level in tl.static_range(2, 5):
        total += exchanged(total, 1 << level, COMPILED)
    return total


@triton.jit
def counted(token, begin, end, first, WHOLE: tl.constexpr):
    """Which of the tokens `token` and 8 behind it lie in begin to end - 1, and are not kept whole."""
    counts = ()
    for u in tl.static_range(2):
        # A negative number, unsigned, is larger than any other.
        inside = (token + 8 * u - begin).to(tl.uint32) < (end - begin).to(tl.uint32)
        if WHOLE > 0:
            inside = inside & ((token + 8 * u - first).to(tl.uint32) >= WHOLE)
        counts += (inside,)
    return counts


@triton.jit
def center_logits(
    query_ptr, stride_qh, center_ptr, table_ptr, block, last_block, scaling,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """What the center of a block adds to logits of its tokens, for the queries 2 q and 2 q + 1 of each tile.

    0 before the first block. Sums are fp32, of queries as they are given.
    """
    TILES: tl.constexpr = (GROUP + 7) // 8
    row, columns = tl.arange(0, 8 * TILES), tl.arange(0, power_of_two(WIDTH))
    real = columns < WIDTH
    patterns = tl.load(
        query_ptr + row[:, None] * stride_qh + columns[None, :],
        mask=(row < GROUP)[:, None] & real[None, :], other=0,
    )  # fmt: skip
    center = loaded_center(center_ptr, table_ptr, block, last_block, columns, real, WIDTH, PATH)
    products = float_of(patterns.to(tl.int32), HALF) * center[None, :]
    total = tl.where(block >= 0, tl.sum(products, 1) * scaling, 0.0)
    tiles = ()
    if TILES == 1:
        tiles += (_of_threads(total),)
    else:
        one, other = tl.split(tl.trans(tl.reshape(total, [2, 8])))
        tiles += (_of_threads(one), _of_threads(other))
    return tiles


@triton.jit
def _of_threads(numbers):
    """Numbers [8], one for each query, spread: those of the queries 2 q and of 2 q + 1, arrays [32]."""
    even, odd = tl.split(tl.reshape(numbers, [4, 2]))
    spread = ()
    for n in tl.static_range(2):
        its = even if n == 0 else odd
        spread += (tl.reshape(tl.broadcast_to(its[None, :], [8, 4]), [32]),)
    return spread


@triton.jit
def with_next_center(logits, centers, after, token, begin):
    """Logits, of which the tokens from `begin` on have the center logits `after` in place of `centers`.

    `token` is the first of a step.
    """
    changed = ()
    for n in tl.static_range(len(logits)):
        quad = ()
        for i in tl.static_range(4):
            more = after[n][i % 2] - centers[n][i % 2]
            quad += (logits[n][i] + tl.where(token + 8 * (i // 2) >= begin, more, 0.0),)
        changed += (quad,)
    return changed


@triton.jit
def masked_logits(products, centers, mask_ptr, token, counts, scaling, MASK_IS_BOOL: tl.constexpr):
    """Logits in base 2 of the tokens `token` and 8 behind it: minus infinity if they do not count.

    `centers` has what the center of keys adds, for the queries of each tile, or is empty.
    """
    logits = ()
    there = ()
    added = ()
    for u in tl.static_range(2):
        visible = counts[u]
        more = tl.zeros([32], tl.float32)
        if mask_ptr is not None:
            seen = tl.load(mask_ptr + token + 8 * u, mask=counts[u], other=0)
            if MASK_IS_BOOL:
                visible = visible & (seen != 0)
            else:
                more = in_base_2(seen)
        there += (visible,)
        added += (more,)
    for n in tl.static_range(len(products)):
        quad = ()
        for i in tl.static_range(4):
            more = added[i // 2]
            if len(centers) > 0:
                more = centers[n][i % 2] if mask_ptr is None else centers[n][i % 2] + more
            logit = products[n][i] * scaling + more
            quad += (tl.where(there[i // 2], logit, float("-inf")),)
        logits += (quad,)
    return logits
