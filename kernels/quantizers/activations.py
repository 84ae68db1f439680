"""Activations as small integers, a scale a token: the inputs of integer matrix products.

Tokens are rows [..., width] of bf16, fp16 or fp32, taken as fp32. A token with a NaN or an infinity gets
codes of 0 and the scale NaN: it dequantises to NaN throughout, and nothing has to wait for the device.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from . import magnitudes
from .magnitudes import quotient

EPSILON = 1e-5
"""Epsilon of the published snippet and of transformers' `bitnet`; the papers print the letter alone."""

SQRT_7 = math.sqrt(7)

ZERO_OF_INT4 = struct.unpack("f", struct.pack("f", 8 / 15))[0]
"""Place of 0 between -8 and 7, as a share of that interval, rounded to fp32."""

SMALLEST = 2.0**-122
"""The smallest peak that FP4 codes tell from 0: a sixteenth of it is a normal number."""


@dataclass(frozen=True, eq=False)
class QuantizedTokens:
    """Activations as integers.

    codes  int8 [..., width]
    scale  fp32 [..., 1], one a token; it multiplies
    """

    codes: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """scale * codes, [..., width], rounded once more if `dtype` is narrower than fp32."""
        return (self.codes * self.scale).to(dtype)


def int8_absmax(x: Tensor, *, epsilon: float = EPSILON, clamped: bool = False) -> QuantizedTokens:
    """gamma / 127 RoundClip(127 / (gamma + epsilon) X, -128, 127), gamma = max(|X|): Q_INT8, equation (3).

    In fp32: codes = round((127 / (gamma + epsilon)) * x), scale = gamma / 127. As printed, the scale has no
    epsilon: tokens of a peak near 1e-5 come back smaller. With `clamped` gamma becomes max(gamma, epsilon) in
    both places and nothing is added, as in the published snippet and in transformers.
    """
    x = _tokens(x, epsilon)
    gamma = magnitudes.largest(x)
    gamma, divisor = _divisor(gamma, epsilon, clamped)
    return QuantizedTokens(_codes(x * quotient(127, divisor), -128, 127), _surfaced(quotient(gamma, 127)))


def int4_absmean(x: Tensor, *, epsilon: float = EPSILON, clamped: bool = False) -> QuantizedTokens:
    """beta / sqrt(7) RoundClip(sqrt(7) / (beta + epsilon) X, -8, 7), beta = mean(|X|): Q_INT4, equation (7).

    In fp32: scale = beta / sqrt(7), beta as `magnitudes.mean_by_fours` has it. To be clipped for nothing,
    codes are found by their place between -8 and 7: with fused multiply-adds codes = round(15 place - 8) and
    place = ((sqrt(7) / 15) / (beta + epsilon)) x + 8 / 15, at least 0 and at most 1, which is right but for
    what is within 2**-19 of the middle between two codes. `clamped` as for `int8_absmax`.
    """
    beta = magnitudes.mean_by_fours(_tokens(x, epsilon))
    beta, divisor = _divisor(beta, epsilon, clamped)
    factor = quotient(SQRT_7 / 15, divisor)
    # In fp64, as torch does not fuse: where that rounds twice, the code is 0 either way.
    place = x.double().mul_(factor).add_(ZERO_OF_INT4).float().clamp_(0, 1).nan_to_num_(ZERO_OF_INT4)
    codes = place.double().mul_(15).sub_(8).round_().to(torch.int8)
    return QuantizedTokens(codes, _surfaced(quotient(beta, SQRT_7)))


def int4_absmax(x: Tensor, *, epsilon: float = EPSILON, clamped: bool = False) -> QuantizedTokens:
    """gamma / 7 RoundClip(7 / (gamma + epsilon) X, -8, 7), gamma = max(|X|): equation (3) with 4 bits.

    The INT4 form that a4.8 compares with absmean (Figure 6) and does not use; the paper prints no equation.
    Codes are -7 to 7: the same numbers as `fp4_e1m2`, but for epsilon and roundings. Arithmetic and `clamped`
    as for `int8_absmax`.
    """
    x = _tokens(x, epsilon)
    gamma, divisor = _divisor(magnitudes.largest(x), epsilon, clamped)
    return QuantizedTokens(_codes(x * quotient(7, divisor), -8, 7), _surfaced(quotient(gamma, 7)))


def fp4_e1m2(x: Tensor) -> QuantizedTokens:
    """Q_FP4(X) of E1M2: the nearest multiple of max(|X|) / 7, equations (8) and (9) with E = 1 and M = 2.

    The bias is b = log2(3.5 / max(|X|)), so 2**b X lies in [-3.5, 3.5], where floor(log2(|X|) + b) is at most
    1 and gamma always 2: E1M2 has equal steps. Codes are -7 to 7 and twice the E1M2 numbers. a4.8 compares it
    with E2M1 (Figure 6) and does not use it.

    In fp32: codes = round((0.875 * x) / (peak / 8)), scale = peak / 7. Tokens of a peak below 2**-122 become
    zeros.
    """
    x = _tokens(x)
    peak = magnitudes.largest(x)
    unseen = peak < SMALLEST
    codes = _codes(torch.where(unseen, 0, (0.875 * x) / (peak / 8)), -7, 7)
    return QuantizedTokens(codes, _surfaced(torch.where(unseen, 0, quotient(peak, 7))))


def fp4_e2m1(x: Tensor) -> QuantizedTokens:
    """Q_FP4(X) of E2M1: the nearest of +-0, 1, 2, 3, 4, 6, 8, 12 twelfths of max(|X|): equations (8) and (9).

    With E = 2 and M = 1 the bias is b = log2(12 / max(|X|)), so y = 2**b X lies in [-12, 12], is rounded to
    integers below 4, to even ones below 8, else to multiples of 4, and 2**-b is the scale. Codes are thus
    twice the E2M1 numbers, and halves go to even mantissas as in hardware conversions.

    In fp32: y = (0.75 * x) / (peak / 16), which for bf16 and fp16 is right to the last half, and scale =
    peak / 12. Tokens of a peak below 2**-122 become zeros. Copies of the paper print the exponent in (8) as
    floor(log2|X|) + b, which is no integer, or floor it twice; the grid is E2M1's for floor(log2|X| + b), as
    in the paper it cites (LLM-FP4, arXiv 2310.16836).
    """
    x = _tokens(x)
    peak = magnitudes.largest(x)
    unseen = peak < SMALLEST
    y = torch.where(unseen, 0, (0.75 * x) / (peak / 16))
    size = y.abs()
    step = 1 + (size >= 4).float() + 2 * (size >= 8).float()
    codes = _codes((y / step).round() * step, -12, 12)
    return QuantizedTokens(codes, _surfaced(torch.where(unseen, 0, quotient(peak, 12))))


def top_k_mask(x: Tensor, share: float = 0.5) -> Tensor:
    """Which activations of a token are among its largest magnitudes: bool [..., width]; M of equation (1).

    k is `share` of the width, to the nearest, halves up, and at least 1. Of equal magnitudes the lowest
    indices come first. Raises ValueError for a share outside (0, 1].
    """
    magnitudes.check_floats(x)
    if not 0 < share <= 1:
        raise ValueError(f"the share of activations that is kept is {share}; it has to be above 0, at most 1")
    width = x.shape[-1]
    if x.numel() == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    count = top_k_count(width, share)
    size = x.abs().float()
    size = size.nan_to_num(torch.inf, torch.inf)  # no order with NaN; its token has no codes anyway
    least = size.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = size > least, size == least
    equal_count = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= equal_count))


def top_k_count(width: int, share: float = 0.5) -> int:
    """How many of `width` activations `top_k_mask` keeps."""
    return max(1, math.floor(share * width + 0.5))


def top_k_int8(
    x: Tensor, share: float = 0.5, *, epsilon: float = EPSILON, clamped: bool = False
) -> QuantizedTokens:
    """Q_INT8(X) with all but the largest magnitudes 0: the input of o_proj, equation (1).

    The largest is always kept, so it is the same whether the mask comes before or after the quantiser.
    """
    tokens = int8_absmax(x, epsilon=epsilon, clamped=clamped)
    return QuantizedTokens(tokens.codes * top_k_mask(x, share), tokens.scale)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)**2, of ReLU2GLU(X) = X W_up^T * squared_relu(X W_gate^T): equation (5)."""
    return x.relu().square()


def _tokens(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    magnitudes.check_floats(x)
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}; it has to be above 0, for tokens of zeros")
    return x.float()


def _divisor(size: Tensor, epsilon: float, clamped: bool) -> tuple[Tensor, Tensor]:
    """The size of a token that its scale is made of, and what its factor divides by."""
    if clamped:
        size = size.clamp(min=epsilon)
        return size, size
    return size, size + epsilon


def _codes(y: Tensor, lowest: int, highest: int) -> Tensor:
    return y.nan_to_num(0).round().clamp(lowest, highest).to(torch.int8)


def _surfaced(scale: Tensor) -> Tensor:
    """The scale, with NaN in place of infinity."""
    return torch.where(scale.isfinite(), scale, torch.nan)
