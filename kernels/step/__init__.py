"""What models of transformers do between products in many small kernels, in one kernel each, bit for bit.

A step of decoding lasts some milliseconds and consists of a thousand kernels, most of which do nothing but
begin and end. An RMS norm is 8 of them, rotary embeddings are 10; here they are one. And where the largest of
a hundred thousand numbers is, torch finds out in one block.

    rms_norm     x [..., N] by its root mean square, times a weight [N], in one of the ways of NORMS
    rotated      queries and keys [B, H, T, width], turned by cos and sin [B, T, width]
    gated        silu(gate) * up, of tensors of one shape
    largest      where the largest number of each row of [B, N] is, int64 [B], as Tensor.argmax says
    store        keys and values [B, H, T, width] to some places of rooms [B, H, N, width]

Every rounding that torch makes is made here. What is left is the order in which a GPU of torch adds the
squares up: `reference` says what it is, and `rms_norm` follows it. It is torch's to change; whoever wants the
same bits asks whether they are the same, as `runtime.fused_step` does.

Sources: RMS norm, arXiv 1910.07467, equation (4); rotary embeddings, arXiv 2104.09864, equation (34); gated
units, arXiv 2002.05202, equation (6).
"""

from __future__ import annotations

from .reference import NORMS, Norm, can_find, can_gate, can_norm, can_rotate

__all__ = ["NORMS", "Norm", "can_find", "can_gate", "can_norm", "can_rotate"]
