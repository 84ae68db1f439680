"""What the other files compute, in fp64 and with all logits in memory: to read, and to test against."""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels.packed_linear import ops as packed_linear
from neuzip.kernels.packed_linear.tensor import PackedTensor

from .head import Divergence, Head, TokenStatistics


def logits(head: Head) -> Tensor:
    """All logits, fp64 [N, V]."""
    weight = packed_linear.decode(head.weight) if isinstance(head.weight, PackedTensor) else head.weight
    z = head.hidden.double() @ weight.double().T
    if head.bias is not None:
        z = z + head.bias.double()
    z = z * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def token_statistics(head: Head, target: Tensor, *, ignore_index: int = -100) -> TokenStatistics:
    """The statistics of each token, fp64 and int64 [N]."""
    return _statistics(logits(head), target, ignore_index)


def divergence(
    base: Head, other: Head, target: Tensor, *, ignore_index: int = -100, top_k: int | None = None
) -> Divergence:
    """The definition of the Kullback-Leibler divergence, and the tokens that both rank among their top."""
    z, y = logits(base), logits(other)
    p, log_p, log_q = z.softmax(1), z.log_softmax(1), y.log_softmax(1)
    kld = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(1)
    kld = torch.where(log_q.isnan().any(1) | log_p.isnan().any(1), torch.nan, kld)
    overlap = None
    if top_k is not None:
        both = _top(z, top_k)[:, :, None] == _top(y, top_k)[:, None, :]
        overlap = both.sum((1, 2))
    return Divergence(
        _statistics(z, target, ignore_index), _statistics(y, target, ignore_index), kld, overlap
    )


def _statistics(z: Tensor, target: Tensor, ignore_index: int) -> TokenStatistics:
    log_p = z.log_softmax(1)
    undefined = log_p.isnan().any(1)
    lse = torch.where(undefined, torch.nan, z.logsumexp(1))
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(1)
    counted = target != ignore_index
    at = torch.where(counted, target, 0)[:, None].long()
    target_logit = torch.where(counted, z.gather(1, at)[:, 0], torch.nan)
    rank = torch.where(counted & ~undefined, (z > target_logit[:, None]).sum(1), -1)
    argmax = torch.where(undefined, -1, z.argmax(1))
    return TokenStatistics(lse, target_logit, argmax, entropy.where(~undefined, torch.nan), rank)


def _top(z: Tensor, k: int) -> Tensor:
    """The k largest of each row, of equals the first: columns [N, k]."""
    return z.sort(dim=1, descending=True, stable=True).indices[:, :k]
