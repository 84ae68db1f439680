"""The operators `neuzip::token_statistics` and `neuzip::head_divergence`, for torch.compile and CUDA graphs.

A head is told in a schema as its hidden states, the arrays of its weights (the matrix, or what is packed) and
the numbers of a packed form (none, or its columns, low_bits, base and shift), bias, softcap and scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neuzip.kernels.linear_cross_entropy.head import (
    Divergence,
    Head,
    TokenStatistics,
    check_pair,
    check_targets,
)
from neuzip.kernels.packed_linear.tensor import PackedTensor

WORKSPACE = 64 << 20
"""Bytes that a GPU may use beside its inputs and results, if nothing else is asked for."""


def token_statistics(
    head: Head, target: Tensor, *, ignore_index: int = -100, workspace: int = WORKSPACE
) -> TokenStatistics:
    """What `head` says of each token, without its logits ever being in memory; see `TokenStatistics`.

    target     int64 or int32 [N]; `ignore_index` is no target
    workspace  bytes on a GPU beside inputs and results; if that is too little for one tile of logits a token,
               more. Packed weights are decoded into as many again.

    On a CPU torch in fp32, on a GPU Triton, with fp32 sums: the same results in every run. No gradients flow.
    Raises TypeError and ValueError for targets that do not fit the head. A target outside the vocabulary
    raises IndexError on a CPU; on a GPU, where nobody waits for it, its logit is NaN and its rank -1.
    """
    check_targets(head, target)
    return TokenStatistics(
        *torch.ops.neuzip.token_statistics(*_arguments(head), target, ignore_index, workspace)
    )


def divergence(
    base: Head,
    other: Head,
    target: Tensor,
    *,
    ignore_index: int = -100,
    top_k: int | None = None,
    workspace: int = WORKSPACE,
) -> Divergence:
    """How `other` differs from `base` over the whole vocabulary, in one pass over both; see `Divergence`.

    Both have as many tokens and the same vocabulary, else ValueError; D and the dtype may differ. The rest is
    as for `token_statistics`.
    """
    check_targets(base, target)
    check_pair(base, other, top_k)
    arrays = torch.ops.neuzip.head_divergence(
        *_arguments(base), *_arguments(other), target, ignore_index, top_k or 0, workspace
    )
    overlap = arrays[11] if top_k else None
    return Divergence(TokenStatistics(*arrays[:5]), TokenStatistics(*arrays[5:10]), arrays[10], overlap)


def _arguments(head: Head) -> tuple[Any, ...]:
    """A head as the operators take it."""
    hidden, weight, bias = head.hidden.detach(), head.weight, head.bias
    if isinstance(weight, PackedTensor):
        arrays = list(weight.arrays)
        packed = [weight.shape[1], weight.low_bits, weight.base, weight.shift]
    else:
        arrays, packed = [weight.detach()], []
    return hidden, arrays, packed, None if bias is None else bias.detach(), head.softcap, head.scale


def _head(
    hidden: Tensor,
    arrays: list[Tensor],
    packed: list[int],
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
) -> Head:
    """The inverse of `_arguments`."""
    weight: Tensor | PackedTensor = arrays[0]
    if packed:
        columns, *numbers = packed
        weight = PackedTensor.of_arguments(*arrays, columns, hidden.dtype, *numbers)
    return Head(hidden, weight, bias, softcap, scale)


def _schema(suffix: str) -> str:
    return (
        f"Tensor hidden{suffix}, Tensor[] weight{suffix}, SymInt[] packed{suffix}, Tensor? bias{suffix}, "
        f"float? softcap{suffix}, float scale{suffix}"
    )


_HEAD = 6
_STATISTICS = "Tensor, Tensor, Tensor, Tensor, Tensor"


@torch.library.custom_op(
    "neuzip::token_statistics",
    mutates_args=(),
    schema=f"({_schema('')}, Tensor target, SymInt ignore_index, SymInt workspace) -> ({_STATISTICS})",
)
def _token_statistics(*arguments):  # type: ignore[no-untyped-def]
    head = _head(*arguments[:_HEAD])
    target, ignore_index, workspace = arguments[_HEAD:]
    with torch.autocast(head.hidden.device.type, enabled=False):  # logits are fp32 whatever is asked for
        if _on_gpu(head):
            from neuzip.kernels.linear_cross_entropy.triton import forward as triton_forward

            statistics = triton_forward.token_statistics(head, target, ignore_index, workspace)
        else:
            from neuzip.kernels.linear_cross_entropy import cpu

            statistics = cpu.token_statistics(head, target, ignore_index)
    return _arrays(statistics)


@_token_statistics.register_fake
def _(hidden, *_):  # type: ignore[no-untyped-def]
    return _like_statistics(hidden)


@torch.library.custom_op(
    "neuzip::head_divergence",
    mutates_args=(),
    schema=f"({_schema('')}, {_schema('_other')}, Tensor target, SymInt ignore_index, SymInt top_k, "
    f"SymInt workspace) -> ({_STATISTICS}, {_STATISTICS}, Tensor, Tensor)",
)
def _divergence(*arguments):  # type: ignore[no-untyped-def]
    base, other = _head(*arguments[:_HEAD]), _head(*arguments[_HEAD : 2 * _HEAD])
    target, ignore_index, top_k, workspace = arguments[2 * _HEAD :]
    with torch.autocast(base.hidden.device.type, enabled=False):
        if _on_gpu(base):
            from neuzip.kernels.linear_cross_entropy.triton import divergence as triton_divergence

            result = triton_divergence.divergence(base, other, target, ignore_index, top_k or None, workspace)
        else:
            from neuzip.kernels.linear_cross_entropy import cpu

            result = cpu.divergence(base, other, target, ignore_index, top_k or None)
    overlap = target.new_empty(0, dtype=torch.int64) if result.overlap is None else result.overlap
    return *_arrays(result.base), *_arrays(result.other), result.kld, overlap


@_divergence.register_fake
def _(hidden, *rest):  # type: ignore[no-untyped-def]
    top_k = rest[-2]
    overlap = hidden.new_empty(hidden.shape[0] if top_k else 0, dtype=torch.int64)
    both = *_like_statistics(hidden), *_like_statistics(hidden)
    return *both, hidden.new_empty(hidden.shape[0], dtype=torch.float32), overlap


def _like_statistics(hidden: Tensor) -> tuple[Tensor, ...]:
    """Empty arrays like those of `TokenStatistics`."""
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32, torch.int64)
    return tuple(hidden.new_empty(hidden.shape[0], dtype=dtype) for dtype in dtypes)


def _arrays(statistics: TokenStatistics) -> tuple[Tensor, ...]:
    s = statistics
    return s.lse, s.target_logit, s.argmax, s.entropy, s.rank


def _on_gpu(head: Head) -> bool:
    """Whether Triton does the work; torch does it on a CPU. Raises ValueError for other devices."""
    device = head.hidden.device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"a head is on a CUDA device or on the CPU, not on {device}")
    return device.type == "cuda"
