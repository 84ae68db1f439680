"""What a ternary product is, in exact integers and one rounding a step: obvious rather than fast.

With codes q and the scale s of a token, weight codes t and scales w:

    one scale a tensor or row   y = float(sum of q t) * (s * w)
    groups                      z = 0; for each group in order: z = z + float(sum of q t in it) * w of it
                                y = z * s
    both                        y = y + bias, then rounded to the dtype of x

Sums are integers; `float` rounds them to fp32, and each product and sum after that is fp32 and rounded by
itself. A token with NaN or infinity is NaN throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import QuantizedTokens, Ternary, squared_relu


def quantize(x: Tensor, activation: str, share: float = 0.5, clamped: bool = False) -> QuantizedTokens:
    """Activations as codes and scales, by the quantiser of that name."""
    if activation == "int8":
        return quantizers.int8_absmax(x, clamped=clamped)
    if activation == "int4":
        return quantizers.int4_absmean(x, clamped=clamped)
    if activation == "fp4":
        return quantizers.fp4_e2m1(x)
    return quantizers.top_k_int8(x, share, clamped=clamped)


def ternary_linear(
    x: Tensor,
    weight: Ternary,
    bias: Tensor | None = None,
    *,
    activation: str = "int8",
    share: float = 0.5,
    clamped: bool = False,
) -> Tensor:
    """[..., in] to [..., out], for weights [out, in]."""
    tokens = quantize(x, activation, share, clamped)
    if weight.group is None or weight.scale.shape[1] == 1:
        scale = tokens.scale * weight.scale.reshape(-1)
        y = _sums(tokens.codes, weight.codes) * scale
    else:
        y = torch.zeros(*x.shape[:-1], weight.codes.shape[0])
        parts = zip(
            torch.split(tokens.codes, weight.group, -1),
            torch.split(weight.codes, weight.group, -1),
            weight.scale.unbind(1),
            strict=True,
        )
        for codes, weights, scale in parts:
            y = y + _sums(codes, weights) * scale
        y = y * tokens.scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def relu2_glu(
    x: Tensor, gate: Ternary, up: Ternary, *, activation: str = "int4", clamped: bool = False
) -> Tensor:
    """squared_relu(gate product) * up product, each rounded to the dtype of x; 0 where the former is 0."""
    squared = squared_relu(ternary_linear(x, gate, activation=activation, clamped=clamped))
    linear = ternary_linear(x, up, activation=activation, clamped=clamped)
    return torch.where(squared == 0, 0, squared * linear)


def _sums(codes: Tensor, weights: Tensor) -> Tensor:
    """Exact sums of products, rounded to fp32."""
    return (codes.long() @ weights.long().T).float()
