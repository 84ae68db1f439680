"""The kernels: a program takes a block, and finds it in tables of blocks, of their tensors, and of tensors.

Programs of `encode_kernel` take several blocks in turn.

Arithmetic on patterns is in int32 for weights of up to 16 bits, and for others in int64, whose sums wrap.
Words of a block that a message has not are read as 0, so that no message makes a program read elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neuzip.kernels.sparse_delta.numbers import (
    BLOCK,
    BLOCK_BITS,
    COUNT_BITS,
    FIRST_FACTOR,
    PLACE_FACTOR,
    SECOND_FACTOR,
)

_BLOCK, _BLOCK_BITS, _COUNT_BITS = tl.constexpr(BLOCK), tl.constexpr(BLOCK_BITS), tl.constexpr(COUNT_BITS)
_COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)
_PLACE, _FIRST, _SECOND = (
    tl.constexpr(PLACE_FACTOR), tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
)  # fmt: skip


@triton.jit
def _block_of(index, blocks, owners, tensors):
    """A block of a launch: number, weights, first weight in its tensor, and begin of the tensor's row."""
    block = tl.load(blocks + index).to(tl.int64)
    owner = tl.load(owners + index).to(tl.int64) * 3
    row = tensors + owner
    begin = (block - tl.load(row)) * _BLOCK
    length = tl.minimum(tl.load(row + 1) - begin, _BLOCK).to(tl.int32)
    return block, length, begin, owner


@triton.jit
def _unsigned(x, BITS: tl.constexpr):
    """Patterns loaded as signed integers, as numbers that are not negative (but those of 64 bits)."""
    if BITS == 8:
        wide = x.to(tl.int32) & 0xFF
    elif BITS == 16:
        wide = x.to(tl.int32) & 0xFFFF
    elif BITS == 32:
        wide = x.to(tl.int64) & 0xFFFFFFFF
    else:
        wide = x
    return wide


@triton.jit
def _modulo(x, BITS: tl.constexpr):
    """A sum of such numbers, modulo 2^BITS."""
    if BITS == 8:
        x = x & 0xFF
    elif BITS == 16:
        x = x & 0xFFFF
    elif BITS == 32:
        x = x & 0xFFFFFFFF
    return x


@triton.jit
def _bit_length(x, BITS: tl.constexpr):
    """The bits of a scalar that is not negative, below 2^(BITS - 1)."""
    return tl.sum((x >> tl.arange(0, BITS) > 0).to(tl.int32), 0)


@triton.jit
def _differences(old, new, at, mask, BITS: tl.constexpr):
    """Which weights at places `at` changed, whether downwards, by more than 1, and what is left of that."""
    a = _unsigned(tl.load(old + at, mask=mask, other=0), BITS)
    b = _unsigned(tl.load(new + at, mask=mask, other=0), BITS)
    difference = _modulo(b - a, BITS)
    negative = ((difference >> (BITS - 1)) & 1) != 0
    magnitude = tl.where(negative, _modulo(0 - difference, BITS), difference)
    changed = difference != 0
    large = changed & (magnitude != 1)
    return changed, negative, large, tl.where(large, magnitude - 2, 0)


@triton.jit
def measure_kernel(
    old, new, descriptors, blocks, owners, old_tensors, new_tensors, BITS: tl.constexpr, WIDE: tl.constexpr
):
    """The descriptor of a block."""
    block, length, begin, owner = _block_of(tl.program_id(0), blocks, owners, old_tensors)
    old += tl.load(old_tensors + owner + 2) + begin
    new += tl.load(new_tensors + owner + 2) + begin
    at = tl.arange(0, _BLOCK)
    changed, _, large, rest = _differences(old, new, at, at < length, BITS)
    count, more = tl.sum(changed.to(tl.int32), 0), tl.sum(large.to(tl.int32), 0)
    width = _bit_length(tl.max(rest, 0), WIDE)
    tl.store(descriptors + block, count | more << _COUNT_BITS | width << 2 * _COUNT_BITS)


@triton.jit
def _fields(descriptor):
    """Changed weights, large differences, width of rests, low bits of places, bits of high parts."""
    count, more = descriptor & _COUNT_MASK, (descriptor >> _COUNT_BITS) & _COUNT_MASK
    width = (descriptor >> 2 * _COUNT_BITS) & 63
    high = _bit_length(tl.maximum(count - 1, 0), 32)
    lows = tl.where(count > 0, count + (1 << high) - 1, 0)
    return count, more, width, -high + _BLOCK_BITS, lows  # a constant on the left would make a constant


@triton.jit
def _put(words, at, value, mask):
    """Put fields of up to 32 bits at bits `at` of words, which are 0 there."""
    shifted = value.to(tl.uint64) << (at & 31).to(tl.uint64)
    first = (shifted & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    second = (shifted >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (at >> 5), first, mask=mask & (first != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, second, mask=mask & (second != 0), sem="relaxed")


@triton.jit
def _list_changes(old, new, places, length):
    """Write the places of the changed weights of a block, in order, to the program's list."""
    at = tl.arange(0, _BLOCK)
    inside = at < length
    changed = tl.load(old + at, mask=inside, other=0) != tl.load(new + at, mask=inside, other=0)
    rank = tl.cumsum(changed.to(tl.int32), 0) - 1
    tl.store(places + rank, at.to(tl.int16), mask=changed)


@triton.jit
def _encode_changes(old, new, places, fields, words, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write the fields of the weights at `places` to the words of a block, TILE weights at a time."""
    count, _more, width, low, lows = fields
    seen_large = count * 0
    for first in range(0, count, TILE):
        rank = first + tl.arange(0, TILE)
        here = rank < count
        at = tl.load(places + rank, mask=here, other=0).to(tl.int32)
        _changed, negative, large, rest = _differences(old, new, at, here, BITS)
        high = (at >> low) + rank
        tl.atomic_or(words + (high >> 5), 1 << (high & 31), mask=here, sem="relaxed")
        _put(words, lows + rank * low, at & ((1 << low) - 1), here)
        signs = lows + count * low + rank
        tl.atomic_or(words + (signs >> 5), 1 << (signs & 31), mask=here & negative, sem="relaxed")
        flags = signs + count
        tl.atomic_or(words + (flags >> 5), 1 << (flags & 31), mask=large, sem="relaxed")
        order = seen_large + tl.cumsum(large.to(tl.int32), 0) - 1
        seen_large += tl.sum(large.to(tl.int32), 0)
        to = lows + count * (low + 2) + order * width
        if BITS == 64:
            _put(words, to, rest & 0xFFFFFFFF, large)
            _put(words, to + 32, rest >> 32, large)
        else:
            _put(words, to, rest, large)


@triton.jit(do_not_specialize=["count_of_blocks"])
def encode_kernel(
    old, new, descriptors, starts, words, places, blocks, owners, old_tensors, new_tensors, count_of_blocks,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The words of blocks, which are 0 before. A program lists the places of a block's changed weights first.

    places  memory for the lists, int16 [programs, BLOCK]. Few weights change, so their fields are computed
            from the list, and not for all weights of the block
    """
    places += tl.program_id(0) * _BLOCK
    for index in range(tl.program_id(0), count_of_blocks, tl.num_programs(0)):
        block, length, begin, owner = _block_of(index, blocks, owners, old_tensors)
        fields = _fields(tl.load(descriptors + block))
        if fields[0] > 0:
            own_old = old + tl.load(old_tensors + owner + 2) + begin
            own_new = new + tl.load(new_tensors + owner + 2) + begin
            tl.debug_barrier()  # the list of the block before has been read
            _list_changes(own_old, own_new, places, length)
            tl.debug_barrier()  # an entry is another thread's
            _encode_changes(own_old, own_new, places, fields, words + tl.load(starts + block), BITS, TILE)


@triton.jit
def _take(words, limit, at, width, mask):
    """Fields of `width` bits, up to 32, at bits `at` of words: int64."""
    place = at >> 5
    first = tl.load(words + place, mask=mask & (place < limit), other=0).to(tl.uint32, bitcast=True)
    second = tl.load(words + place + 1, mask=mask & (place + 1 < limit), other=0).to(tl.uint32, bitcast=True)
    both = first.to(tl.uint64) | (second.to(tl.uint64) << 32)
    one = (width * 0 + 1).to(tl.int64)
    return (both >> (at & 31).to(tl.uint64)).to(tl.int64) & ((one << width.to(tl.int64)) - 1)


@triton.jit
def _bit(words, limit, at, mask):
    """Single bits of words: 0 or 1."""
    return (tl.load(words + (at >> 5), mask=mask & (at >> 5 < limit), other=0) >> (at & 31)) & 1


@triton.jit
def _decoded(words, limit, at, seen, seen_large, fields, BITS: tl.constexpr):
    """What bits `at` of the high parts stand for, `seen` ranks and `seen_large` flags after the first.

    Returns which bits are 1, their ranks, places, low parts, signs, flags and rests, and the next numbers.
    """
    count, more, width, low, lows = fields
    bit = _bit(words, limit, at, at < lows)  # [TILE]
    rank = seen + tl.cumsum(bit, 0) - 1
    here = (bit != 0) & (rank < count)
    part = _take(words, limit, lows + rank * low, low, here).to(tl.int32)
    signs = lows + count * low + rank
    negative = _bit(words, limit, signs, here) != 0
    flag = _bit(words, limit, signs + count, here)
    order = seen_large + tl.cumsum(flag, 0) - 1
    of = lows + count * (low + 2) + order * width
    large = (flag != 0) & (order < more)
    if BITS == 64:
        rest = _take(words, limit, of, tl.minimum(width, 32), large)
        rest |= _take(words, limit, of + 32, tl.maximum(width - 32, 0), large) << 32
    else:
        rest = _take(words, limit, of, width, large)
    ends = seen + tl.sum(bit, 0), seen_large + tl.sum(flag, 0)
    return here, rank, ((at - rank) << low) | part, part, negative, flag != 0, rest, ends


@triton.jit
def _difference(negative, flag, rest, BITS: tl.constexpr):
    """What is added to a pattern: int64, of which the lowest BITS count."""
    magnitude = tl.where(flag, rest + 2, 1)
    return tl.where(negative, 0 - magnitude, magnitude)


@triton.jit
def _term(number, pattern):
    """What weights add to the digest. number: int64; pattern: not negative, or of 64 bits."""
    z = (number + 1).to(tl.uint64) * _PLACE ^ pattern.to(tl.uint64)
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit
def check_kernel(
    weights, changes, broken, descriptors, starts, words, total, blocks, owners, tensors,
    BITS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, MOST_REST: tl.constexpr,
):  # fmt: skip
    """What a block adds to the digest, and whether it breaks a rule: `broken` is 1 then.

    MOST_REST is the rest of the largest magnitude downwards, 2^(BITS - 1) - 2.
    """
    block, length, begin, owner = _block_of(tl.program_id(0), blocks, owners, tensors)
    descriptor = tl.load(descriptors + block)
    start = tl.load(starts + block)
    count, more, width, low, lows = _fields(descriptor)
    wrong = (count > length) | (more > count) | (width >= BITS) | ((width > 0) & (more == 0))
    limit = tl.minimum(tl.load(starts + block + 1), total) - start
    wrong |= limit < 0
    bad = wrong.to(tl.int32)
    change = tl.zeros([TILE], tl.uint64)
    if wrong == 0:
        words += start
        weights += tl.load(tensors + owner + 2) + begin
        seen, seen_large = tl.program_id(0) * 0, tl.program_id(0) * 0
        largest = tl.zeros([TILE], tl.int64)
        for first in range(0, lows, TILE):
            at = first + tl.arange(0, TILE)
            here, rank, place, part, negative, flag, rest, ends = _decoded(
                words, limit, at, seen, seen_large, (count, more, width, low, lows), BITS
            )
            seen, seen_large = ends
            # Equal high parts stand in bits side by side.
            beside = here & (_bit(words, limit, tl.maximum(at - 1, 0), here & (at > 0)) != 0)
            before = _take(words, limit, lows + (rank - 1) * low, low, beside).to(tl.int32)
            failure = (beside & (before >= part)) | (here & (place >= length))
            most = MOST_REST - (1 - negative.to(tl.int64))
            failure |= flag & here & (rest > most)
            bad |= tl.max(failure.to(tl.int32), 0)
            largest = tl.maximum(largest, tl.where(here & flag, rest, 0))
            use = here & (place < length)
            old = _unsigned(tl.load(weights + place, mask=use, other=0), BITS).to(tl.int64)
            new = _modulo(old + _difference(negative, flag, rest, BITS), BITS)
            number = block * _BLOCK + place
            change += tl.where(use, _term(number, new) - _term(number, old), 0)
        end = lows + count * (low + 2) + more * width
        padding = tl.load(words + (end >> 5), mask=(end & 31 != 0) & (end >> 5 < limit), other=0)
        padding = padding.to(tl.uint32, bitcast=True) >> (end & 31).to(tl.uint32)
        bad |= ((seen != count) | (seen_large != more) | (padding != 0)).to(tl.int32)
        bad |= (_bit_length(tl.max(largest, 0), WIDE) != width).to(tl.int32)
    tl.store(changes + block, tl.sum(change, 0).to(tl.int64, bitcast=True))
    tl.store(broken + block, bad)


@triton.jit
def apply_kernel(
    weights, descriptors, starts, words, blocks, owners, tensors, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Add the differences of a block that `check_kernel` has passed."""
    block, _length, begin, owner = _block_of(tl.program_id(0), blocks, owners, tensors)
    fields = _fields(tl.load(descriptors + block))
    start = tl.load(starts + block)
    limit = tl.load(starts + block + 1) - start
    weights += tl.load(tensors + owner + 2) + begin
    seen, seen_large = tl.program_id(0) * 0, tl.program_id(0) * 0
    for first in range(0, fields[4], TILE):
        at = first + tl.arange(0, TILE)
        here, _, place, _, negative, flag, rest, ends = _decoded(
            words + start, limit, at, seen, seen_large, fields, BITS
        )
        seen, seen_large = ends
        old = tl.load(weights + place, mask=here, other=0)
        new = old.to(tl.int64) + _difference(negative, flag, rest, BITS)
        tl.store(weights + place, new.to(old.dtype), mask=here)


@triton.jit
def changed_kernel(
    numbers, totals, descriptors, starts, words, blocks, owners, tensors,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The numbers of the changed weights of a block in their tensor."""
    block, _length, begin, _owner = _block_of(tl.program_id(0), blocks, owners, tensors)
    fields = _fields(tl.load(descriptors + block))
    start = tl.load(starts + block)
    limit = tl.load(starts + block + 1) - start
    numbers += tl.load(totals + block)
    seen, seen_large = tl.program_id(0) * 0, tl.program_id(0) * 0
    for first in range(0, fields[4], TILE):
        at = first + tl.arange(0, TILE)
        here, rank, place, _, _, _, _, ends = _decoded(
            words + start, limit, at, seen, seen_large, fields, BITS
        )
        seen, seen_large = ends
        tl.store(numbers + rank, begin + place, mask=here)


@triton.jit
def digest_kernel(
    weights, sums, blocks, owners, tensors, BITS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """The terms of a block's weights, summed up."""
    block, length, begin, owner = _block_of(tl.program_id(0), blocks, owners, tensors)
    weights += tl.load(tensors + owner + 2) + begin
    total = tl.zeros([TILE], tl.uint64)
    for first in tl.static_range(0, BLOCK, TILE):
        at = first + tl.arange(0, TILE)
        pattern = _unsigned(tl.load(weights + at, mask=at < length, other=0), BITS)
        total += tl.where(at < length, _term(block * BLOCK + at, pattern.to(tl.int64)), 0)
    tl.store(sums + block, tl.sum(total, 0).to(tl.int64, bitcast=True))
