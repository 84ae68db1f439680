"""Weights of fixed width, about 11 bits for bf16, that a product reads as they lie and that lose nothing.

READ THIS FIRST. Five things surprise:

1. The low byte of a bf16 stays as it is. Of the high byte, the sign takes 1 bit, and the 7 upper exponent
   bits take a 2-bit *code*: how far they lie below the `base` of the tensor's *window*. The window so holds 8
   exponents. An fp16 has 2 *middle* bits in its high byte, mantissa bits which stay, and a 3-bit code for its
   5 exponent bits:

       bf16:   s (1)   eeeeeee (7)                      e mmmmmmm (8)     16 bits
       slot:   s (1)   code = base - eeeeeee (2)        e mmmmmmm (8)     11 bits

       fp16:   s (1)   eeeee (5)               mm (2)   mmmmmmmm (8)      16 bits
       slot:   s (1)   code = base - eeeee (3) mm (2)   mmmmmmmm (8)      14 bits

   If no weight uses the lowest bits of the mantissa, only `low_bits` of the low byte are held, at least 1:
   after truncation to 3 mantissa bits a bf16 takes 7 bits.

2. With `parity` 1 it is the pattern less 0x0080 that is packed, half the bf16: the window then starts at an
   odd exponent. A product doubles its sums. For fp16 the parity is always 0.

3. A weight outside the window is an *escape*. Its slot holds the largest code, 3 or 7, and zeros, so that
   all slots of escapes are worth one number, the tensor's *stand-in*. Its own 16 bits stand in a list, row
   after row, with where it is. What a product must add is

       (weight - stand-in) * x[column]

4. The 32 weights of a row that share words do not lie side by side: they are `lane_words` = C columns apart.
   Words of 16 rows lie together, those of rows r and r + 8 side by side.

5. Fields are cut into groups of planes whose widths are powers of two, so that none straddles a byte: a low
   byte of 7 bits is a group of width 4 (the upper ones), one of 2, and one of 1.

A row of K weights is filled up to 32 C slots, and rows up to *tiles* of 16. A tile is 4 to 14 *planes*, each
C x 8 x 2 little-endian 32-bit words:

    words [tiles, planes, C, 8, 2]        row 16 t + r + 8 h has its words at [t, plane, c, r, h]

Word c of a row holds something of its columns c, C + c, 2C + c, ..., 31C + c, the slots 0 to 31. A group of
width w is w planes. The four slots 4 g to 4 g + 3 have their bits in its plane g * w // 8, slot 4 g + b in
byte b, and there from bit g * w % 8 on. The groups, in this order:

    field         width           holds
    low           8               the low byte, or in place of that, as the binary digits of low_bits:
                  4 and 2 and 1   its upper low_bits, the widest group the uppermost
    middle        2               fp16: the lowest 2 bits of the high byte
    code          2               the code, or of 3 bits its lower 2
    code          1               fp16: the uppermost bit of the code
    sign          1               the sign

Slots without a weight, those beyond K and those of rows that only fill a tile, are like those of escapes: the
largest code and zeros.

So for bf16 with 8 low bits:

    plane      word c, from bit 31 down to bit 0
    0          low bytes of slots  3  2  1  0
    1          low bytes of slots  7  6  5  4
    ...
    7          low bytes of slots 31 30 29 28
    8          codes, a byte each  15 11  7  3 | 14 10  6  2 | 13  9  5  1 | 12  8  4  0
    9          the same for        31 27 23 19 | 30 26 22 18 | 29 25 21 17 | 28 24 20 16
    10         signs, a byte each  31 27 ... 3 | 30 26 ... 2 | 29 25 ... 1 | 28 24 ... 0

For the four slots of plane g, with j = g % 4,

    high = base * 0x01010101 - (codes >> 2 j & 0x03030303) | signs << (7 - g) & 0x80808080

are their four high bytes (no byte borrows from the next: no code is above the base), and two byte
permutations of `low` and `high` are the four bf16. For fp16 the difference is shifted by 2 bits and the
middle bits come in.

An escape is one number of 32 bits:

    bits   holds
    0-15   position, 32 c + q for slot q of word c: column (position & 31) * C + (position >> 5)
    16-31  the weight as it was, nothing taken from it

The escapes of row r are those from row_start[r] to row_start[r + 1], ascending by position. These starts take
16 bits each if the tensor has fewer than 65,536 escapes, else 32.

Why so: a thread of a matrix instruction (m16n8k16) needs rows r and r + 8, which are 8 bytes, and a warp 256
bytes in a run; no K has to be a multiple of anything for that. The columns of one slot are neighbours as
their words are, so that x is read, and dense weights are written, in their own order: nobody permutes x.
The escapes of a row come in the order in which a product goes through its words, so that what they need of x
was read a moment ago; and nothing that they need has to be taken from the words.

| input                       | what happens                                                      |
|-----------------------------|-------------------------------------------------------------------|
| K not a multiple of 32      | slots without a weight are worth the stand-in: x must be 0 there  |
| rows not a multiple of 16   | words for the others too: one row takes as much as 16             |
| zeros, denormals, inf, NaN  | escapes, unless the window reaches them; bit for bit as they were |
| one NaN with a long payload | all low bits are held for all weights: bit for bit means NaNs too |
| x infinite                  | weight * x is NaN where the weight is an escape: inf - inf        |
| exponents far apart         | many escapes: `bits_per_weight` can reach 46; the caller judges   |
| more than 65,536 columns    | refused                                                           |
| no weights at all           | no words, no escapes                                              |

The functions here are the reference, in numpy. `torch_ops` has the operators that models use.
"""

from __future__ import annotations

from .form import SLOTS, Layout, Packed, Window, best_window
from .reference import decode, matmul, pack

__all__ = ["SLOTS", "Layout", "Packed", "Window", "best_window", "decode", "matmul", "pack"]
