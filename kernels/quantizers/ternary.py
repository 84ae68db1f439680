"""Weights as -1, 0 and 1 times a scale.

A scale belongs to the whole tensor (`group=None`, as in b1.58), or to `group` neighbours of a row (the row's
last group may be shorter); `group` = the width of the rows gives one scale a row.

Taking the absmean twice: the mean magnitude of alpha * T is alpha * density, density being the share of codes
that are not 0, so a reader that quantises again (transformers' online mode, llama.cpp's BitNet converter,
bitnet.cpp's preprocessing) finds the codes but a smaller scale. `scale_for_absmean_reader` gives the scale to
write for it. The least-squares scale of alpha * T is alpha again and needs no such care.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import magnitudes
from .activations import EPSILON
from .magnitudes import AT_A_TIME

COUNTED = 1 << 15
"""Weights from which on a row of 16-bit floats is counted by pattern: there are no more patterns."""

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From rows [R, n] to codes [R, n] and scales [R, 1]."""


@dataclass(frozen=True, eq=False)
class Ternary:
    """Ternary weights [..., in].

    codes  int8 [..., in], -1, 0 or 1
    scale  fp32, [] for the whole tensor, else [..., groups]; it multiplies. 0 where all weights are 0
    group  weights that share a scale, or None
    """

    codes: Tensor
    scale: Tensor
    group: int | None = None

    def spread(self) -> Tensor:
        """The scale of each weight: fp32 [..., in], or [] for one scale."""
        if self.group is None:
            return self.scale
        return self.scale.repeat_interleave(self.group, -1)[..., : self.codes.shape[-1]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale * codes, [..., in], rounded once if `dtype` is narrower than fp32."""
        return (self.codes * self.spread()).to(dtype)


def absmean(
    weight: Tensor, *, group: int | None = None, epsilon: float = EPSILON, clamped: bool = False
) -> Ternary:
    """Q_w(W) = alpha RoundClip(W / (alpha + epsilon), -1, 1), alpha = mean(|W|): equation (2).

    weight [..., in], bf16, fp16 or fp32. A weight is not 0 where 2 |w| > alpha + epsilon; equality is a half,
    and goes to 0. The papers print no value for epsilon; 1e-5 is the published snippet's. With `clamped`
    alpha becomes max(alpha, epsilon) and nothing is added, as in that snippet and in transformers.

    Raises ValueError for NaN and infinities, TypeError for other dtypes.
    """
    _check_epsilon(epsilon)

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        alpha = magnitudes.mean(x)
        alpha = alpha.clamp(min=epsilon) if clamped else alpha
        return _codes(x, (alpha.double() + (0 if clamped else epsilon)) / 2), alpha

    return _quantize(weight, group, rows)


def least_squares(weight: Tensor, *, group: int | None = None) -> Ternary:
    """The codes T and the scale a that minimise the sum of (W - a T)**2, over all codes and scales.

    weight [..., in], bf16, fp16 or fp32. For k weights that are not 0 the best are the k largest, of sum S_k,
    with a = S_k / k, and what remains is sum W**2 - S_k**2 / k: the largest S_k**2 / k is looked for among
    all k. It is where alternating between the best scale and rounding W / a, halves away from 0, stops too,
    but alternation may stop elsewhere first.

    Raises ValueError for NaN and infinities, TypeError for other dtypes.
    """
    return _quantize(weight, group, _least_squares)


def exact(weight: Tensor, *, group: int | None = None) -> Ternary | None:
    """The ternary form of weights that are -s, +0 and s already, bit for bit; None if there is another.

    weight [..., in], bf16, fp16 or fp32. Negative zeros would come back positive, so they count as another.
    """
    magnitudes.check_floats(weight)
    if not bool(weight.isfinite().all()) or bool(((weight == 0) & weight.signbit()).any()):
        return None
    ternary = _quantize(weight, group, lambda x: (x.sign().to(torch.int8), magnitudes.largest(x)))
    return ternary if torch.equal(ternary.dequantize(weight.dtype), weight) else None


def scale_for_absmean_reader(ternary: Ternary, dtype: torch.dtype = torch.float32) -> Tensor:
    """The scale to store, alpha / density, for a reader that takes the absmean of `scale * codes` in `dtype`.

    Of `dtype`, in the shape of the scales. Rounding to `dtype` comes first, so the reader's alpha is this
    times the density: off from ours by half a unit in the last place of `dtype`, and for fp32 of one more.
    Weights of zeros only keep the scale 0.
    """
    codes, group = ternary.codes, ternary.group
    parts = [codes.reshape(-1)] if group is None else torch.split(codes, group, -1)
    number = torch.stack([(part != 0).sum(-1) for part in parts], -1).reshape(ternary.scale.shape)
    weights = torch.tensor([part.shape[-1] for part in parts], device=codes.device)
    weights = weights[0] if group is None else weights
    return torch.where(number > 0, ternary.scale.double() * weights / number, 0).to(dtype)


def _quantize(weight: Tensor, group: int | None, quantizer: Quantizer) -> Ternary:
    """Apply a quantiser of rows to the tensor as one row, or to its groups."""
    magnitudes.check_floats(weight)
    if not bool(weight.isfinite().all()):
        raise ValueError("the weights hold NaN or infinity, which has no ternary form")
    if group is None:
        codes, scale = quantizer(weight.reshape(1, -1))
        return Ternary(codes.reshape(weight.shape), scale.reshape(()))
    if group < 1:
        raise ValueError(f"a group has at least one weight, not {group}")
    whole = weight.shape[-1] // group * group
    parts = [torch.unflatten(weight[..., :whole], -1, (whole // group, group)), weight[..., None, whole:]]
    done = [_blocks(part, quantizer) for part in parts if part.shape[-2] and part.shape[-1]]
    codes = torch.cat(
        [weight.new_empty((*weight.shape[:-1], 0), dtype=torch.int8), *(c for c, _ in done)], -1
    )
    scale = torch.cat(
        [weight.new_empty((*weight.shape[:-1], 0), dtype=torch.float32), *(s for _, s in done)], -1
    )
    return Ternary(codes, scale, group)


def _blocks(groups: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Codes [..., G n] and scales [..., G] of groups [..., G, n], some million weights at a time."""
    n = groups.shape[-1]
    blocks = [quantizer(block) for block in torch.split(groups.reshape(-1, n), max(1, AT_A_TIME // n))]
    codes = torch.cat([c for c, _ in blocks]).reshape(*groups.shape[:-2], groups.shape[-2] * n)
    return codes, torch.cat([s for _, s in blocks]).reshape(groups.shape[:-1])


def _codes(rows: Tensor, threshold: Tensor) -> Tensor:
    """The sign where the magnitude is above the threshold, fp64 [R, 1]; else 0."""
    codes = torch.empty_like(rows, dtype=torch.int8)
    for part, out in zip(torch.split(rows, AT_A_TIME, -1), torch.split(codes, AT_A_TIME, -1), strict=True):
        wide = part.double()
        out.copy_((wide > threshold).to(torch.int8) - (wide < -threshold).to(torch.int8))
    return codes


def _least_squares(rows: Tensor) -> tuple[Tensor, Tensor]:
    n = rows.shape[-1]
    if n == 0:
        return rows.to(torch.int8), magnitudes.largest(rows)
    levels, counts = _levels(rows)
    unit = magnitudes.unit(magnitudes.largest(rows), n)
    sums = (levels.double() * unit).long() * counts  # fixed point: the same in any order
    number = counts.cumsum(-1).clamp(min=1)
    gain = sums.cumsum(-1).double().square() / number
    lowest = levels.gather(-1, gain.argmax(-1, keepdim=True))
    chosen = levels >= lowest  # equal magnitudes have equal codes
    total = torch.where(chosen, sums, 0).sum(-1, keepdim=True)
    number = torch.where(chosen, counts, 0).sum(-1, keepdim=True).clamp(min=1)
    scale = (total.double() / unit / number).float()
    below = torch.nextafter(lowest, torch.zeros_like(lowest))
    return _codes(rows, below.double()), scale


def best_scale(rows: Tensor) -> Tensor:
    """The scale that `least_squares` gives each row, fp32 [R, 1]."""
    return _least_squares(rows)[1]


def _levels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes in descending order, fp32 [R, m], and how many weights have each, int64 [R, m] or [1, 1].

    A long row of 16-bit floats is counted by pattern; all else is sorted.
    """
    if rows.shape[0] > 1 or rows.shape[1] < COUNTED or rows.dtype == torch.float32:
        levels = rows.abs().sort(-1, descending=True).values.float()
        return levels, torch.ones_like(levels, dtype=torch.int64)
    patterns = 1 << 15  # without signs
    counts = torch.zeros(patterns, dtype=torch.int64, device=rows.device)
    for part in torch.split(rows[0], AT_A_TIME):
        counts += part.abs().view(torch.int16).long().bincount(minlength=patterns)
    every = torch.arange(patterns, dtype=torch.int16, device=rows.device).view(rows.dtype).float()
    finite = every.isfinite()
    return every[finite].flip(0)[None], counts[finite].flip(0)[None]


def _check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}; it has to be above 0, for weights of zeros")
