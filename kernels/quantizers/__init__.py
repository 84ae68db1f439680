"""The quantisers of BitNet b1.58 and a4.8: floats to small integers and scales, in plain torch.

    weights      absmean, least_squares, exact         codes -1, 0, 1     a scale a tensor, row or group
                 error_feedback                        the same, for what comes in
                 grid_feedback                         integers    a step a tensor, factors a row and column
    activations  int8_absmax, top_k_int8               codes -127 to 127  a scale a token
                 int4_absmean                          codes -8 to 7
                 fp4_e2m1                              codes +-0, 1, 2, 3, 4, 6, 8, 12: twice the E2M1 number
    KV cache     quantize_groups, 1 to 8 bits          codes 0 to 2^b - 1 two bytes a group of a rotated head
                 quantize_heads                        the same       a scale a token and head
    storage      pack, unpack                          b bits a code in 32-bit words
                 pack_ternary, unpack_ternary          2 bits a weight, as `dp4a` takes them
                 pack_trits, unpack_trits              5 weights a byte

Scales multiply: value = scale * code. All arithmetic is fp32, one rounding an operation in the order that a
docstring gives; means are taken in fixed point, exact in any order. Codes and scales therefore have the same
bits on every machine, and a kernel can be compared with them bit for bit.

Rounding is to nearest, halves to even: the papers print round() alone, and the published snippet and
transformers' `bitnet` both call torch.round, which does that.

Sources: BitNet b1.58 (arXiv 2402.17764), BitNet a4.8 (arXiv 2411.04965); equation numbers are the latter's.
"""

from .activations import (
    EPSILON,
    QuantizedTokens,
    fp4_e2m1,
    int4_absmean,
    int8_absmax,
    squared_relu,
    top_k_count,
    top_k_int8,
    top_k_mask,
)
from .grid_feedback import ErrorSpread, grid_feedback
from .hadamard import block_width, hadamard
from .kv import QuantizedHeads, quantize_heads
from .kv_groups import GroupedHeads, group_count, quantize_groups
from .planes import pack, pack_ternary, plane_widths, unpack, unpack_ternary, words
from .ternary import Ternary, absmean, exact, least_squares, scale_for_absmean_reader
from .ternary_feedback import error_feedback
from .trits import pack_trits, unpack_trits

__all__ = [
    "EPSILON",
    "ErrorSpread",
    "GroupedHeads",
    "QuantizedHeads",
    "QuantizedTokens",
    "Ternary",
    "absmean",
    "block_width",
    "error_feedback",
    "exact",
    "fp4_e2m1",
    "grid_feedback",
    "group_count",
    "hadamard",
    "int4_absmean",
    "int8_absmax",
    "least_squares",
    "pack",
    "pack_ternary",
    "pack_trits",
    "plane_widths",
    "quantize_groups",
    "quantize_heads",
    "scale_for_absmean_reader",
    "squared_relu",
    "top_k_count",
    "top_k_int8",
    "top_k_mask",
    "unpack",
    "unpack_ternary",
    "unpack_trits",
    "words",
]
