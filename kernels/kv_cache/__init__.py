"""Keys and values of attention in few bits, and attention for one new token that reads them as they lie.

A layer has two `Heads`, one of keys and one of values, with capacity for N tokens of B texts:

    words       int32 [B, H, N, words]     the codes of each head, as quantizers.pack packs them
    scale       [B, H, N]                  a scale a token and head
    low         [B, H, N] or None          what code 0 stands for, with the span "minmax"
    first_bits  int32 [B, H, words]        3 bits only: a fourth bit of a text's first token

With 3 bits the first token of a text (bos) has codes of 4, as in BitNet a4.8 (section 3.1): the lower three
lie with those of the others, the fourth in `first_bits`, packed with 1 bit a code. `first` says which
token that is, for each text, counted from the begin of the memory; negative where it is no longer there.

`store` quantises and packs, `load` unpacks: the same bits on a GPU and on a CPU. `attend` is softmax
attention of one query a text. They choose by where the tensors lie: Triton on a GPU, plain torch on a CPU.

A head of 128 numbers takes 50 bytes in 3 bits, scale included, 66 in 4 and 130 in 8; in bf16 it takes 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuzip.kernels.kv_cache import ops as torch_ops
from neuzip.kernels.kv_cache import reference
from neuzip.kernels.kv_cache.ops import EXTRA_BIT, Heads, empty

__all__ = ["EXTRA_BIT", "Heads", "attend", "empty", "load", "store"]


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
    `first` int64 [B]; without `with_first` none of the tokens is the first of its text. Nobody waits for a
    GPU. On a GPU Triton does it, all `states` in one launch if all `heads` have one layout, else torch.
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
    or int64 [] on the device. `mask` [B or 1, N or more] is bool, True where a token counts, or is added. On
    a GPU Triton does it, in two steps that give the same bits each time, else torch on dequantised numbers.
    """
    if query.is_cuda:
        from neuzip.kernels.kv_cache.triton import attend as triton_attend
        from neuzip.kernels.kv_cache.triton import attend_mma as triton_fragments

        narrow = triton_fragments.fits(query, keys, values)
        on_gpu = triton_fragments.attend if narrow else triton_attend.attend
        return on_gpu(query, keys, values, first, scaling=scaling, length=length, mask=mask)
    return reference.attend(query, keys, values, first, scaling=scaling, length=length, mask=mask)
