"""The difference of two states of tensors, most of whose weights are equal: made and applied quickly.

Between two steps of training with small learning rates a few percent of the bf16 weights change, most of them
by one unit of the last place. Tensors are cut into blocks of 4,096 weights. A block stores the places of its
changed weights in the code of Elias and Fano, a sign and a flag each, and in a few bits what the flagged ones
changed by. All parts of a block have fixed widths, so that a GPU writes and reads every weight at once.

Differences are those of bit patterns, modulo 2^b for weights of b bits: any dtype of 8, 16, 32 or 64 bits,
NaN payloads and both zeros included. formats/SPEC.md has the layout.
"""

from neuzip.kernels.sparse_delta.blocks import BlockMap, CodedDelta
from neuzip.kernels.sparse_delta.ops import CheckedDelta, apply, changed, check, digest, encode

__all__ = ["BlockMap", "CheckedDelta", "CodedDelta", "apply", "changed", "check", "digest", "encode"]
