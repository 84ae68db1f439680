"""The loops, compiled by numba: one tensor a call, whose blocks are numbered from 0. They release the GIL.

Weights are unsigned integers, words and descriptors uint32. Arithmetic is in 64 bits and masked.
"""

from __future__ import annotations

import numpy as np

from neuzip.kernels.device.compiled import compiled
from neuzip.kernels.sparse_delta.numbers import (
    BLOCK,
    BLOCK_BITS,
    COUNT_BITS,
    FIRST_FACTOR,
    PLACE_FACTOR,
    SECOND_FACTOR,
)

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)
_32, _31 = np.uint64(32), np.uint64(31)
_PLACE, _FIRST, _SECOND = np.uint64(PLACE_FACTOR), np.uint64(FIRST_FACTOR), np.uint64(SECOND_FACTOR)
_COUNT = (1 << COUNT_BITS) - 1


@compiled
def _bit_length(x):  # type: ignore[no-untyped-def]
    length = 0
    while x:
        x >>= _1
        length += 1
    return length


@compiled
def term(place, pattern):  # type: ignore[no-untyped-def]
    """What a weight adds to the digest."""
    z = (np.uint64(place) + _1) * _PLACE ^ np.uint64(pattern)
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> _31)


@compiled
def digest(weights, place):  # type: ignore[no-untyped-def]
    """The sum of the terms of weights, the first of which has the number `place`."""
    total = _0
    for i in range(weights.size):
        total += term(np.uint64(place) + np.uint64(i), weights[i])
    return total


@compiled
def low_bits(count):  # type: ignore[no-untyped-def]
    return BLOCK_BITS - _bit_length(np.uint64(count - 1)) if count else 0


@compiled
def _high_length(count, low):  # type: ignore[no-untyped-def]
    return count + (BLOCK >> low) - 1 if count else 0


@compiled
def measure(old, new, descriptors):  # type: ignore[no-untyped-def]
    """The descriptors of all blocks."""
    half = _1 << np.uint64(8 * old.itemsize - 1)
    mask = (half - _1) | half
    for block in range(descriptors.size):
        count, more, largest = 0, 0, _0
        for i in range(block * BLOCK, min(old.size, (block + 1) * BLOCK)):
            difference = (np.uint64(new[i]) - np.uint64(old[i])) & mask
            if difference:
                count += 1
                magnitude = (_0 - difference) & mask if difference >= half else difference
                if magnitude > _1:
                    more += 1
                    largest |= magnitude - _2
        descriptors[block] = count | more << COUNT_BITS | _bit_length(largest) << 2 * COUNT_BITS


@compiled
def _put(words, at, value, width):  # type: ignore[no-untyped-def]
    """Put a field of up to 64 bits at bit `at` of words, which are 0 there."""
    while width > 0:
        shift = at & 31
        words[at >> 5] |= np.uint32((value << np.uint64(shift)) & np.uint64(0xFFFFFFFF))
        step = min(32 - shift, width)
        value >>= np.uint64(step)
        at += step
        width -= step


@compiled
def _take(words, at, width):  # type: ignore[no-untyped-def]
    """The field of up to 63 bits at bit `at` of words."""
    value, have = _0, 0
    while have < width:
        shift = at & 31
        step = min(32 - shift, width - have)
        part = (np.uint64(words[at >> 5]) >> np.uint64(shift)) & ((_1 << np.uint64(step)) - _1)
        value |= part << np.uint64(have)
        at += step
        have += step
    return value


@compiled
def encode(old, new, descriptors, starts, words):  # type: ignore[no-untyped-def]
    """Write all blocks into words, which are 0; block b begins at words[starts[b]]."""
    half = _1 << np.uint64(8 * old.itemsize - 1)
    mask = (half - _1) | half
    for block in range(descriptors.size):
        count = np.int64(descriptors[block]) & _COUNT
        width = np.int64(descriptors[block]) >> 2 * COUNT_BITS
        if not count:
            continue
        low = low_bits(count)
        own = words[starts[block] :]
        lows = _high_length(count, low)
        signs = lows + count * low
        numbers, rank = signs + 2 * count, 0
        for i in range(block * BLOCK, min(old.size, (block + 1) * BLOCK)):
            difference = (np.uint64(new[i]) - np.uint64(old[i])) & mask
            if not difference:
                continue
            place = i - block * BLOCK
            _put(own, (place >> low) + rank, _1, 1)
            _put(own, lows + rank * low, np.uint64(place & ((1 << low) - 1)), low)
            magnitude = difference
            if difference >= half:
                magnitude = (_0 - difference) & mask
                _put(own, signs + rank, _1, 1)
            if magnitude > _1:
                _put(own, signs + count + rank, _1, 1)
                _put(own, numbers, magnitude - _2, width)
                numbers += width
            rank += 1


@compiled
def _decode_block(descriptor, words, length, bits, places, differences):  # type: ignore[no-untyped-def]
    """Decode the words of one block into arrays of BLOCK. Returns how many weights changed; -1 if broken."""
    count = np.int64(descriptor) & _COUNT
    more = (np.int64(descriptor) >> COUNT_BITS) & _COUNT
    width = np.int64(descriptor) >> 2 * COUNT_BITS
    if count > length or more > count or width >= bits or (width and not more):
        return -1
    low = low_bits(count)
    lows = _high_length(count, low)
    signs = lows + count * low
    numbers = signs + 2 * count
    total = numbers + more * width
    if words.size != (total + 31) >> 5:
        return -1
    if total & 31 and np.int64(words[total >> 5]) >> (total & 31):
        return -1
    half = _1 << np.uint64(bits - 1)
    mask = (half - _1) | half
    rank, large, largest, last = 0, 0, _0, -1
    for at in range(lows):
        if not (words[at >> 5] >> np.uint32(at & 31)) & np.uint32(1):
            continue
        if rank == count:
            return -1
        place = (at - rank) << low | np.int64(_take(words, lows + rank * low, low))
        if place <= last or place >= length:
            return -1
        negative = _take(words, signs + rank, 1)
        magnitude = _1
        if _take(words, signs + count + rank, 1):
            if large == more:
                return -1
            number = _take(words, numbers + large * width, width)
            largest |= number
            magnitude = number + _2
            large += 1
        if magnitude > half - (_1 - negative):
            return -1
        last = place
        places[rank] = place
        differences[rank] = (_0 - magnitude) & mask if negative else magnitude
        rank += 1
    if rank != count or large != more or _bit_length(largest) != width:
        return -1
    return count


@compiled
def check(weights, first, descriptors, starts, words):  # type: ignore[no-untyped-def]
    """What all blocks add to the digest when they are applied, and the first broken block or -1.

    `starts` has one entry more than blocks, and they lie within the words. `first` is the number that the
    first block has among those of all tensors.
    """
    places, differences = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    mask = ((_1 << np.uint64(8 * weights.itemsize - 1)) << _1) - _1
    change = _0
    for block in range(descriptors.size):
        own = words[starts[block] : starts[block + 1]]
        begin = block * BLOCK
        length = min(weights.size - begin, BLOCK)
        bits = 8 * weights.itemsize
        count = _decode_block(descriptors[block], own, length, bits, places, differences)
        if count < 0:
            return change, block
        for rank in range(count):
            old = np.uint64(weights[begin + places[rank]])
            number = (first + block) * BLOCK + places[rank]
            change += term(number, (old + differences[rank]) & mask) - term(number, old)
    return change, -1


@compiled
def apply(weights, descriptors, starts, words):  # type: ignore[no-untyped-def]
    """Add the differences of blocks that `check` has passed."""
    places, differences = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    bits = 8 * weights.itemsize
    for block in range(descriptors.size):
        own = words[starts[block] : starts[block + 1]]
        begin = block * BLOCK
        length = min(weights.size - begin, BLOCK)
        for rank in range(_decode_block(descriptors[block], own, length, bits, places, differences)):
            at = begin + places[rank]
            weights[at] = np.uint64(weights[at]) + differences[rank]


@compiled
def changed(length, bits, descriptors, starts, words, out):  # type: ignore[no-untyped-def]
    """The numbers of the changed weights of a tensor of `length`, of blocks that `check` has passed."""
    places, differences = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    at = 0
    for block in range(descriptors.size):
        own = words[starts[block] : starts[block + 1]]
        begin = block * BLOCK
        here = min(length - begin, BLOCK)
        for rank in range(_decode_block(descriptors[block], own, here, bits, places, differences)):
            out[at] = begin + places[rank]
            at += 1
