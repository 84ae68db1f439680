"""Linear layers that compute in their forward pass as ternary ones do, and whose weights can be trained.

The weights are latent: fp32 numbers, of which the product sees codes and a scale only. Gradients pass the
quantisers of weights and of inputs, and the choice of the largest inputs, as if these were the identity
(straight-through estimator: Bengio et al. 2013, arXiv 1308.3432; BitNet b1.58 and a4.8 train so).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuzip.kernels.quantizers import QuantizedTokens, Ternary, top_k_count
from neuzip.kernels.ternary_linear.reference import quantize
from neuzip.runtime.activations import ACTIVATIONS, CLAMPED

Group = Literal["row"] | None

Quantizer = Callable[[Tensor], QuantizedTokens]

MARGIN = 0.05
"""Least distance of a latent weight from the ends of its code's range at the start, in scales."""

LEAST_TOKENS = 17
"""Least tokens of torch's int8 product on a GPU. The other sizes must be multiples of 8."""


class LatentLinear(nn.Module):
    """y = Q(x) W_q^T + bias, W_q = s * codes: code 1 where a latent weight is above s / 2, -1 below -s / 2.

    weight      [out, in], latent; fp32 unless `latent_dtype` says otherwise
    log_scale   of a scale that is learned, fp32 [] or [out, 1]; None: s is the mean magnitude of the latent
                weights, as in BitNet b1.58, of all or of a row
    activation  one of `activations.ACTIVATIONS`, or a quantiser that only training has
    strength    lambda of the warm-up, 0 to 1: x + lambda (Q(x) - x) is multiplied with W + lambda (W_q - W)
    dtype       what the checkpoint has; scales are of its values

    With strength 1 the result has the bits of `bitlinear.BitLinear`, and so has what is stored.
    """

    log_scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        start: Ternary | None = None,
        learned: bool = False,
        group: Group = None,
        activation: str | Quantizer = "int8",
        dtype: torch.dtype = torch.bfloat16,
        latent_dtype: torch.dtype = torch.float32,
    ) -> None:
        """A layer from dense weights [out, in]. `start` has its first codes and learned scales."""
        super().__init__()
        latent = weight.detach().to(latent_dtype, copy=True)
        self.weight = nn.Parameter(latent)
        own_bias = None if bias is None else nn.Parameter(bias.detach().to(latent_dtype, copy=True))
        self.register_parameter("bias", own_bias)
        self.group, self.dtype, self.activation, self.strength = group, dtype, activation, 1.0
        self.out_features, self.in_features = latent.shape
        log_scale = None
        if learned:
            scale = self.scale(absmean=True) if start is None else start.scale
            scale = scale.to(latent.device, torch.float32).reshape((-1, 1) if group else ())
            log_scale = nn.Parameter(scale.clamp(min=torch.finfo(torch.float32).tiny).log())
        self.register_parameter("log_scale", log_scale)
        if start is not None:
            latent.copy_(inside(latent, start.codes.to(latent.device), self.scale()))

    def scale(self, absmean: bool = False) -> Tensor:
        """The scales as they are stored, fp32 [] or [out, 1], without gradients."""
        with torch.no_grad():
            if not absmean and self.log_scale is not None:
                scale = self.log_scale.exp()
            elif self.group is None:
                scale = self.weight.double().abs().mean()
            else:
                scale = self.weight.double().abs().mean(1, keepdim=True)
            return scale.to(self.dtype).float()

    def codes(self, scale: Tensor) -> Tensor:
        """The codes of the latent weights, int8 [out, in]."""
        with torch.no_grad():
            half = scale / 2
            return (self.weight > half).to(torch.int8) - (self.weight < -half).to(torch.int8)

    def ternary(self) -> Ternary:
        """The weights as they are stored."""
        scale = self.scale()
        return Ternary(self.codes(scale), scale, None if self.group is None else self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; under autocast in its dtype."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.strength == 1:
            return _Product.apply(x, self.weight, self.log_scale, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]
        return self._mixed(x)

    def _mixed(self, x: Tensor) -> Tensor:
        scale = self.scale()
        step = self.codes(scale) * scale
        if self.log_scale is not None:  # the gradient of codes * s for s, of the value that is stored
            exact = self.log_scale.exp()
            step = self.codes(scale) * (scale + exact - exact.detach())
        weight = self.weight + self.strength * (step - self.weight.detach())
        quantizer = ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        if quantizer is not None:
            x = x + self.strength * (quantizer(x.detach()).dequantize(x.dtype) - x.detach())
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        """The description that `print` shows."""
        scales = f"{'learned' if self.log_scale is not None else 'absmean'} scale a {self.group or 'tensor'}"
        return f"in={self.in_features}, out={self.out_features}, {self.activation}, {scales}"


def inside(weight: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers nearest to `weight` that have these codes at this scale, MARGIN within their range."""
    positive = weight.clamp(min=(0.5 + MARGIN) * scale)
    negative = weight.clamp(max=-(0.5 + MARGIN) * scale)
    zero = weight.clamp(min=-(0.5 - MARGIN) * scale, max=(0.5 - MARGIN) * scale)
    return torch.where(codes > 0, positive, torch.where(codes < 0, negative, zero))


class _Product(torch.autograd.Function):
    """The product of codes, as `kernels.ternary_linear.reference` has it; its gradients straight-through."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        log_scale: Tensor | None,
        bias: Tensor | None,
        layer: LatentLinear,
    ) -> Tensor:
        scale = layer.scale()
        codes = layer.codes(scale)
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            if layer.activation == "none":
                ctx.save_for_backward(codes, scale, flat)
                dense = (codes * scale).to(x.dtype)
                y = F.linear(flat, dense, None if bias is None else bias.to(x.dtype))
            else:
                tokens = quantize_tokens(flat, layer.activation)
                ctx.save_for_backward(codes, scale, tokens.codes, tokens.scale)
                y = integer_product(tokens.codes, codes) * (tokens.scale * scale.reshape(-1))
                y = (y if bias is None else y + bias.float()).to(x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale, *inputs = ctx.saved_tensors
        needs_x, needs_weight, needs_scale, needs_bias, _ = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = of_scale = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_x:
                of_x = (flat @ (codes * scale).to(flat.dtype)).view(*gradient.shape[:-1], -1)
            if needs_weight or needs_scale:
                x = inputs[0] if len(inputs) == 1 else QuantizedTokens(*inputs).dequantize(flat.dtype)
                of_weight = (flat.T @ x[:, : codes.shape[1]]).float()
            if needs_scale:
                assert of_weight is not None
                product = of_weight * codes
                of_scale = (product.sum() if scale.dim() == 0 else product.sum(1, keepdim=True)) * scale
            if needs_bias:
                of_bias = flat.sum(0, dtype=torch.float32)
        return of_x, of_weight, of_scale, of_bias, None


def quantize_tokens(x: Tensor, activation: str | Quantizer) -> QuantizedTokens:
    """Codes and scales of x [tokens, in], on a GPU by the kernel of inference, the same bits.

    There codes have columns of zeros up to a multiple of 256. A quantiser that is no name is called as it is.
    """
    if not isinstance(activation, str):
        return activation(x)
    if not x.is_cuda or not x.numel():
        return quantize(x, activation, clamped=CLAMPED)
    from neuzip.kernels.device.launch import launching
    from neuzip.kernels.ternary_linear.triton import quantize as triton_quantize

    with launching(x.device):
        codes, scale, _ = triton_quantize.quantize(
            x.contiguous(), activation, top_k_count(x.shape[-1]), CLAMPED
        )
    return QuantizedTokens(codes, scale[:, None])


def integer_product(tokens: Tensor, weights: Tensor) -> Tensor:
    """Exact sums of products of int8 [n, at least in] and int8 [out, in], rounded to fp32 [n, out].

    On a CPU fp32 products do it, exact while sums stay below 2**24; on a GPU int8 ones, or, for sizes that
    these do not take, fp64.
    """
    weights = F.pad(weights, (0, tokens.shape[1] - weights.shape[1]))
    if not tokens.is_cuda:
        return tokens.float() @ weights.float().T
    fits = tokens.shape[0] >= LEAST_TOKENS and tokens.shape[1] % 8 == 0 and weights.shape[0] % 8 == 0
    if fits:
        return torch._int_mm(tokens, weights.T).float()
    return (tokens.double() @ weights.double().T).float()
