"""Attention of one query a text over heads in few bits, in Triton: words as matrix instructions want them.

For heads of up to 128 numbers and queries of 16 bits; `triton_attend` does the others, with the same
formulas. A program is one warp, which takes a share of the tokens of one head, STEP at a time, for up to 16
queries at once. The words and scales of a step are on their way while the one before is computed.

    S = Q K^T    16 queries by 8 tokens: thread (r, q) has columns 32 q to 32 q + 31 of token r
    O += P V     16 queries by 8 columns, 16 tokens: thread (r, q) has columns 16 r to 16 r + 15 of tokens 2 q
                 and 2 q + 1 of the first 8 and of the others; instruction j takes columns 16 r + j

What a thread gets of S is what it gives of P. A byte beside it makes a number of a code: the bf16 128 + code,
or the fp16 1024 + code; codes of 8 bits are two numbers in bf16. What has been added is taken off the logits
of keys, and off the numbers of values: their sums are over all tokens of a share, and would lose what is
small beside it. Sums are fp32. P scale_v is rounded to the query's dtype, after division by the largest
scale_v so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.device.mma_fragments import float_of, less, multiply, side_by_side
from neuzip.kernels.device.properties import early_launches, multiprocessors
from neuzip.kernels.kv_cache.ops import EXTRA_BIT, Heads
from neuzip.kernels.kv_cache.triton.attend import LOG2_E, in_base_2, join, queries_of_a_head
from neuzip.kernels.quantizers import plane_widths, words

WIDEST = 128
"""Numbers of a head that a warp has room for."""

STEP = 16
"""Tokens that a program takes at a time."""

WARPS = 8
"""Programs that there are for each multiprocessor, if tokens are enough."""

MOST_SHARES = 64
"""Of one head; the second kernel takes them all at once."""

_STEP, _EXTRA_BIT = tl.constexpr(STEP), tl.constexpr(EXTRA_BIT)


def fits(query: Tensor, keys: Heads, values: Heads) -> bool:
    """Whether `attend` is made for them: numbers of 16 bits, rows of words one behind the other."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and keys.room > 0
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
    """See `kv_cache.attend`, for what `fits`. Raises ValueError for shapes that do not agree."""
    batch, queries, width = query.shape
    group = queries_of_a_head(query, keys, values, first, mask)
    heads = queries // group
    shares = _shares(keys.room, batch * heads, query.device)
    rows = batch * queries * shares
    sums = torch.empty(rows, values.width, dtype=torch.float32, device=query.device)
    marks = torch.empty(2, rows, dtype=torch.float32, device=query.device)  # largest logit, sum of weights
    compiled = isinstance(_fragments_kernel, triton.JITFunction)
    early = compiled and early_launches(query.device)
    with torch.cuda.device_of(query), LAUNCHING:
        _fragments_kernel[(shares, heads, batch)](
            sums, marks[0], marks[1], query.view(torch.int16), first, mask, length, LOG2_E * scaling,
            *query.stride()[:2], 0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
            *_arguments(keys), *_arguments(values), keys.room,
            LENGTH_IS_POINTER=isinstance(length, Tensor),
            MASK_IS_BOOL=mask is not None and mask.dtype == torch.bool,
            HALF=query.dtype == torch.float16, GROUP=group,
            K_BITS=keys.bits, K_WIDTHS=plane_widths(keys.bits), K_COUNTS=_counts(keys), K_WIDTH=width,
            V_BITS=values.bits, V_WIDTHS=plane_widths(values.bits), V_COUNTS=_counts(values),
            V_WIDTH=values.width, K_ROW=keys.words.shape[3], V_ROW=values.words.shape[3], EARLY=early,
            ASM=compiled, num_warps=1, launch_pdl=early,
        )  # fmt: skip
        return join(query, sums, marks, shares, values.width)


def _arguments(heads: Heads) -> tuple[Tensor | int | None, ...]:
    bits = (0, 0) if heads.first_bits is None else heads.first_bits.stride()[:2]
    strides = *heads.words.stride()[:2], *heads.scale.stride()[:2], *bits
    return heads.words, heads.scale, heads.low, heads.first_bits, *strides


def _counts(heads: Heads) -> tuple[int, ...]:
    return tuple(words(heads.width, width) for width in plane_widths(heads.bits))


def _shares(tokens: int, programs: int, device: torch.device) -> int:
    """Into how many shares the tokens of a head are cut."""
    wanted = -(-WARPS * multiprocessors(device) // max(programs, 1))
    return max(1, min(wanted, -(-tokens // STEP), MOST_SHARES))


# Words of a thread are those of the planes, the widest first, a tuple each.


@triton.jit
def _columns_of(tile, COUNT: tl.constexpr):
    """The columns of [32, COUNT], 1 to 8 of them."""
    if COUNT == 1:
        columns = (tl.reshape(tile, [32]),)
    elif COUNT == 2:
        columns = tl.split(tile)
    else:
        even, odd = tl.split(tl.reshape(tile, [32, COUNT // 2, 2]))
        evens = _columns_of(even, COUNT // 2)
        odds = _columns_of(odd, COUNT // 2)
        columns = ()
        for i in tl.static_range(COUNT // 2):
            columns += (evens[i], odds[i])
    return columns


@triton.jit
def _load_words(rows, first, COUNT: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr):
    """EACH words from `first` on of the plane of COUNT words that begins at `rows`; 0 beyond its last."""
    at = first[:, None] + tl.arange(0, EACH)[None, :]
    if COUNT == EACH * THREADS:
        loaded = tl.load(rows[:, None] + at)
    else:
        loaded = tl.load(rows[:, None] + at, mask=at < COUNT, other=0)
    return _columns_of(loaded, EACH)


@triton.jit
def _key_words(rows, q, WIDTHS: tl.constexpr, COUNTS: tl.constexpr):
    """Those of columns 32 q to 32 q + 31."""
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        planes += (_load_words(rows, q * WIDTHS[p], COUNTS[p], WIDTHS[p], 4),)
        rows += COUNTS[p]
    return planes


@triton.jit
def _value_words(rows, r, WIDTHS: tl.constexpr, COUNTS: tl.constexpr):
    """Those of columns 16 r to 16 r + 15."""
    planes = ()
    for p in tl.static_range(len(WIDTHS)):
        if WIDTHS[p] == 1:
            two = _load_words(rows, r // 2, COUNTS[p], 1, 4)  # of two threads
            planes += ((two[0] >> (r % 2 * 4),),)
        else:
            planes += (_load_words(rows, r * (WIDTHS[p] // 2), COUNTS[p], WIDTHS[p] // 2, 8),)
        rows += COUNTS[p]
    return planes


@triton.jit
def _codes(planes, WIDTHS: tl.constexpr, G: tl.constexpr):
    """Codes of columns 4 G to 4 G + 3, a byte each."""
    codes = planes[0][0] & 0
    for p in tl.static_range(len(WIDTHS)):
        field = planes[p][G * WIDTHS[p] // 8] >> (G * WIDTHS[p] % 8)
        if WIDTHS[p] < 8:
            field = field & (((1 << WIDTHS[p]) - 1) * 0x01010101)
        codes = (codes << WIDTHS[p]) | field
    return codes


@triton.constexpr_function
def _four(byte):
    """A byte four times, as an int32."""
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


@triton.constexpr_function
def _added(bits, half):
    """What the numbers of a code add up to, less the code."""
    if half:
        return 1024.0
    return 128.0 if bits < 8 else 64.0


@triton.jit
def _numbers(codes, BITS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Four codes, a byte each, as numbers: pairs of the first two and of the last two."""
    if HALF:
        numbers = (side_by_side(codes, tl.full([32], _four(0x64), tl.int32), ASM),)
    elif BITS < 8:
        numbers = (side_by_side(codes, tl.full([32], _four(0x43), tl.int32), ASM),)
    else:
        highest = (codes & _four(0x80)) ^ _four(0xC2)  # 64 is the bf16 42 80, and -64 is C2 80
        numbers = (
            side_by_side(codes & _four(0x7F), tl.full([32], _four(0x43), tl.int32), ASM),
            side_by_side(tl.full([32], _four(0x80), tl.int32), highest, ASM),
        )
    return numbers


@triton.jit
def _centred(pairs, BITS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """The first of `_numbers` less what makes them all add up to code - 2^(BITS - 1)."""
    TAKEN_OFF: tl.constexpr = _added(BITS, HALF) + 2 ** (BITS - 1)
    return less(pairs[0], TAKEN_OFF, HALF, ASM), less(pairs[1], TAKEN_OFF, HALF, ASM)


@triton.jit
def _extra_bits(word, there, G: tl.constexpr):
    """Bits of columns 4 G to 4 G + 3 that a token has more than others, a byte each; 0 for other tokens."""
    return tl.where(there, word >> G, 0) & 0x01010101


@triton.jit
def _extra_numbers(bits, HALF: tl.constexpr, ASM: tl.constexpr):
    """What they are worth: 2**EXTRA_BIT, a number whose lower byte is 0."""
    UPPER: tl.constexpr = (15 + _EXTRA_BIT) << 2 if HALF else (127 + _EXTRA_BIT) >> 1
    return side_by_side(bits * 0, bits * UPPER, ASM)


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
        of_keys += (_key_words(kw_ptr + token * K_ROW, q, K_WIDTHS, K_COUNTS),)
        pair = ()
        of_pair = ()
        for i in tl.static_range(2):
            token = tl.minimum(8 * b + 2 * q + i + at, last).to(tl.int64)
            pair += (_value_words(vw_ptr + token * V_ROW, r, V_WIDTHS, V_COUNTS),)
            k_scale, v_scale = _number_at(ks_ptr, token), _number_at(vs_ptr, token)
            of_pair += ((k_scale, v_scale, _number_at(kl_ptr, token), _number_at(vl_ptr, token)),)
        of_values += (pair,)
        numbers += (of_pair,)
    return of_keys, of_values, numbers


@triton.jit
def _number_at(ptr, at):
    """As fp32; 0 where there is none."""
    if ptr is None:
        number = tl.zeros([32], tl.float32)
    else:
        number = widened(tl.load(ptr + at))
    return number


@triton.jit
def _query_fragments(
    query_ptr, stride, r, q, GROUP: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """A of the 8 instructions of S, and the sums of queries r and r + 8."""
    fragments = ()
    upper_sum, lower_sum = tl.zeros([32], tl.float32), tl.zeros([32], tl.float32)
    for g in tl.static_range(8):
        a0, a2 = _query_pairs(query_ptr + r * stride, r < GROUP, q, g, WIDTH)
        a1, a3 = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
        upper_sum += _sum_of_pairs(a0, a2, HALF)
        if GROUP > 8:
            a1, a3 = _query_pairs(query_ptr + (r + 8) * stride, r + 8 < GROUP, q, g, WIDTH)
            lower_sum += _sum_of_pairs(a1, a3, HALF)
        fragments += ((a0, a1, a2, a3),)
    return fragments, (_of_quad(upper_sum, False), _of_quad(lower_sum, False))


@triton.jit
def _query_pairs(rows, there, q, G: tl.constexpr, WIDTH: tl.constexpr):
    """Columns 32 q + 4 G to 32 q + 4 G + 3 of a query: two pairs."""
    column = (32 * q + 4 * G)[:, None] + tl.arange(0, 4)[None, :]
    loaded = tl.load(rows[:, None] + column, mask=there[:, None] & (column < WIDTH), other=0)
    c0, c1, c2, c3 = _columns_of(loaded.to(tl.int32) & 0xFFFF, 4)
    return c0 | (c1 << 16), c2 | (c3 << 16)


@triton.jit
def _sum_of_pairs(first, second, HALF: tl.constexpr):
    """Of two pairs."""
    return (float_of(first, HALF) + float_of(first >> 16, HALF)) + (
        float_of(second, HALF) + float_of(second >> 16, HALF)
    )


@triton.jit
def _of_quad(value, LARGEST: tl.constexpr):
    """The sum over the four threads of a row, or the largest, for each of them."""
    parts = tl.reshape(value, [8, 4])
    found = tl.max(parts, 1, keep_dims=True) if LARGEST else tl.sum(parts, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(found, [8, 4]), [32])


@triton.jit
def _products(
    of_keys, fragments, BITS: tl.constexpr, WIDTHS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr
):
    """S of a step, of codes with something added."""
    products = ()
    for b in tl.static_range(len(of_keys)):
        found = _four_zeros()
        for g in tl.static_range(8):
            digits = _numbers(_codes(of_keys[b], WIDTHS, g), BITS, HALF, ASM)
            for d in tl.static_range(len(digits)):
                found = multiply(fragments[g], digits[d], found, 1, HALF, ASM)
        products += (found,)
    return products


@triton.jit
def _four_zeros():
    zero = tl.zeros([32], tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _with_first_key(products, fragments, word, row, HALF: tl.constexpr, ASM: tl.constexpr):
    """Add what the extra bits of the first token are worth, which is `row` tokens behind this thread's."""
    added = ()
    for b in tl.static_range(len(products)):
        found = products[b]
        for g in tl.static_range(8):
            bits = _extra_bits(word, row == 8 * b, g)
            found = multiply(fragments[g], _extra_numbers(bits, HALF, ASM), found, 1, HALF, ASM)
        added += (found,)
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
    ADDED: tl.constexpr = _added(BITS, HALF)
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
    """Of query r (ROW 0) or r + 8 (ROW 1), -inf for tokens that do not count."""
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
    return _of_quad(unit, True)


@triton.jit
def _value_weights(
    logits, numbers, state, inverse, shrink_of_unit, token, first, BITS: tl.constexpr, LOW: tl.constexpr,
    FIRST: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What values are multiplied with, a pair of tokens for each 8; by what sums shrink; the new state.

    The state of a query is its largest logit; and of this thread's tokens the sum of weights, what is to be
    taken off the sums, in units, and what is to be added for the middles between lowest and highest.
    """
    CENTRE: tl.constexpr = 2.0 ** (BITS - 1)
    largest, weight, taken_off, middles = state
    now = logits[0]
    for n in tl.static_range(1, len(logits)):
        now = tl.maximum(now, logits[n])
    now = tl.maximum(largest, _of_quad(now, True))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no infinity less infinity
    shrink = tl.exp2(largest - base)
    weight *= shrink
    middles *= shrink
    shrink *= shrink_of_unit
    taken_off *= shrink
    pairs = ()
    for b in tl.static_range(len(numbers)):
        p = tl.exp2(logits[2 * b] - base), tl.exp2(logits[2 * b + 1] - base)
        pair, w0, w1 = _pair_of(
            p[0] * (numbers[b][0][1] * inverse), p[1] * (numbers[b][1][1] * inverse), HALF, ASM
        )
        pairs += (pair,)
        weight += p[0] + p[1]
        half0 = _middle(token + 8 * b, first, BITS, FIRST)
        half1 = _middle(token + (8 * b + 1), first, BITS, FIRST)
        taken_off += w0 * (half0 - CENTRE) + w1 * (half1 - CENTRE)
        if LOW:  # of codes less half nothing cancels that was rounded
            middles += p[0] * (numbers[b][0][3] + half0 * numbers[b][0][1])
            middles += p[1] * (numbers[b][1][3] + half1 * numbers[b][1][1])
    return pairs, shrink, (now, weight, taken_off, middles)


@triton.jit
def _pair_of(first, second, HALF: tl.constexpr, ASM: tl.constexpr):
    """Two fp32 rounded to 16 bits, as a pair and as fp32."""
    KIND: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    first, second = rounded(first, KIND, ASM), rounded(second, KIND, ASM)
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
    sums, upper, lower, words, BITS: tl.constexpr, WIDTHS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr
):
    """Sums plus weights times values, of 16 tokens an instruction."""
    added = sums
    for b in tl.static_range(0, len(words), 2):
        a = upper[b], lower[b], upper[b + 1], lower[b + 1]
        before = added
        added = ()
        for g in tl.static_range(4):
            first = side_by_side(_codes(words[b][0], WIDTHS, g), _codes(words[b][1], WIDTHS, g), ASM)
            then = side_by_side(_codes(words[b + 1][0], WIDTHS, g), _codes(words[b + 1][1], WIDTHS, g), ASM)
            for two in tl.static_range(2):
                k0, k8 = _numbers(first[two], BITS, HALF, ASM), _numbers(then[two], BITS, HALF, ASM)
                centred = _centred(k0[0], BITS, HALF, ASM), _centred(k8[0], BITS, HALF, ASM)
                for i in tl.static_range(2):
                    found = before[4 * g + 2 * two + i]
                    found = multiply(a, (centred[0][i], centred[1][i]), found, 1, HALF, ASM)
                    for d in tl.static_range(1, len(k0)):
                        found = multiply(a, (k0[d][i], k8[d][i]), found, 1, HALF, ASM)
                    added += (found,)
    return added


@triton.jit
def _with_first_value(sums, upper, lower, word, row, HALF: tl.constexpr, ASM: tl.constexpr):
    """Add what the extra bits of the first token are worth, `row` tokens behind this thread's first."""
    added = sums
    for b in tl.static_range(0, len(upper), 2):
        a = upper[b], lower[b], upper[b + 1], lower[b + 1]
        before = added
        added = ()
        for g in tl.static_range(4):
            bits = _extra_bits(word, row == 8 * b, g), _extra_bits(word, row == 8 * b + 1, g)
            first = side_by_side(bits[0], bits[1], ASM)
            bits = _extra_bits(word, row == 8 * b + 8, g), _extra_bits(word, row == 8 * b + 9, g)
            then = side_by_side(bits[0], bits[1], ASM)
            for two in tl.static_range(2):
                k0, k8 = _extra_numbers(first[two], HALF, ASM), _extra_numbers(then[two], HALF, ASM)
                for i in tl.static_range(2):
                    added += (multiply(a, (k0[i], k8[i]), before[4 * g + 2 * two + i], 1, HALF, ASM),)
    return added


@triton.jit(do_not_specialize=["length_ptr", "room"])
def _fragments_kernel(
    sums_ptr, largest_ptr, weight_ptr, query_ptr, first_ptr, mask_ptr, length_ptr, scaling,
    stride_qb, stride_qh, stride_mb,
    kw_ptr, ks_ptr, kl_ptr, kf_ptr, stride_kwb, stride_kwh, stride_ksb, stride_ksh, stride_kfb, stride_kfh,
    vw_ptr, vs_ptr, vl_ptr, vf_ptr, stride_vwb, stride_vwh, stride_vsb, stride_vsh, stride_vfb, stride_vfh,
    room,
    LENGTH_IS_POINTER: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    K_BITS: tl.constexpr, K_WIDTHS: tl.constexpr, K_COUNTS: tl.constexpr, K_WIDTH: tl.constexpr,
    K_ROW: tl.constexpr,
    V_BITS: tl.constexpr, V_WIDTHS: tl.constexpr, V_COUNTS: tl.constexpr, V_WIDTH: tl.constexpr,
    V_ROW: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Some tokens of a head: sums for up to 16 queries, their largest logits (base 2), sums of weights."""
    if EARLY:
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
    length = tl.minimum(length, room)
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
    fragments, q_sums = _query_fragments(query_ptr, stride_qh, r, q, GROUP, K_WIDTH, HALF)

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
        products = _products(of_keys, fragments, K_BITS, K_WIDTHS, HALF, ASM)
        if K_FIRST:  # noqa: SIM102  (the compiler knows this, not what follows)
            if with_first:
                bits = kf_ptr + text * stride_kfb + head * stride_kfh + q
                word = tl.load(bits, mask=32 * q < K_WIDTH, other=0)
                products = _with_first_key(products, fragments, word, first - at - r, HALF, ASM)
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
            V_BITS, vl_ptr is not None, V_FIRST, HALF, ASM,
        )  # fmt: skip
        lower_shrink = shrink
        if BESIDE == 2:
            lower, lower_shrink, lower_state = _value_weights(
                _logits(products, terms, q_sums[1], 1), numbers, lower_state, inverse, of_unit, token,
                first, V_BITS, vl_ptr is not None, V_FIRST, HALF, ASM,
            )  # fmt: skip
        sums = _shrunk(sums, shrink, lower_shrink, BESIDE)
        sums = _with_values(sums, upper, lower, of_values, V_BITS, V_WIDTHS, HALF, ASM)
        if V_FIRST:  # noqa: SIM102
            if with_first:
                bits = vf_ptr + text * stride_vfb + head * stride_vfh + r // 2
                word = tl.load(bits, mask=r // 2 * 32 < V_WIDTH, other=0) >> (r % 2 * 4)
                sums = _with_first_value(sums, upper, lower, word, first - token, HALF, ASM)

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
    largest, weight, taken_off, middles = state
    tl.store(largest_ptr + row, largest, mask=real & (q == 0))
    tl.store(weight_ptr + row, _of_quad(weight, False), mask=real & (q == 0))
    offset = _of_quad(middles, False) - _of_quad(taken_off, False) * unit
    for c in tl.static_range(2):
        for j in tl.static_range(0, 16, 4):
            even = tl.join(sums[j][2 * ROW + c], sums[j + 2][2 * ROW + c])
            odd = tl.join(sums[j + 1][2 * ROW + c], sums[j + 3][2 * ROW + c])
            four = tl.reshape(tl.join(even, odd), [32, 4]) * unit[:, None] + offset[:, None]
            column = (32 * q + (16 * c + j))[:, None] + tl.arange(0, 4)[None, :]
            inside = real[:, None] & (column < WIDTH)
            tl.store(sums_ptr + row[:, None] * WIDTH + column, four, mask=inside)
