"""Keys and values of attention in few bits, and attention for one new token that reads them as they lie.

A layer has two `Heads`, one of keys and one of values, with capacity for N tokens of B texts. There are two
forms. With a `group`, heads are rotated by a Hadamard transform, and groups of their numbers have a scale and
a zero point (quantizers.kv_groups):

    words       int32 [B, H, N, words]     the codes of each head, as quantizers.pack packs them
    scale       uint8 [B, H, N, groups]    a scale byte a group
    zero        int8 [B, H, N, groups]     the middle of a group
    first       [B, H, whole, width]       the first tokens of each text as they are, to which most attention
                                           of trained models goes (attention sinks: arXiv 2309.17453)
    center      fp32 [B, H, width]         what is subtracted from later tokens before they are rotated
    path        CenterPath                 the channels that have a center, and how positions turn it

The center is the mean of the whole tokens, the very first left out, in those channels of keys that positions
turn slowly. A channel that is far from 0 in all tokens then no longer widens the range of its group. The
rotary embedding turns what keys have in common on and on: each block of tokens subtracts the center turned to
the middle of the block, which needs no memory of its own. Attention adds the product of the query and that
center to the logits of a block.

The plain form, of BitNet a4.8 (section 3.1), has no group:

    words       int32 [B, H, N, words]
    scale       [B, H, N, 1]               a scale a token and head
    first_bits  int32 [B, H, words]        3 bits only: a fourth bit of a text's first token (bos), whose
                                           lower three lie with those of the others; 1 bit a code

`first`, an argument of the functions, says which token is the first of each text, counted from the begin of
the memory; negative where it is no longer there.

`store` quantises and packs, `load` unpacks: the same bits on a GPU and on a CPU, of many tokens and one by
one. `attend` is softmax attention of one query a text. They choose by where the tensors lie: Triton on a GPU,
plain torch on a CPU.

With groups of 32 a head of 128 numbers takes 56 bytes in 3 bits, scales included, 72 in 4 and 136 in 8 (in
the plain form 50, 66 and 130); in bf16 it takes 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuzip.kernels.kv_cache import ops as torch_ops
from neuzip.kernels.kv_cache import reference
from neuzip.kernels.kv_cache.centers import CenterPath
from neuzip.kernels.kv_cache.ops import EXTRA_BIT, Heads, empty

__all__ = ["EXTRA_BIT", "CenterPath", "Heads", "attend", "empty", "load", "store"]


def store(
    heads: Sequence[Heads],
    states: Sequence[Tensor],
    at: int | Tensor,
    first: Tensor,
    *,
    with_first: bool = True,
) -> None:
    """Quantise keys and values, [B, H, T, width] each, and write them to the tokens from `at` on.

    `at` is a number, or int64 on the device, the first of which counts.
    `first` int64 [B]; without `with_first` none of the tokens is among those at the begin of its text that
    are stored otherwise. Nobody waits for a GPU. On a GPU Triton does it, in one launch if all `states` have
    one shape, else torch.
    """
    if first.is_cuda:
        from neuzip.kernels.kv_cache.triton.store import store as on_gpu

        on_gpu(heads, states, at, first)
    else:
        for one, x in zip(heads, states, strict=True):
            torch_ops.store(one, x, at, first, with_first=with_first)


def load(heads: Heads, first: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of all tokens, [B, H, N, width]: in fp32, one rounding an operation, then in `dtype`."""
    if heads.words.is_cuda:
        from neuzip.kernels.kv_cache.triton.load import load as on_gpu

        return on_gpu(heads, first, dtype)
    return torch_ops.load(heads, first, dtype)


def attend(
    query: Tensor,
    keys: Heads,
    values: Heads,
    first: Tensor,
    *,
    scaling: float,
    length: int | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(scaling query keys^T + mask) values for one query: [B, H', D] to [B, H', D'] in its dtype.

    H' is a multiple G of H: the queries h G to h G + G - 1 share a head. `length` tokens are there, a number
    or int64 [] on the device. `mask` [B or 1, N or more] is bool, True where a token counts, or is added.
    On a GPU Triton does it, in two steps that give the same bits each time, else torch, on dequantised
    numbers.
    """
    if query.is_cuda:
        from neuzip.kernels.kv_cache.triton import attend as triton_attend
        from neuzip.kernels.kv_cache.triton import attend_mma as triton_fragments

        narrow = triton_fragments.fits(query, keys, values)
        on_gpu = triton_fragments.attend if narrow else triton_attend.attend
        return on_gpu(query, keys, values, first, scaling=scaling, length=length, mask=mask)
    return reference.attend(query, keys, values, first, scaling=scaling, length=length, mask=mask)
