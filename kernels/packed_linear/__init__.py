"""Weights of fixed width, about 11 bits for bf16, that a product reads as they lie and that lose nothing.

READ THIS FIRST. Four things surprise:

1. The low byte of a bf16 stays as it is. Of the high byte, the sign takes 1 bit, and the 7 upper exponent
   bits take a 2-bit *code*: how far they lie below the `base` of the tensor's *window*. The window so holds 8
   exponents.

       bf16:   s (1)   eeeeeee (7)                      e mmmmmmm (8)     16 bits
       slot:   s (1)   code = base - eeeeeee (2)        e mmmmmmm (8)     11 bits

2. With `parity` 1 it is the pattern less 0x0080 that is packed, half the weight: the window then starts at an
   odd exponent. A product doubles its sums.

3. A weight outside the window is an *escape*: its slot holds its own low byte and sign, and code 3. Its
   column (16 bits) and its own high byte stand in a list, row after row. The slot alone is worth a known
   *stand-in*, of one of the window's two lowest exponents, and what a product must add is

       (weight - stand-in) * x[column]

4. The 32 weights that share words do not lie side by side: they are `lane_words` = C columns apart.

A row of K weights is filled up to 32 C slots. It is 11 *planes*, runs of C little-endian 32-bit words. Word c
of each holds something of the columns c, C + c, 2C + c, ..., 31C + c. With slot q meaning column q C + c:

    plane      word c, from bit 31 down to bit 0
    0          low bytes of slots  3  2  1  0
    1          low bytes of slots  7  6  5  4
    ...
    7          low bytes of slots 31 30 29 28
    8          codes, a byte each  15 11  7  3 | 14 10  6  2 | 13  9  5  1 | 12  8  4  0
    9          the same for        31 27 23 19 | 30 26 22 18 | 29 25 21 17 | 28 24 20 16
    10         signs, a byte each  31 27 ... 3 | 30 26 ... 2 | 29 25 ... 1 | 28 24 ... 0

So for the four slots of plane g, with j = g % 4,

    high = base * 0x01010101 - (codes >> 2 j & 0x03030303) | signs << (7 - g) & 0x80808080

are their four high bytes (no byte borrows from the next: base is at least 3), and two byte permutations of
`low` and `high` are the four bf16.

Why so: a thread that takes 4 neighbouring words of a plane reads 16 bytes, a warp 512 bytes in a run. The
columns of one slot are neighbours as their words are, so that x is read, and dense weights are written, in
their own order: nobody permutes x beforehand. All planes of a row lie together: one pointer for a kernel, one
run of 44 C bytes for a row of an embedding. Planes start on multiples of 16 bytes where K is a multiple of
128; rows are not filled up to that, which would cost a K of 576 a ninth.

| input                        | what happens                                                               |
|------------------------------|----------------------------------------------------------------------------|
| K not a multiple of 32       | slots without a weight are worth a finite number: x must be 0 there        |
| zeros, denormals, inf, NaN   | escapes, unless the window reaches them; bit for bit as they were          |
| x infinite                   | weight * x is NaN where the weight is an escape: inf - inf                 |
| exponents far apart          | many escapes: `bits_per_weight` can reach 35; the caller judges            |
| more than 65,536 columns     | refused                                                                    |
| no weights at all            | no words, no escapes                                                       |

Only bf16: of fp16, 2 of the 10 mantissa bits would have to go into the high byte.
"""

from __future__ import annotations

from .form import PLANES, SLOTS, Packed, Window, best_window
from .reference import decode, matmul, pack

__all__ = ["PLANES", "SLOTS", "Packed", "Window", "best_window", "decode", "matmul", "pack"]
