"""Sign and mantissa of decoded weights, in Triton: planes loaded, merged with exponents, and stored.

A thread has a lane: 8 weights of a run. GROUP, E, M and KEPT are those of SPEC.md; W = 1 + KEPT.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.rans.coded import PLANES
from neuzip.kernels.rans.triton.ring import joined

_C_PLANES = tl.constexpr(PLANES)


@triton.jit
def load_run(
    planes32, planes16, planes8, planes4, planes2, planes1, at, left, W: tl.constexpr, RAGGED: tl.constexpr
):
    """The planes of a lane's 8 weights, run `at` from the pointers on: w bytes of the plane of width w.

    Of a ragged block only what belongs to its `left` weights, to 16 bytes rounded up, is read. Nothing is
    widened here: that would be a use, and would wait.
    """
    none = tl.full([], 0, tl.uint64)
    q0, q1, q2, q3, d0, d1, b8, b4 = none, none, none, none, none, none, none, none.to(tl.uint32)
    b2, b1 = none.to(tl.uint16), none.to(tl.uint8)
    if RAGGED:
        if W & 32:
            q0 = tl.load(planes32 + 4 * at, mask=left > 0, other=0)
            q1 = tl.load(planes32 + 4 * at + 1, mask=left > 2, other=0)
            q2 = tl.load(planes32 + 4 * at + 2, mask=left > 4, other=0)
            q3 = tl.load(planes32 + 4 * at + 3, mask=left > 6, other=0)
        if W & 16:
            d0 = tl.load(planes16 + 2 * at, mask=left > 0, other=0)
            d1 = tl.load(planes16 + 2 * at + 1, mask=left > 0, other=0)
        if W & 8:
            b8 = tl.load(planes8 + at, mask=left > 0, other=0)
        if W & 4:
            b4 = tl.load(planes4 + at, mask=left > 0, other=0)
        if W & 2:
            b2 = tl.load(planes2 + at, mask=left > 0, other=0)
        if W & 1:
            b1 = tl.load(planes1 + at, mask=left > 0, other=0)
    else:
        if W & 32:
            q0 = tl.load(planes32 + 4 * at)
            q1 = tl.load(planes32 + 4 * at + 1)
            q2 = tl.load(planes32 + 4 * at + 2)
            q3 = tl.load(planes32 + 4 * at + 3)
        if W & 16:
            d0 = tl.load(planes16 + 2 * at)
            d1 = tl.load(planes16 + 2 * at + 1)
        if W & 8:
            b8 = tl.load(planes8 + at)
        if W & 4:
            b4 = tl.load(planes4 + at)
        if W & 2:
            b2 = tl.load(planes2 + at)
        if W & 1:
            b1 = tl.load(planes1 + at)
    return q0, q1, q2, q3, d0, d1, b8, b4, b2, b1


@triton.jit
def _spread(plane, j: tl.constexpr, w: tl.constexpr, STRIDE: tl.constexpr):
    """The fields of w bits of weights 2j and 2j + 1, STRIDE bits apart."""
    if w == 8:
        two = (plane >> (16 * j)).to(tl.uint32)
    else:
        two = plane.to(tl.uint32) >> (2 * w * j)
    ones: tl.constexpr = (1 << w) - 1
    return (two & ones) | ((two & (ones << w)) << (STRIDE - w))


@triton.jit
def _pair(e, b8, b4, b2, b1, j: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr):
    """Weights 2j and 2j + 1 of a format of at most 16 bits, in one word. `e` has their exponents in place."""
    W: tl.constexpr = KEPT + 1
    twice: tl.constexpr = 1 + (1 << BITS)
    fields = tl.zeros_like(e)
    if W & 8:
        fields = _spread(b8, j, 8, BITS)
    if W & 4:
        fields = (fields << 4) | _spread(b4, j, 4, BITS)
    if W & 2:
        fields = (fields << 2) | _spread(b2, j, 2, BITS)
    if W & 1:
        fields = (fields << 1) | _spread(b1, j, 1, BITS)
    signs: tl.constexpr = twice << KEPT
    mantissas: tl.constexpr = twice * ((1 << KEPT) - 1)
    return e | ((fields & signs) << (BITS - 1 - KEPT)) | ((fields & mantissas) << (M - KEPT))


@triton.jit
def _field(q, d, b8, b4, b2, b1, j: tl.constexpr, W: tl.constexpr):
    """The field of weight j, of a format of 32 or 64 bits; q and d are the words that it is in."""
    field = tl.zeros_like(d + b8 + b4 + b2 + b1 + q)
    if W & 32:
        field = (q >> (32 * (j % 2))) & 0xFFFFFFFF
    if W & 16:
        field = (field << 16) | ((d >> (16 * (j % 4))) & 0xFFFF)
    if W & 8:
        field = (field << 8) | ((b8 >> (8 * j)) & 0xFF)
    if W & 4:
        field = (field << 4) | ((b4 >> (4 * j)) & 0xF).to(tl.uint64)
    if W & 2:
        field = (field << 2) | ((b2.to(tl.uint32) >> (2 * j)) & 0x3).to(tl.uint64)
    if W & 1:
        field = (field << 1) | ((b1.to(tl.uint32) >> j) & 0x1).to(tl.uint64)
    return field


@triton.jit
def assemble(e, field, BITS: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr):
    """A weight's pattern from its exponent and its field."""
    sign = (field >> KEPT) << (BITS - 1)
    mantissa = (field & ((1 << KEPT) - 1)) << (M - KEPT)
    return sign | (e.to(tl.uint64) << M) | mantissa


@triton.jit
def times(pattern, factor, BITS: tl.constexpr, E: tl.constexpr):
    """A weight, in the low bits of a word, times the normaliser: formed in fp32, or fp64 for F64."""
    if BITS == 64:
        product = pattern.to(tl.float64, bitcast=True) * factor.to(tl.float64)
        result = product.to(tl.uint64, bitcast=True)
    elif BITS == 32:
        product = pattern.to(tl.uint32).to(tl.float32, bitcast=True) * factor
        result = product.to(tl.uint32, bitcast=True)
    elif E == 8:
        product = (pattern << 16).to(tl.uint32).to(tl.float32, bitcast=True) * factor
        bits = product.to(tl.uint32, bitcast=True)
        result = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        product = pattern.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor
        result = product.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return result


@triton.jit
def _pair_times(pair, factor, BITS: tl.constexpr, E: tl.constexpr):
    return times(pair & 0xFFFF, factor, BITS, E) | (times(pair >> 16, factor, BITS, E) << 16)


@triton.jit
def merge(
    e0, e1, e2, e3, q0, q1, q2, q3, d0, d1, b8, b4, b2, b1, factor,
    BITS: tl.constexpr, E: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A lane's 8 weights as BITS / 8 words of 64 bits; the others are without meaning."""
    W: tl.constexpr = KEPT + 1
    none = tl.zeros_like(joined(e0, e0))
    w0, w1, w2, w3, w4, w5, w6, w7 = none, none, none, none, none, none, none, none
    if BITS <= 16:
        p0 = _pair(e0, b8, b4, b2, b1, 0, BITS, M, KEPT)
        p1 = _pair(e1, b8, b4, b2, b1, 1, BITS, M, KEPT)
        p2 = _pair(e2, b8, b4, b2, b1, 2, BITS, M, KEPT)
        p3 = _pair(e3, b8, b4, b2, b1, 3, BITS, M, KEPT)
        if BITS == 16:
            if NORM:
                p0, p1 = _pair_times(p0, factor, BITS, E), _pair_times(p1, factor, BITS, E)
                p2, p3 = _pair_times(p2, factor, BITS, E), _pair_times(p3, factor, BITS, E)
            w0, w1 = joined(p0, p1), joined(p2, p3)
        else:
            w0 = joined(p0 | p1 << 16, p2 | p3 << 16)
    else:
        low: tl.constexpr = (1 << (BITS // 4)) - 1
        v0 = assemble(e0 & low, _field(q0, d0, b8, b4, b2, b1, 0, W), BITS, M, KEPT)
        v1 = assemble(e0 >> (BITS // 4), _field(q0, d0, b8, b4, b2, b1, 1, W), BITS, M, KEPT)
        v2 = assemble(e1 & low, _field(q1, d0, b8, b4, b2, b1, 2, W), BITS, M, KEPT)
        v3 = assemble(e1 >> (BITS // 4), _field(q1, d0, b8, b4, b2, b1, 3, W), BITS, M, KEPT)
        v4 = assemble(e2 & low, _field(q2, d1, b8, b4, b2, b1, 4, W), BITS, M, KEPT)
        v5 = assemble(e2 >> (BITS // 4), _field(q2, d1, b8, b4, b2, b1, 5, W), BITS, M, KEPT)
        v6 = assemble(e3 & low, _field(q3, d1, b8, b4, b2, b1, 6, W), BITS, M, KEPT)
        v7 = assemble(e3 >> (BITS // 4), _field(q3, d1, b8, b4, b2, b1, 7, W), BITS, M, KEPT)
        if NORM:
            v0, v1 = times(v0, factor, BITS, E), times(v1, factor, BITS, E)
            v2, v3 = times(v2, factor, BITS, E), times(v3, factor, BITS, E)
            v4, v5 = times(v4, factor, BITS, E), times(v5, factor, BITS, E)
            v6, v7 = times(v6, factor, BITS, E), times(v7, factor, BITS, E)
        if BITS == 32:
            w0, w1, w2, w3 = joined(v0, v1), joined(v2, v3), joined(v4, v5), joined(v6, v7)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = v0, v1, v2, v3, v4, v5, v6, v7
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def store_run(target, w0, w1, w2, w3, w4, w5, w6, w7, BITS: tl.constexpr):
    """Store the 8 weights of every lane, 16 bytes at a time: more would be moved between threads first."""
    if BITS == 8:
        tl.store(target, w0[:, None])
    else:
        tl.store(target, tl.join(w0, w1))
    if BITS >= 32:
        tl.store(target + 2, tl.join(w2, w3))
    if BITS == 64:
        tl.store(target + 4, tl.join(w4, w5))
        tl.store(target + 6, tl.join(w6, w7))


@triton.jit
def _store_word(target, left, word, number: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """Store the weights of a lane's word `number`, one by one, if they are among its first `left`."""
    for i in tl.static_range(64 // BITS):
        at = number * (64 // BITS) + i
        tl.store(target + at, (word >> (i * BITS)).to(ELEMENT), mask=at < left)


@triton.jit
def store_ragged(
    target, left, w0, w1, w2, w3, w4, w5, w6, w7, BITS: tl.constexpr, ELEMENT: tl.constexpr
):  # fmt: skip
    """Store the first `left` of a lane's 8 weights."""
    _store_word(target, left, w0, 0, BITS, ELEMENT)
    if BITS >= 16:
        _store_word(target, left, w1, 1, BITS, ELEMENT)
    if BITS >= 32:
        _store_word(target, left, w2, 2, BITS, ELEMENT)
        _store_word(target, left, w3, 3, BITS, ELEMENT)
    if BITS == 64:
        _store_word(target, left, w4, 4, BITS, ELEMENT)
        _store_word(target, left, w5, 5, BITS, ELEMENT)
        _store_word(target, left, w6, 6, BITS, ELEMENT)
        _store_word(target, left, w7, 7, BITS, ELEMENT)


@triton.jit
def one_field(inp, own, weight, mask, W: tl.constexpr):
    """The field of any one weight of the tensor."""
    field = tl.zeros_like(weight).to(tl.uint64)
    if W & 32:
        plane = (inp + tl.load(own + _C_PLANES)).to(tl.pointer_type(tl.uint32))
        field = tl.load(plane + weight, mask=mask, other=0).to(tl.uint64)
    if W & 16:
        plane = (inp + tl.load(own + _C_PLANES + 1)).to(tl.pointer_type(tl.uint16))
        field = (field << 16) | tl.load(plane + weight, mask=mask, other=0)
    if W & 8:
        field = (field << 8) | tl.load(inp + tl.load(own + _C_PLANES + 2) + weight, mask=mask, other=0)
    if W & 4:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 3) + weight // 2, mask=mask, other=0)
        field = (field << 4) | ((byte >> (weight % 2 * 4).to(tl.uint8)) & 0xF)
    if W & 2:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 4) + weight // 4, mask=mask, other=0)
        field = (field << 2) | ((byte >> (weight % 4 * 2).to(tl.uint8)) & 0x3)
    if W & 1:
        byte = tl.load(inp + tl.load(own + _C_PLANES + 5) + weight // 8, mask=mask, other=0)
        field = (field << 1) | ((byte >> (weight % 8).to(tl.uint8)) & 0x1)
    return field
