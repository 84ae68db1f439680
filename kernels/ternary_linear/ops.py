"""Ternary products as operators of torch, `neuzip::ternary_*`, for torch.compile and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.quantizers import QuantizedTokens, squared_relu, top_k_count
from neuzip.kernels.quantizers.magnitudes import DTYPES
from neuzip.kernels.ternary_linear.reference import quantize
from neuzip.kernels.ternary_linear.weight import TernaryWeight

Activation = Literal["int8", "int4", "fp4", "top_k_int8"]

FEW_TOKENS = 64
"""Most tokens that a GPU multiplies with matrix instructions of a warp; more are products of large tiles."""

AT_A_TIME = 1 << 24
"""Weights that the CPU unpacks to fp32 at once."""


def ternary_linear(
    x: Tensor,
    weight: TernaryWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation = "int8",
    share: float = 0.5,
    clamped: bool = False,
) -> Tensor:
    """x @ weights.T + bias with x quantised first: [..., in] to [..., out], in the dtype of x.

    x           bf16, fp16 or fp32
    bias        [out], of any of these
    activation  how x is quantised: "int8" by absmax, "int4" by absmean, "fp4" (E2M1), or "top_k_int8", the
                largest `share` of each token's magnitudes, as int8
    clamped     epsilon as in transformers' `bitnet`, see `quantizers.int8_absmax`; "fp4" has none

    The same bits on every device: `reference` says what they are. No gradients flow. Raises TypeError for
    other dtypes, ValueError for other activations and for shapes and devices that do not go together.
    """
    _check(x, weight, activation)
    if not 0 < share <= 1:
        raise ValueError(f"the share of activations that is kept is {share}; it has to be above 0, at most 1")
    if bias is not None:
        if bias.shape != weight.shape[:1] or bias.device != weight.device:
            raise ValueError(
                f"the bias has shape {tuple(bias.shape)} on {bias.device}, the weights {weight.shape} on "
                f"{weight.device}"
            )
        if bias.dtype not in DTYPES:
            raise TypeError(f"a bias is bf16, fp16 or fp32, not {bias.dtype}")
    return torch.ops.neuzip.ternary_linear(  # type: ignore[no-any-return]
        x.detach(), bias if bias is None else bias.detach(), *_arguments(weight), activation, share, clamped
    )


def ternary_linears(
    x: Tensor,
    weights: Sequence[TernaryWeight],
    *,
    activation: Activation = "int8",
    clamped: bool = False,
) -> list[Tensor]:
    """`ternary_linear` of one x with several weights: the same bits, for one token on a GPU in one launch.

    "top_k_int8" keeps half of the activations. Raises as `ternary_linear` does.
    """
    for weight in weights:
        _check(x, weight, activation)
    columns = x.shape[-1]
    flat = x.detach().reshape(math.prod(x.shape[:-1]), columns)
    if not _fit_a_token(flat, weights) or len({weight.scale.dim() for weight in weights}) != 1:
        return [ternary_linear(x, w, activation=activation, clamped=clamped) for w in weights]
    from neuzip.kernels.ternary_linear.triton import one_token as triton_one_token

    biases = [None] * len(weights)
    ys = triton_one_token.one_token(
        flat.contiguous(), weights, biases, activation, clamped, top_k_count(columns)
    )
    return [y.view(*x.shape[:-1], y.shape[1]) for y in ys]


def _fit_a_token(x: Tensor, weights: Sequence[TernaryWeight]) -> bool:
    """Whether the kernels for one token can multiply all these weights in one launch: on a GPU, no groups."""
    ungrouped = all(weight.shape[0] and not weight.grouped for weight in weights)
    return x.is_cuda and x.shape[0] == 1 and x.shape[1] > 0 and ungrouped


def relu2_glu(
    x: Tensor,
    gate: TernaryWeight,
    up: TernaryWeight,
    *,
    activation: Activation = "int4",
    clamped: bool = False,
) -> Tensor:
    """squared_relu(gate product) * up product: [..., in] to [..., out], equation (5) of BitNet a4.8.

    The same bits as of two `ternary_linear` and torch's arithmetic in the dtype of x, but that it is +0
    wherever the squared ReLU is 0. For one token on a GPU, rows of `up` are not read there.

    Raises ValueError for two weights of different shapes; the rest is as for `ternary_linear`.
    """
    _check(x, gate, activation)
    _check(x, up, activation)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up are multiplied: their shapes are {gate.shape} and {up.shape}")
    return torch.ops.neuzip.ternary_relu2_glu(  # type: ignore[no-any-return]
        x.detach(), *_arguments(gate), *_arguments(up)[:2], up.group, activation, clamped
    )


def _check(x: Tensor, weight: TernaryWeight, activation: str) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"ternary weights are multiplied with bf16, fp16 or fp32, not {x.dtype}")
    if activation not in get_args(Activation):
        raise ValueError(f"activations are {', '.join(get_args(Activation))}, not {activation!r}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, the weights {weight.shape}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the ternary weights are on {weight.device}")
    if x.device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"ternary weights are on a CUDA device or on the CPU, not on {x.device}")


# The operators. Their schemas are written out: those of weights cannot be inferred.

_WEIGHT = "Tensor words, Tensor scale, SymInt out, SymInt columns, SymInt? group"


def _arguments(weight: TernaryWeight) -> tuple[Tensor, Tensor, int, int, int | None]:
    """The arguments of the operators that stand for a weight."""
    return weight.words, weight.scale, *weight.shape, weight.group


def _weight(words: Tensor, scale: Tensor, out: int, columns: int, group: int | None) -> TernaryWeight:
    """The weight that `_arguments` took apart."""
    return TernaryWeight(words, scale, group, (out, columns))


@torch.library.custom_op(
    "neuzip::ternary_linear",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? bias, {_WEIGHT}, str activation, float share, bool clamped) -> Tensor",
)
def _ternary_linear(x, bias, words, scale, out, columns, group, activation, share, clamped):  # type: ignore[no-untyped-def]
    weight = _weight(words, scale, out, columns, group)
    flat = x.reshape(math.prod(x.shape[:-1]), columns)
    return _multiply(flat, weight, bias, activation, share, clamped).view(*x.shape[:-1], out)


@_ternary_linear.register_fake
def _(x, bias, words, scale, out, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], out))


@torch.library.custom_op(
    "neuzip::ternary_relu2_glu",
    mutates_args=(),
    schema=f"(Tensor x, {_WEIGHT}, Tensor words_up, Tensor scale_up, SymInt? group_up, str activation, "
    "bool clamped) -> Tensor",
)
def _relu2_glu(x, words, scale, out, columns, group, words_up, scale_up, group_up, activation, clamped):  # type: ignore[no-untyped-def]
    gate = _weight(words, scale, out, columns, group)
    up = _weight(words_up, scale_up, out, columns, group_up)
    flat = x.reshape(math.prod(x.shape[:-1]), columns)
    if _fit_a_token(flat, (gate, up)):
        from neuzip.kernels.ternary_linear.triton import one_token as triton_one_token

        y = triton_one_token.relu2_glu(flat.contiguous(), gate, up, activation, clamped, top_k_count(columns))
    else:
        squared = squared_relu(_multiply(flat, gate, None, activation, 0.5, clamped))
        linear = _multiply(flat, up, None, activation, 0.5, clamped)
        y = torch.where(squared == 0, 0, squared * linear)
    return y.view(*x.shape[:-1], out)


@_relu2_glu.register_fake
def _(x, words, scale, out, *_):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], out))


def _multiply(
    x: Tensor, weight: TernaryWeight, bias: Tensor | None, activation: str, share: float, clamped: bool
) -> Tensor:
    """The product for x [tokens, in]: by Triton on a GPU, by fp32 matrices on a CPU."""
    out, columns = weight.shape
    if x.is_cuda and x.shape[0] and out and columns:
        from neuzip.kernels.ternary_linear.triton import few_tokens as triton_few_tokens
        from neuzip.kernels.ternary_linear.triton import matrix as triton_matrix
        from neuzip.kernels.ternary_linear.triton import one_token as triton_one_token

        top_k = top_k_count(columns, share)
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        if weight.grouped or x.shape[0] > FEW_TOKENS:
            if is_hopper(x.device):
                from neuzip.kernels.ternary_linear.gluon import matrix as gluon_matrix

                if gluon_matrix.possible(x, weight):
                    return gluon_matrix.many_tokens(x, weight, bias, activation, clamped, top_k)
            return triton_matrix.many_tokens(x, weight, bias, activation, clamped, top_k)
        if x.shape[0] == 1:
            return triton_one_token.one_token(x, [weight], [bias], activation, clamped, top_k)[0]
        return triton_few_tokens.few_tokens(x, weight, bias, activation, clamped, top_k)
    with torch.autocast(x.device.type, enabled=False):
        return _by_matrices(quantize(x, activation, share, clamped), weight, bias).to(x.dtype)


def _by_matrices(tokens: QuantizedTokens, weight: TernaryWeight, bias: Tensor | None) -> Tensor:
    """The product in torch, fp32: as sums stay below 2**24, they are exact in any order."""
    out, columns = weight.shape
    codes = tokens.codes.float()
    group = weight.group if weight.grouped and weight.group is not None else max(1, columns)
    y = codes.new_empty(codes.shape[0], out)
    step = max(1, AT_A_TIME // max(1, columns))
    weights = weight.codes()
    for start in range(0, out, step):
        some, part = weights[start : start + step].float(), y[:, start : start + step]
        if weight.grouped:
            part.zero_()
            for g, at in enumerate(range(0, columns, group)):
                sums = F.linear(codes[:, at : at + group], some[:, at : at + group])
                part += sums * weight.scale[start : start + step, g]
            part *= tokens.scale
        else:
            scale = (
                weight.scale if weight.scale.dim() == 0 else weight.scale[start : start + step].reshape(-1)
            )
            torch.mul(F.linear(codes, some), tokens.scale * scale, out=part)
    return y if bias is None else y + bias.float()
