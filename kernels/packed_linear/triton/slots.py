"""What the kernels that decode packed weights and those that multiply with them have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_start(loaded):
    """Where the escapes of a row begin, as row_start has it: in 16 bits if that is enough."""
    return loaded.to(tl.int32) & 0xFFFF if loaded.dtype == tl.int16 else loaded


@triton.jit
def count_below(mask, bit, COMPILED: tl.constexpr):
    """How many bits of an int32 are set below one."""
    below = mask & ~((tl.zeros_like(mask) - 1) << bit)
    if COMPILED:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [below], dtype=tl.int32, is_pure=True, pack=1
        )
    pairs = below - ((below >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = eights + (eights >> 8)
    return (sixteens + (sixteens >> 16)) & 0x3F


@triton.jit
def differ(high, far, G: tl.constexpr, HALF: tl.constexpr):
    """High bytes of group G with the bit of 8 of their exponents turned where a far word says so."""
    BIT: tl.constexpr = 5 if HALF else 2
    moved = far << (BIT - G) if G <= BIT else far >> (G - BIT)
    return high ^ (moved & (0x01010101 << BIT))


@triton.jit
def _field(words, FIRST: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr):
    """A field of 4 slots, a byte each, from planes of a width that begin with FIRST."""
    word = words[FIRST + G * WIDTH // 8]
    return (word >> (G * WIDTH % 8)) & (((1 << WIDTH) - 1) * 0x01010101)


@triton.jit
def low_bytes(words, LOW: tl.constexpr, G: tl.constexpr):
    """The low bytes of 4 slots, from the words of all planes of a row."""
    if LOW == 8:
        low = words[G]
    else:
        low = words[0] & 0
        if LOW & 4:
            low = _field(words, 0, 4, G)
        if LOW & 2:
            low = (low << 2) | _field(words, LOW & 4, 2, G)
        if LOW & 1:
            low = (low << 1) | _field(words, LOW & 6, 1, G)
        low = low << (8 - LOW)
    return low


@triton.jit
def unsigned_bytes(words, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr):
    """The high bytes of 4 slots without signs, and as if there were no far words, from the words of a row."""
    if HALF:
        code = _field(words, LOW + 2, 2, G) | (_field(words, LOW + 4, 1, G) << 2)
        high = ((base4 - code) << 2) | _field(words, LOW, 2, G)
    else:
        high = base4 - _field(words, LOW, 2, G)
    return high


@triton.jit
def signs_of(words, LOW: tl.constexpr, HALF: tl.constexpr):
    """The word of signs: of the 4 slots of group G bit G of each byte."""
    return words[LOW + 5] if HALF else words[LOW + 2]


@triton.jit
def high_bytes(words, far, base4, LOW: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr):
    """The high bytes of 4 slots, from the words of all planes of a row, and its far word."""
    high = differ(unsigned_bytes(words, base4, LOW, HALF, G), far, G, HALF)
    return high | ((signs_of(words, LOW, HALF) << (7 - G)) & -0x7F7F7F80)


@triton.jit
def columns_of_word(c, lane):
    """Where the columns of a word begin, and whether it is one of the four words of a turn.

    Slot 4 G + 2 H + E is 16 G + 8 H + E columns further there, else 4 G + 2 H + E.
    """
    whole = c < lane // 4 * 4
    return tl.where(whole, c // 4 * 128 + c % 4 * 2, 32 * c), whole


@triton.jit
def slot_of_escape(pattern, base, shift, HALF: tl.constexpr):
    """What stands in the slot of an escape, 16 bits in an int32: see `ExponentWindow.slots_of_escapes`."""
    if HALF:
        slot = (pattern & 0x83FF) | ((base - 7) << 10)
    else:
        exponent = (pattern >> 7) & 0xFF
        normal = (exponent > shift) & (exponent < 0xFF)
        slot = (tl.where(normal, pattern - (shift << 7), pattern) & 0x80FF) | ((base - 3) << 8)
    return slot
