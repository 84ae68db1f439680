"""Weights of a uniform grid in codes of a fixed width, 4 to 8 bits, which a product multiplies as they lie.

    packed = pack(weights, grid)     weights: bf16 or fp16 [out, in], values of a kernels.grid.Grid
    ops.linear(x, packed)            x @ weights.T, with these weights bit for bit

READ THIS FIRST. Six things surprise:

1. The tensor chooses the width: the one with the least bits, escapes included. Codes whose entropy is 4 bits
   mostly have 5, as their tails are long.

2. The window of a width is -2^(width - 1) to 2^(width - 1) - 1. A field holds the code plus 2^(width - 1).

3. What is not the value of a code in the window is an *escape*: a number of 32 bits with its place in the
   lower 16, and the weight itself in the upper 16. Its field holds the code 0. Escapes lie by unit, a tile of
   16 rows and a turn of 128 columns. A place is an offset into the weights of the unit as the threads of a
   warp have them: see `escapes`. So a product writes escapes to shared memory, reads them as patches of what
   it has unpacked, and gathers nothing from x, however many escapes there are and wherever they crowd.

4. Groups of 32 slots, words of 16 rows side by side, turns of 128 columns and fillings are those of
   `packed_linear`: slot 4 g + 2 h + e of word 4 t + q is column 128 t + 16 g + 8 h + 2 q + e. So threads of a
   matrix instruction unpack what they have to give to it.

5. A field lies whole in half a word, those of slots 2 j and 2 j + 1 at the same place of both halves: a pair.
   What is left over at the top of the halves, the *spare* bits, is a word or two more when they are put side
   by side:

       width    fields in half a word    spare bits    of all words together
       4        4                        0
       5        3                        1             a word of 1 pair
       6        2                        4             two words of 2 pairs, one of each three words
       7        2                        2             a word of 2 pairs
       8        2                        0

6. A weight is made in one of two ways, and comes out as the container's in both: its step is the product of
   the grid's step, the row's factor and the column's, rounded to fp32 twice; its value is code * step,
   rounded to fp32 and then to the dtype.

   a. Of bf16, up to 7 bits a code, without column factors: by pairs, in bf16 arithmetic. The bits 0x4300
      above a field make the number 128 + u of it. Less 128 and the bias that is the code, and

          fma(code, first, code * second)

      is the weight, where `first` and `second` are two bf16 numbers of the row. Packing tries candidates for
      them until all codes come out right, as they do for all steps that were tried. Codes that do not are
      escapes; if more than 1 weight in 2,048 were, the tensor takes the other way.

   b. Else in fp32. With the exponent of 2^(23 - b) above its bits a field is the number 2^(23 - b) + u, where
      b is its lowest bit. Less 2^(23 - b) and the bias that is the code. The step of a row is an fp32 number,
      and so is the factor of a column; those are stored in the order of the slots.

A row of K weights has C = ceil(K / 32) words of each plane, and rows are filled up to tiles of 16:

    words [tiles, width, C, 8, 2]        row 16 t + r + 8 h has its words at [t, plane, c, r, h]

With f fields in half a word, pair j is field j mod f of word j // f. Words from `width` on are those of the
spare bits, those of the first word uppermost.

The escapes of unit u = tile * turns + turn are those from unit_start[u] to unit_start[u + 1].

| input                       | what happens                                                            |
|-----------------------------|-------------------------------------------------------------------------|
| many codes beyond the window| many escapes, up to 40 bits a weight; the caller judges `bits_per_weight` |
| rows not a multiple of 16   | words for the others too: one row takes as much as 16                   |
| more than 65,536 columns    | refused                                                                 |
| more than 64 rows of x      | some rows of the weights are decoded at a time, and cuBLAS multiplies   |
"""

from __future__ import annotations

from neuzip.kernels.grid_linear.form import WIDTHS, CodeFields, best_width
from neuzip.kernels.grid_linear.packing import pack, pack_rows
from neuzip.kernels.grid_linear.reference import decode, matmul
from neuzip.kernels.grid_linear.tensor import GridTensor

__all__ = ["WIDTHS", "CodeFields", "GridTensor", "best_width", "decode", "matmul", "pack", "pack_rows"]
