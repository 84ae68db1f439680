"""Sparse deltas as formats/SPEC.md defines them, in Python's integers: one block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from neuzip.kernels.sparse_delta.numbers import BLOCK, BLOCK_BITS, FIRST_FACTOR, PLACE_FACTOR, SECOND_FACTOR

MODULUS = 1 << 64


class BrokenBlock(ValueError):
    """A block that no encoder writes."""


def encode_block(old: Sequence[int], new: Sequence[int], bits: int) -> tuple[int, list[int]]:
    """The descriptor and the words of a block. `old` and `new` are patterns of `bits` bits, BLOCK at most."""
    half = 1 << (bits - 1)
    places, negative, magnitudes = [], [], []
    for place, (a, b) in enumerate(zip(old, new, strict=True)):
        difference = (b - a) % (2 * half)
        if difference:
            places.append(place)
            negative.append(difference >= half)
            magnitudes.append(2 * half - difference if difference >= half else difference)
    rest = [magnitude - 2 for magnitude in magnitudes if magnitude > 1]
    count, width = len(places), max(rest, default=0).bit_length()
    low = low_bits(count)
    high = [0] * high_length(count)
    for rank, place in enumerate(places):
        high[(place >> low) + rank] = 1
    stream = high
    for place in places:
        stream += [place >> j & 1 for j in range(low)]
    stream += [int(sign) for sign in negative]
    stream += [int(magnitude > 1) for magnitude in magnitudes]
    for number in rest:
        stream += [number >> j & 1 for j in range(width)]
    words = [sum(bit << j for j, bit in enumerate(stream[at : at + 32])) for at in range(0, len(stream), 32)]
    return count | len(rest) << 13 | width << 26, words


def low_bits(count: int) -> int:
    """The low bits of a place, of which a block with `count` changed weights stores each apart."""
    return BLOCK_BITS - (count - 1).bit_length() if count else 0


def high_length(count: int) -> int:
    """The bits in which a block with `count` changed weights stores the high bits of their places."""
    return count + (BLOCK >> low_bits(count)) - 1 if count else 0


def decode_block(
    descriptor: int, words: Sequence[int], length: int, bits: int
) -> tuple[list[int], list[int]]:
    """The places of the changed weights of a block of `length`, and their differences modulo 2^bits.

    `words` are those of this block alone. Raises BrokenBlock.
    """
    count, more, width = descriptor & 0x1FFF, descriptor >> 13 & 0x1FFF, descriptor >> 26
    if count > length or more > count or width >= bits or (width and not more):
        raise BrokenBlock("descriptor")
    low, high = low_bits(count), high_length(count)
    total = high + count * (low + 2) + more * width
    if len(words) != -(-total // 32):
        raise BrokenBlock("number of words")
    stream = [word >> j & 1 for word in words for j in range(32)]
    if any(stream[total:]):
        raise BrokenBlock("padding")

    def field(at: int, size: int) -> int:
        return sum(stream[at + j] << j for j in range(size))

    ones = [at for at in range(high) if stream[at]]
    if len(ones) != count:
        raise BrokenBlock("number of places")
    places = [(at - rank) << low | field(high + rank * low, low) for rank, at in enumerate(ones)]
    if any(b <= a for a, b in pairwise(places)) or (places and places[-1] >= length):
        raise BrokenBlock("places")
    signs = high + count * low
    flags = [stream[signs + count + rank] for rank in range(count)]
    if sum(flags) != more:
        raise BrokenBlock("number of large differences")
    rest = [field(signs + 2 * count + rank * width, width) for rank in range(more)]
    if max(rest, default=0).bit_length() != width:
        raise BrokenBlock("width")
    half, large, differences = 1 << (bits - 1), iter(rest), []
    for rank, flag in enumerate(flags):
        magnitude = next(large) + 2 if flag else 1
        if magnitude > half - (not stream[signs + rank]):
            raise BrokenBlock("difference")
        differences.append(2 * half - magnitude if stream[signs + rank] else magnitude)
    return places, differences


def term(place: int, pattern: int) -> int:
    """What a weight adds to the digest of a state. `place` is its block times BLOCK and its place in that."""
    z = ((place + 1) * PLACE_FACTOR) % MODULUS ^ pattern
    z = ((z ^ z >> 30) * FIRST_FACTOR) % MODULUS
    z = ((z ^ z >> 27) * SECOND_FACTOR) % MODULUS
    return z ^ z >> 31


def digest(tensors: Sequence[Sequence[int]]) -> int:
    """The sum of the terms of all weights of tensors, modulo 2^64. A tensor begins a block."""
    total = block = 0
    for patterns in tensors:
        total += sum(term(block * BLOCK + i, pattern) for i, pattern in enumerate(patterns))
        block += -(-len(patterns) // BLOCK)
    return total % MODULUS
