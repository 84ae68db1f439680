"""What goes in and what comes out: a linear head, statistics of its logits, and how two heads differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.kernels.packed_linear.tensor import PackedTensor

DTYPES = torch_dtypes_for("head")


@dataclass(frozen=True, eq=False)
class Head:
    """Hidden states and the weights that turn them into logits, which are never all in memory:

        x = scale * (hidden @ weight.T + bias)        z = x, or softcap * tanh(x / softcap)

    hidden  [N, D], bf16, fp16 or fp32, of any strides
    weight  [V, D], the same dtype, of any strides; or packed, and then decoded some rows at a time
    bias    [V], the same dtype or fp32

    Raises TypeError for other dtypes, ValueError for shapes and devices that do not go together.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | PackedTensor
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        hidden, weight, bias = self.hidden, self.weight, self.bias
        if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype:
            raise TypeError(
                "hidden states and weights are both bf16, fp16 or fp32, "
                f"not {hidden.dtype} and {weight.dtype}"
            )
        if bias is not None and bias.dtype not in (hidden.dtype, torch.float32):
            raise TypeError(f"the bias is {bias.dtype}; it has to be {hidden.dtype} or torch.float32")
        if hidden.dim() != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(
                "hidden states are [N, D] and weights [V, D], "
                f"not {tuple(hidden.shape)} and {tuple(weight.shape)}"
            )
        if bias is not None and bias.shape != (weight.shape[0],):
            raise ValueError(f"the bias has shape {tuple(bias.shape)}, for {weight.shape[0]} rows of weights")
        for name, one in (("weights", weight), ("bias", bias)):
            if one is not None and one.device != hidden.device:
                raise ValueError(f"the {name} are on {one.device}, the hidden states on {hidden.device}")
        if weight.shape[0] == 0:
            raise ValueError("a head needs at least one row of weights")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; it has to be above 0, or None")

    @property
    def tokens(self) -> int:
        """N, rows of hidden states."""
        return self.hidden.shape[0]

    @property
    def vocabulary(self) -> int:
        """V, rows of weights."""
        return self.weight.shape[0]


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """What a head says about each token: arrays [N]. Logits and sums are fp32, never rounded to bf16.

    A logit of minus infinity is a token that cannot come. Where a logit is NaN or plus infinity, or none is
    finite, `lse` and `entropy` are NaN, and `argmax` and `rank` are -1.

    lse           log of the sum of exponentials of the logits, nats
    target_logit  NaN where the target is ignored
    argmax        int64, the first of the largest logits
    entropy       nats
    rank          int64, how many logits are larger than the target's: 0 is the top; -1 where it is ignored
    """

    lse: torch.Tensor
    target_logit: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    rank: torch.Tensor

    @property
    def nll(self) -> torch.Tensor:
        """Negative log-likelihood of the targets, fp32 [N], nats; NaN where ignored."""
        return self.lse - self.target_logit


@dataclass(frozen=True, eq=False)
class Divergence:
    """How a head differs from a base, token by token, over the whole vocabulary.

    kld      fp32 [N], KL(base || other) in nats, never negative; exactly 0 where all logits have the same
             bits, infinite where a token has a probability of 0 for the other alone
    overlap  int64 [N], how many of the `top_k` largest logits both have in common; None if not asked for
    """

    base: TokenStatistics
    other: TokenStatistics
    kld: torch.Tensor
    overlap: torch.Tensor | None


def check_targets(head: Head, target: torch.Tensor) -> None:
    """Raise TypeError or ValueError for targets that are not int64 or int32 [N] beside the hidden states."""
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets are int64 or int32, not {target.dtype}")
    if target.shape != (head.tokens,) or target.device != head.hidden.device:
        raise ValueError(
            f"targets are {tuple(target.shape)} on {target.device}, for {head.tokens} hidden states on "
            f"{head.hidden.device}"
        )


def check_pair(base: Head, other: Head, top_k: int | None) -> None:
    """Raise ValueError for heads that cannot be compared."""
    if (base.tokens, base.vocabulary) != (other.tokens, other.vocabulary):
        raise ValueError(
            f"the base has {base.tokens} tokens and a vocabulary of {base.vocabulary}, "
            f"the other {other.tokens} and {other.vocabulary}"
        )
    if base.hidden.device != other.hidden.device:
        raise ValueError(f"the base is on {base.hidden.device}, the other on {other.hidden.device}")
    if top_k is not None and not 1 <= top_k <= base.vocabulary:
        raise ValueError(f"top_k is {top_k}, of a vocabulary of {base.vocabulary}")
