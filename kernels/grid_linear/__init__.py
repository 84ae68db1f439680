"""Weights of a uniform grid in codes of a fixed width, 4 to 8 bits, which a product multiplies as they lie.

    packed = pack(weights, grid)     weights: bf16 or fp16 [out, in], values of a kernels.grid.Grid
    ops.linear(x, packed)            x @ weights.T, with these weights bit for bit

READ THIS FIRST. Six things surprise:

1. The tensor chooses the width: the one with the least bits, escapes included. Codes whose entropy is 4 bits
   mostly have 5, as their tails are long.

2. The window of a width is -2^(width - 1) to 2^(width - 1) - 1. A field holds the code plus 2^(width - 1).

3. What is not the value of a code in the window is an *escape*: a number of 32 bits with its column in the
   lower 16, and the weight itself in the upper 16. Its field holds the code 0, so a product adds weight * x.

4. Groups of 32 slots, words of 16 rows side by side, turns of 128 columns and fillings are those of
   `packed_linear`: slot 4 g + 2 h + e of word 4 t + q is column 128 t + 16 g + 8 h + 2 q + e. So threads of a
   matrix instruction unpack what they have to give to it.

5. A field lies whole in a word, so a thread needs one instruction for it: with the exponent of 2^(23 - b)
   above its bits it is the fp32 number 2^(23 - b) + u, where b is its lowest bit. What is left over at the
   top of the words, the *spare* bits, is one word more when they are put side by side:

       width    fields in a word    spare bits    of all words together
       4        8                   0
       5        6                   2             10 bits, 2 fields
       6        5                   2             12 bits, 2 fields
       7        4                   4             28 bits, 4 fields
       8        4                   0

6. Each row has its step in fp32, step * row factor, and columns have their factors in fp32, in the order of
   the slots, where the grid has any. So a weight is the container's: its step is the product of both, rounded
   to fp32, its value the product of that and the code, rounded to fp32 and then to the dtype.

A row of K weights has C = ceil(K / 32) words of each plane, and rows are filled up to tiles of 16:

    words [tiles, width, C, 8, 2]        row 16 t + r + 8 h has its words at [t, plane, c, r, h]

Slot s is field s mod f of word s // f, where f fields lie in a word; word `width` is that of the spare bits,
those of the first word uppermost.

The escapes of row r are those from row_start[r] to row_start[r + 1], ascending by column.

| input                       | what happens                                                            |
|-----------------------------|-------------------------------------------------------------------------|
| many codes beyond the window| many escapes, up to 40 bits a weight; the caller judges `bits_per_weight` |
| rows not a multiple of 16   | words for the others too: one row takes as much as 16                   |
| x infinite, few rows        | x times the 0 in the slot of an escape is NaN                           |
| more than 65,536 columns    | refused                                                                 |
| more than 64 rows of x      | some rows of the weights are decoded at a time, and cuBLAS multiplies   |
"""

from __future__ import annotations

from neuzip.kernels.grid_linear.form import WIDTHS, CodeFields, best_width
from neuzip.kernels.grid_linear.pack import pack
from neuzip.kernels.grid_linear.reference import decode, matmul
from neuzip.kernels.grid_linear.tensor import GridTensor

__all__ = ["WIDTHS", "CodeFields", "GridTensor", "best_width", "decode", "matmul", "pack"]
