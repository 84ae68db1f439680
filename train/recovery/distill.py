"""What a student loses against its teacher: divergence of logits, cross-entropy, distance of hidden states.

`head_loss` has its gradients as soon as it has the loss, some tokens at a time, so that the logits of a batch
are never all in memory. (The kernel of `linear_cross_entropy.divergence` has no gradients.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS = 64 << 20
"""Most logits of each model in memory at once: 256 MB in fp32."""


@dataclass(frozen=True)
class LossWeights:
    """The weights of the terms of a loss.

    divergence     of T^2 KL(teacher || student), logits divided by the temperature T (Hinton et al. 2015)
    cross_entropy  of the loss against the text
    hidden         of |h_s - h_t|^2 / |h_t|^2, the mean over layers, after each of them
    """

    divergence: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class HeadLosses:
    """Means over tokens: `total` has gradients, the others are what it was made of, T^2 left out."""

    total: Tensor
    divergence: Tensor
    cross_entropy: Tensor


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    of_teacher: Tensor,
    weight_of_teacher: Tensor,
    targets: Tensor,
    weights: LossWeights,
    rows: int | None = None,
) -> HeadLosses:
    """The losses of logits hidden @ weight.T against those of the teacher and against targets.

    hidden [N, D] and weight [V, D], fp32; of_teacher [N, D'] and its weight [V, D'], of any dtype; targets
    int64 [N]. Products are fp32, on a GPU of TF32 inputs. `rows` tokens are worked on at a time.
    """
    rows = rows or max(1, LOGITS // weight.shape[0])
    return HeadLosses(
        *_HeadLoss.apply(hidden, weight, of_teacher, weight_of_teacher, targets, weights, rows)  # type: ignore[no-untyped-call]
    )


class _HeadLoss(torch.autograd.Function):
    """Loss and gradients in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        of_teacher: Tensor,
        weight_of_teacher: Tensor,
        targets: Tensor,
        weights: LossWeights,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = hidden.new_zeros(2, dtype=torch.float64)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        wide = weight_of_teacher.float()
        with torch.autocast(hidden.device.type, enabled=False), _tf32(hidden.is_cuda):
            for own in _slices(hidden.shape[0], rows):
                logits = hidden[own] @ weight.T
                base = of_teacher[own].float() @ wide.T
                losses, gradient = _of_logits(logits, base, targets[own], weights)
                sums += losses
                gradient /= hidden.shape[0]
                of_hidden[own] = gradient @ weight
                of_weight += gradient.T @ hidden[own]
        ctx.save_for_backward(of_hidden, of_weight)
        divergence, cross_entropy = (sums / hidden.shape[0]).float().unbind()
        scale = weights.divergence * weights.temperature**2
        total = scale * divergence + weights.cross_entropy * cross_entropy
        ctx.mark_non_differentiable(divergence, cross_entropy)
        return total, divergence, cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradients[0], of_weight * gradients[0], None, None, None, None, None


def _of_logits(logits: Tensor, base: Tensor, targets: Tensor, weights: LossWeights) -> tuple[Tensor, Tensor]:
    """Sums of both losses, fp64 [2], and the gradient of the weighted sum for the logits [n, V]."""
    t = weights.temperature
    ours, theirs = ((x / t).log_softmax(-1) for x in (logits, base))
    teacher = theirs.exp()
    divergence = torch.linalg.vecdot(teacher, theirs - ours).double().sum()
    gradient = (ours.exp() - teacher).mul_(weights.divergence * t)
    plain = ours if t == 1 else logits.log_softmax(-1)
    picked = targets[:, None]
    cross_entropy = -plain.gather(1, picked).double().sum()
    if weights.cross_entropy:
        gradient.add_(plain.exp(), alpha=weights.cross_entropy)
        gradient.scatter_add_(1, picked, gradient.new_full(picked.shape, -weights.cross_entropy))
    return torch.stack([divergence, cross_entropy]), gradient


def hidden_loss(states: Sequence[Tensor], of_teacher: Sequence[Tensor]) -> Tensor:
    """The mean over layers of |h_s - h_t|^2 / |h_t|^2; a layer's states are [..., D], in fp32 here."""
    distances = [
        (own.float() - other.float()).square().sum() / other.float().square().sum()
        for own, other in zip(states, of_teacher, strict=True)
    ]
    return torch.stack(distances).mean()


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """fp32 products of a GPU round their inputs to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
