"""Linear layers of ternary weights, with quantised inputs, and gated MLPs of them: modules of torch alone.

Sources: BitNet b1.58 (arXiv 2402.17764), BitNet a4.8 (arXiv 2411.04965, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuzip.errors import UsageError
from neuzip.kernels.ternary_linear import TernaryWeight, relu2_glu, ternary_linear
from neuzip.runtime.activations import ACTIVATIONS, CLAMPED, offer
from neuzip.runtime.weights.bit import dense


class BitLinear(nn.Module):
    """y = Q(x) W^T + bias with ternary W, in integers; Q is `activation`, which may be set at any time.

    x [..., in_features] of bf16, fp16 or fp32, y [..., out_features] of the same dtype. With the activation
    "none" W is made dense for each product, in the dtype of x. `dtype` is what the weight had when it was
    dense. Words and scale are frozen, and the scale stays fp32 whatever the module is cast to. Gradients of x
    and bias are straight-through: those of x W^T + bias.
    """

    words: Tensor
    scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: TernaryWeight,
        bias: nn.Parameter | None = None,
        activation: str = "int8",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group, self.dtype = weight.group, dtype
        self.register_buffer("words", weight.words)
        self.register_buffer("scale", weight.scale)
        self.register_parameter("bias", bias)
        self.activation = activation

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS. Raises UsageError when it is set to another."""
        return self._activation

    @activation.setter
    def activation(self, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise UsageError(f"there is no activation {activation!r}", offer(ACTIVATIONS))
        self._activation = activation

    @property
    def ternary(self) -> TernaryWeight:
        """The weight, in the same memory."""
        return TernaryWeight(self.words, self.scale, self.group, (self.out_features, self.in_features))

    @property
    def numel(self) -> int:
        """How many weights."""
        return int(self.out_features * self.in_features)

    @property
    def stored_bytes(self) -> int:
        """Bytes of words and scales, with what fills tiles up."""
        return self.ternary.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """y [..., out_features] of x [..., in_features]."""
        if self.activation == "none":
            return F.linear(x, dense(self.ternary, x.dtype), self.bias)
        if torch.is_grad_enabled() and (
            x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        ):
            return _StraightThrough.apply(x, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return ternary_linear(x, self.ternary, self.bias, activation=self._activation, clamped=CLAMPED)  # type: ignore[arg-type]

    def to_linear(self) -> nn.Linear:
        """The layer with a dense weight of its old dtype: an ordinary one, which trains."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(dense(self.ternary, self.dtype))
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        scales = "one scale" if self.group is None else f"group={self.group}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation}, {scales}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BitLinear:
        exact = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = exact.to(self.scale.device)
        self._wait()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._wait()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._wait()

    def _wait(self) -> None:
        """Until the weight is there: kernels read it before the kernel ahead of them has ended."""
        if self.words.is_cuda:
            torch.cuda.current_stream(self.words.device).synchronize()


class _StraightThrough(torch.autograd.Function):
    """The product of a BitLinear layer, its gradients as if inputs were not quantised, as papers train."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: BitLinear) -> Tensor:
        ctx.layer = layer
        return layer._product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x = gradient @ dense(ctx.layer.ternary, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None


class ReLU2GLU(nn.Module):
    """down(norm(relu(gate x)^2 * up x)), the products with gate and up in one: equation (5) of a4.8.

    Where gate is zero, rows of up need not be read. It has the children of the module it replaces, under
    their names, and computes as that did where gate and up are no BitLinear layers of one activation without
    biases, and where gradients are wanted. The results have the same bits.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name, module in mlp.named_children():
            self.add_module(name, module)
        self.norm = next((name for name in SUB_NORMS if name in self._modules), None)
        self.apart = False
        """Whether gate and up are called as modules all the same, for hooks to see what they get."""

    @property
    def is_fused(self) -> bool:
        """Whether gate and up are read together."""
        return self._pair() is not None

    def _pair(self) -> tuple[BitLinear, BitLinear] | None:
        """Gate and up, if they are read together."""
        gate, up = self.gate_proj, self.up_proj
        if self.apart or not isinstance(gate, BitLinear) or not isinstance(up, BitLinear):
            return None
        same = gate.activation == up.activation != "none"
        return (gate, up) if same and gate.bias is None and up.bias is None else None

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's result, [..., hidden] like x."""
        pair = None if torch.is_grad_enabled() and x.requires_grad else self._pair()
        if pair is None:
            y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        else:
            gate, up = pair
            y = relu2_glu(x, gate.ternary, up.ternary, activation=gate._activation, clamped=CLAMPED)  # type: ignore[arg-type]
        if self.norm is not None:
            y = self.get_submodule(self.norm)(y)
        return self.down_proj(y)  # type: ignore[no-any-return]


SUB_NORMS = ("ffn_sub_norm",)
"""Norms between the product of gate and up and the last layer, as BitNet's own models have."""


def bit_linears(model: nn.Module) -> dict[str, BitLinear]:
    """The BitLinear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitLinear)}


def to_dense(model: nn.Module) -> None:
    """Make ordinary layers of all BitLinear layers of a model, one after the other."""
    linears: dict[int, nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, BitLinear):
            if id(module) not in linears:
                linears[id(module)] = module.to_linear()
            model.set_submodule(name, linears[id(module)])
