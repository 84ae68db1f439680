"""The loops, compiled by numba. One thread each; they release the GIL."""

from __future__ import annotations

import numpy as np

from neuzip.kernels.device.compiled import compiled

# All arithmetic is in 64 bits and the stores cut it: modulo 2^b without a thought of signs.
_1 = np.uint64(1)


@compiled
def _ordered(x, half, mask):  # type: ignore[no-untyped-def]
    return x if x <= half else (half - x) & mask


@compiled
def _zigzagged(d, unused, shift):  # type: ignore[no-untyped-def]
    """A difference whose sign is `unused` bits below the top, without its last zeros."""
    v = np.int64(d << unused) >> np.int64(unused + shift)
    return np.uint64(v << np.int64(1)) ^ np.uint64(v >> np.int64(63))


@compiled
def _places(base, exponent_bits, mantissa_bits):  # type: ignore[no-untyped-def]
    """By exponent, where the first weight of those with that exponent goes."""
    m, ones = np.uint64(mantissa_bits), (_1 << np.uint64(exponent_bits)) - _1
    places = np.zeros((1 << exponent_bits) + 1, np.int64)
    for i in range(base.size):
        places[((np.uint64(base[i]) >> m) & ones) + _1] += 1
    for e in range(1, places.size):
        places[e] += places[e - 1]
    return places


@compiled
def subtract(new, base, exponent_bits, mantissa_bits, out):  # type: ignore[no-untyped-def]
    places = _places(base, exponent_bits, mantissa_bits)
    m, ones = np.uint64(mantissa_bits), (_1 << np.uint64(exponent_bits)) - _1
    bits = np.uint64(8 * new.itemsize)
    half = _1 << (bits - _1)
    mask = (half - _1) | half
    union = np.uint64(0)
    new_union = np.uint64(0)
    for i in range(new.size):
        x, y = np.uint64(new[i]), np.uint64(base[i])
        d = (_ordered(x, half, mask) - _ordered(y, half, mask)) & mask
        union |= d
        new_union |= x
        e = (y >> m) & ones
        out[places[e]] = d
        places[e] += 1
    return union, new_union


@compiled
def lengths(differences, shift, counts):  # type: ignore[no-untyped-def]
    unused, s = np.uint64(64 - 8 * differences.itemsize), np.uint64(shift)
    for i in range(differences.size):
        z = _zigzagged(np.uint64(differences[i]), unused, s)
        length = 0
        while z:
            z >>= _1
            length += 1
        counts[length] += 1


@compiled
def take(differences, shift, at, mask, out):  # type: ignore[no-untyped-def]
    unused, s, a, m = (
        np.uint64(64 - 8 * differences.itemsize), np.uint64(shift), np.uint64(at), np.uint64(mask),
    )  # fmt: skip
    for i in range(differences.size):
        out[i] = (_zigzagged(np.uint64(differences[i]), unused, s) >> a) & m


@compiled
def restore(base, zigzagged, shift, exponent_bits, mantissa_bits, out):  # type: ignore[no-untyped-def]
    places = _places(base, exponent_bits, mantissa_bits)
    m, ones = np.uint64(mantissa_bits), (_1 << np.uint64(exponent_bits)) - _1
    bits, s = np.uint64(8 * base.itemsize), np.uint64(shift)
    half = _1 << (bits - _1)
    mask = (half - _1) | half
    for i in range(base.size):
        y = np.uint64(base[i])
        e = (y >> m) & ones
        z = np.uint64(zigzagged[places[e]])
        places[e] += 1
        v = (z >> _1) ^ (np.uint64(0) - (z & _1))
        out[i] = _ordered((_ordered(y, half, mask) + (v << s)) & mask, half, mask)


@compiled
def put_digit(digit, at, zigzagged):  # type: ignore[no-untyped-def]
    """Add a digit to the bits from `at` on."""
    a = np.uint64(at)
    for i in range(digit.size):
        zigzagged[i] = np.uint64(zigzagged[i]) | (np.uint64(digit[i]) << a)


@compiled
def sums(digits, block, counts):  # type: ignore[no-untyped-def]
    for b in range(counts.shape[0]):
        changed = 0
        bits = 0
        for i in range(b * block, min(digits.size, (b + 1) * block)):
            z = digits[i]
            changed += z != 0
            while z:
                z >>= 1
                bits += 1
        counts[b, 0] = changed
        counts[b, 1] = bits
