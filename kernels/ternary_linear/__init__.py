"""Products of quantised activations with ternary weights: W1.58A8 and W1.58A4 of BitNet b1.58 and a4.8.

Activations become small integers (8 bits; 4 bits; E2M1 numbers, doubled to integers; 8 bits of the largest
half), weights are -1, 0 and 1 in 2 bits each, sums are int32 and exact, and scales come last, in an
order that `reference` fixes: so all implementations give the same bits.

| tokens                    | on a GPU (Triton)                                                          |
|---------------------------|----------------------------------------------------------------------------|
| 1                         | one launch, quantisation included, or two for very many weights            |
| 2 to 64                   | two launches, the first one quantises; weights are read once for 32 tokens |
| more                      | weights are unpacked to int8, some at a time, for int8 tensor cores        |
| any, scales of groups     | as for more tokens: slower than bf16 for one token                         |

On a CPU fp32 matrices do it, which are exact for integers this small: right, not fast.

Kernels for up to 64 tokens load weights before their predecessors in the stream have ended, on GPUs that can
(programmatic dependent launch). So whatever writes the words of a `TernaryWeight` must have completed before
a product is launched: `of` and `to` wait; code that changes words in place has to synchronise.

| input                           | what happens                                            |
|---------------------------------|---------------------------------------------------------|
| a token with NaN or infinity    | NaN throughout                                          |
| in not a multiple of 256        | words for the next multiple; out likewise, of 16        |
| no tokens, no rows, no columns  | an empty result, zeros                                  |
| more than 65,536 columns        | refused                                                 |
| one token, words that begin at  | refused                                                 |
| no multiple of 16 bytes         |                                                         |
"""

from __future__ import annotations

from neuzip.kernels.ternary_linear.ops import Activation, relu2_glu, ternary_linear, ternary_linears

from .weight import TernaryWeight

__all__ = ["Activation", "TernaryWeight", "relu2_glu", "ternary_linear", "ternary_linears"]
