"""Weights of fixed width, about 11 bits for bf16, that a product reads as they lie and that lose nothing.

READ THIS FIRST. Seven things surprise:

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

2. What is packed is the pattern less `shift` exponents, 0 to 15: the number, 2**shift times smaller. A
   product multiplies its sums by that. The shift decides which exponents differ in the bit of 8 alone, see
   3. For fp16 it is always 0.

3. 1 to 2 % of the weights are *far*: their exponent is not in the window but differs from one that is in the
   bit of 8 alone. They have that one's code, and a bit of their own says that they are far. Such a bit every
   weight would have in a plane of its own, but of that plane only those words are held that are not 0, the
   *far words*. With the right shift window and far exponents are 16 neighbours, of which the window is any 8,
   but for one: for N(0, 0.02) it is the six below and two above the window that are far.

4. What is neither in the window nor far is an *escape*, one of some 6,000 weights. Its slot holds the
   largest code, 3 or 7, and else what the slot of a packed weight would: its sign, low byte and middle bits,
   less the shift if that leaves a normal number. Its own 16 bits stand in a list, row after row, with its
   column. What a product of few rows must add is

       (weight - what its slot is worth) * x[column]

5. Words of 16 rows lie together, those of rows r and r + 8 side by side.

6. Four words of a row, a *turn*, share 128 columns out as the threads of a matrix instruction want them.

7. Fields are cut into groups of planes whose widths are powers of two, so that none straddles a byte: a low
   byte of 7 bits is a group of width 4 (the upper ones), one of 2, and one of 1.

A row of K weights is filled up to C words of 32 slots, and rows up to *tiles* of 16. A tile is 4 to 14
*planes*, each C x 8 x 2 little-endian 32-bit words:

    words [tiles, planes, C, 8, 2]        row 16 t + r + 8 h has its words at [t, plane, c, r, h]

Words 4 t to 4 t + 3 of a row hold something of its columns 128 t to 128 t + 127, 32 slots each:

    slot 4 g + 2 h + e of word 4 t + q     column 128 t + 16 g + 8 h + 2 q + e

If the last words of a row are fewer than four, word c has the columns 32 c to 32 c + 31, in their order. A
group of width w is w planes. The four slots 4 g to 4 g + 3 have their bits in its plane g * w // 8, slot 4
g + b in byte b, and there from bit g * w % 8 on. The groups, in this order:

    field         width           holds
    low           8               the low byte, or in place of that, as the binary digits of low_bits:
                  4 and 2 and 1   its upper low_bits, the widest group the uppermost
    middle        2               fp16: the lowest 2 bits of the high byte
    code          2               the code, or of 3 bits its lower 2
    code          1               fp16: the uppermost bit of the code
    sign          1               the sign

Slots without a weight, those beyond K and those of rows that only fill a tile, hold the largest code and
zeros.

So for bf16 with 8 low bits:

    plane      word c, from bit 31 down to bit 0
    0          low bytes of slots  3  2  1  0
    1          low bytes of slots  7  6  5  4
    ...
    7          low bytes of slots 31 30 29 28
    8          codes, a byte each  15 11  7  3 | 14 10  6  2 | 13  9  5  1 | 12  8  4  0
    9          the same for        31 27 23 19 | 30 26 22 18 | 29 25 21 17 | 28 24 20 16
    10         signs, a byte each  31 27 ... 3 | 30 26 ... 2 | 29 25 ... 1 | 28 24 ... 0

A far word has its bits where a word of signs has them. Far words lie in the order of words: by tile, word, r
and h. Where they are, an index says, for the 32 words of two neighbours, c = 2 p and 2 p + 1, of a tile:

    far_index [tiles, pairs, 2]    bit 16 (c % 2) + 2 r + h of [t, p, 0]: whether there is one;
                                   [t, p, 1]: the number of the first of them

For the four slots of plane g, with j = g % 4,

    high = base * 0x01010101 - (codes >> 2 j & 0x03030303) ^ (far >> g & 0x01010101) << 2
           | signs << (7 - g) & 0x80808080

are their four high bytes (no byte borrows from the next: no code is above the base), and two byte
permutations of `low` and `high` are the four bf16. For fp16 the difference is shifted by 2 bits and the
middle bits come in; it is bit 5 of a byte that a far bit turns.

An escape is one number of 32 bits:

    bits   holds
    0-15   its column
    16-31  the weight as it was, nothing taken from it

The escapes of row r are those from row_start[r] to row_start[r + 1], ascending by column. These starts take
16 bits each if the tensor has fewer than 65,536 escapes, else 32.

Products of many rows (Hopper, 17 rows and more) have no time to add anything: they turn the slots of escapes
into the weights. For them escapes are listed once more, by tile and turn, in units of the slots: 2**shift
times smaller. What differs are 7 bits of a high byte:

    bits   holds
    0-6    the bits to turn
    7-8    of which byte, b: the escape is slot 4 g + b
    9-13   2 g + i, for row r + 8 i
    15     whether who reads this has to look further
    16-20  4 r + q, the thread that has word q of rows r and r + 8

    turn_index [tiles, turns, 2]    the threads that have an escape, a bit each; the number of the first entry

Of a turn, the first escape of each thread comes first, by thread. If any thread has more, all of these look
at what follows, up to an entry without bit 15. There are no such lists, but [0, 0, 2] and [0], where rows
are not whole turns, where more than one weight of 512 is an escape, where they crowd, as in rows of zeros,
and where one of them has no number that is 2**shift times smaller, as denormals have not.

Why so: a thread (r, q) of a matrix instruction gives rows r and r + 8, which are 8 bytes, and a warp 256
bytes in a run. Of 16 columns it gives 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, which are slots of its own word.
So nothing moves between threads, and x is taken as it lies. Escapes cost a product of few rows a line of x
each, for each row of x; far words cost it a bit of a word that it reads anyway. With 3 code bits in place
of 2 there would be neither, but a twelfth bit.

| input                       | what happens                                                      |
|-----------------------------|-------------------------------------------------------------------|
| K not a multiple of 32      | slots without a weight are worth some number: x must be 0 there   |
| K not a multiple of 128     | no lists by turn: products of 65 and more rows decode first       |
| rows not a multiple of 16   | words for the others too: one row takes as much as 16             |
| zeros, denormals, inf, NaN  | escapes, unless the window reaches them; bit for bit as they were |
| one NaN with a long payload | all low bits are held for all weights: bit for bit means NaNs too |
| x infinite, few rows        | weight * x is NaN where the weight is an escape: inf - inf        |
| exponents far apart         | many escapes: `bits_per_weight` can reach 47; the caller judges   |
| more than 65,536 columns    | refused                                                           |
| no weights at all           | no words, no escapes                                              |

The functions here are the reference, in numpy. `ops` has the operators that models use.
"""

from __future__ import annotations

from .form import SLOTS, ExponentWindow, Packed, PackedLayout, best_window
from .reference import decode, matmul, pack

__all__ = ["SLOTS", "ExponentWindow", "Packed", "PackedLayout", "best_window", "decode", "matmul", "pack"]
