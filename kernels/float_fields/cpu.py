"""The loops of `float_fields`, compiled by numba. One thread each; they release the GIL."""

from __future__ import annotations

import numpy as np

from neuzip.kernels.device.compiled import compiled

# Shifts and masks stay in uint64: a mix with numba's signed literals would turn into floats.
_1 = np.uint64(1)


@compiled
def census(bits, exponent_bits, mantissa_bits, with_pairs, pairs, single):  # type: ignore[no-untyped-def]
    m = np.uint64(mantissa_bits)
    e_mask = (_1 << np.uint64(exponent_bits)) - _1
    union = np.uint64(0)
    paired = bits.size // 2 if with_pairs else 0
    for i in range(paired):
        a = np.uint64(bits[2 * i])
        b = np.uint64(bits[2 * i + 1])
        union |= a | b
        pairs[((a >> m) & e_mask) | (((b >> m) & e_mask) << np.uint64(8))] += 1
    for i in range(2 * paired, bits.size):
        a = np.uint64(bits[i])
        union |= a
        single[(a >> m) & e_mask] += 1
    return union & ((_1 << m) - _1)


@compiled
def marginals(pairs, exponents):  # type: ignore[no-untyped-def]
    for second in range(256):
        total = 0
        for first in range(256):
            count = pairs[second << 8 | first]
            exponents[first] += count
            total += count
        exponents[second] += total


@compiled
def split(bits, exponent_bits, mantissa_bits, kept_bits, exponents, fields):  # type: ignore[no-untyped-def]
    m = np.uint64(mantissa_bits)
    e = np.uint64(exponent_bits)
    k = np.uint64(kept_bits)
    e_mask = (_1 << e) - _1
    k_mask = (_1 << k) - _1
    for i in range(bits.size):
        v = np.uint64(bits[i])
        exponents[i] = (v >> m) & e_mask
        fields[i] = ((v >> (m + e)) << k) | ((v >> (m - k)) & k_mask)


@compiled
def merge(exponents, fields, exponent_bits, mantissa_bits, kept_bits, bits):  # type: ignore[no-untyped-def]
    m = np.uint64(mantissa_bits)
    e = np.uint64(exponent_bits)
    k = np.uint64(kept_bits)
    k_mask = (_1 << k) - _1
    if kept_bits == 7 and mantissa_bits == 7:  # bf16: constants let the compiler use narrow integers
        for i in range(bits.size):
            bits[i] = (fields[i] & 0x80) << 8 | exponents[i] << 7 | (fields[i] & 0x7F)
        return
    for i in range(bits.size):
        f = np.uint64(fields[i])
        bits[i] = ((f >> k) << (m + e)) | (np.uint64(exponents[i]) << m) | ((f & k_mask) << (m - k))


@compiled
def take_plane(fields, shift, plane):  # type: ignore[no-untyped-def]
    s = np.uint64(shift)
    for i in range(plane.size):
        plane[i] = np.uint64(fields[i]) >> s


@compiled
def put_plane(plane, width, fields):  # type: ignore[no-untyped-def]
    w = np.uint64(width)
    for i in range(fields.size):
        fields[i] = (np.uint64(fields[i]) << w) | np.uint64(plane[i])


@compiled
def pack_plane(fields, shift, width, plane):  # type: ignore[no-untyped-def]
    s = np.uint64(shift)
    mask = (_1 << np.uint64(width)) - _1
    per = 8 // width
    for i in range(plane.size):
        byte = np.uint64(0)
        for j in range(min(per, fields.size - i * per)):
            byte |= ((np.uint64(fields[i * per + j]) >> s) & mask) << np.uint64(j * width)
        plane[i] = byte


@compiled
def unpack_plane(plane, width, fields):  # type: ignore[no-untyped-def]
    w = np.uint64(width)
    mask = (_1 << w) - _1
    per = 8 // width
    for i in range(plane.size):
        byte = np.uint64(plane[i])
        for j in range(min(per, fields.size - i * per)):
            at = i * per + j
            fields[at] = (np.uint64(fields[at]) << w) | ((byte >> np.uint64(j * width)) & mask)


@compiled
def round_mantissa(bits, drop, largest, sign_shift, out):  # type: ignore[no-untyped-def]
    d = np.uint64(drop)
    half_less_one = (_1 << (d - _1)) - _1
    top = np.uint64(largest)
    s = np.uint64(sign_shift)
    for i in range(bits.size):
        v = np.uint64(bits[i])
        sign = (v >> s) << s
        magnitude = v ^ sign
        rounded = ((magnitude + half_less_one + ((magnitude >> d) & _1)) >> d) << d
        out[i] = sign | min(rounded, top)


@compiled
def error_sums(original, restored, before):  # type: ignore[no-untyped-def]
    largest, relative_squares, nonzero, squares, original_squares = before
    for i in range(original.size):
        a = original[i]
        d = restored[i] - a
        squares += d * d
        original_squares += a * a
        if a != 0.0:
            nonzero += 1
            r = d / a
            relative_squares += r * r
            largest = max(largest, abs(r))
    return largest, relative_squares, nonzero, squares, original_squares
