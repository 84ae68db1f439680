"""Optimizers that are applied part by part: to a unit's weights as soon as their gradients are there.

    states = optimizer.new_states(part)
    optimizer.update(part, states)

A part is a tensor or whole blocks of its elements, in flat order. What becomes of an element depends on
nothing outside its part and its block, so it does not matter how a tensor is cut.

| name             | states, bytes a weight | rounding of bf16 weights          |
|------------------|------------------------|-----------------------------------|
| sgd              | 0                      | to nearest even, as NeuZip does   |
| sgd-stochastic   | 0                      | by chance                         |
| adamw            | 8, fp32; or coded, 6.7 | to nearest even                   |
| adamw8bit        | 2.03, 8 bits by blocks | by chance                         |

On a GPU Triton takes the step of adamw8bit, the others are torch's. How states are kept between steps is
said in `states`.

By chance: at learning rates of 1e-5 most updates are smaller than half a step of bf16 and are lost when they
are rounded to nearest; by chance they are there in expectation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from neuzip.errors import UsageError
from neuzip.kernels.quantizers import states as quantized
from neuzip.kernels.quantizers.states import BLOCK, RngKey

States = dict[str, Tensor]

PIECE, CPU_PIECE = 1 << 24, 1 << 16
"""Elements that are worked on at a time in fp32, 64 MB an array; on a CPU so few that caches hold them. Both
are multiples of BLOCK."""

FIRST, SECOND, WEIGHT = range(3)
"""Uses of random numbers."""


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """What an update is given.

    weight, gradient  one-dimensional; the weight is changed in place, the gradient may be
    scale             fp32 scalar that the gradient is multiplied with, or None
    decays            whether it is weights of a matrix, which decay
    step              counts from 1
    """

    weight: Tensor
    gradient: Tensor
    lr: float
    chance: RngKey
    scale: Tensor | None = None
    decays: bool = True

    @property
    def step(self) -> int:
        """Number of the step, from 1 on."""
        return self.chance.step

    def pieces(self) -> Iterator[tuple[slice, ParameterUpdate]]:
        """Parts of so few elements."""
        most = PIECE if self.weight.is_cuda else CPU_PIECE
        for start in range(0, self.weight.numel(), most):
            own = slice(start, start + most)
            chance = replace(self.chance, element=self.chance.element + start)
            yield own, replace(self, weight=self.weight[own], gradient=self.gradient[own], chance=chance)

    def gradient32(self) -> Tensor:
        """The scaled gradient in fp32, in memory of its own."""
        gradient = self.gradient.to(torch.float32, copy=True)
        return gradient if self.scale is None else gradient.mul_(self.scale)


class Optimizer(Protocol):
    """What `update` does to a part, with the states that it keeps for it."""

    @property
    def stochastic(self) -> bool:
        """Whether weights are rounded by chance, which is for bf16."""
        ...

    def new_states(self, numel: int, device: torch.device) -> States:
        """States of so many elements before the first step."""
        ...

    def update(self, part: ParameterUpdate, states: States) -> None:
        """Change weights and states in place."""
        ...


@dataclass(frozen=True)
class SGD:
    """w -= lr * (g + weight_decay * w), without momentum (NeuZip, section 4; LOMO)."""

    weight_decay: float = 0.0
    stochastic: bool = False

    def new_states(self, numel: int, device: torch.device) -> States:
        """See Optimizer."""
        return {}

    def update(self, part: ParameterUpdate, states: States) -> None:
        """See Optimizer."""
        decay = self.weight_decay if part.decays else 0.0
        if (
            part.scale is None
            and not decay
            and not self.stochastic
            and part.gradient.dtype == part.weight.dtype
        ):
            part.weight.add_(part.gradient, alpha=-part.lr)  # in fp32, rounded once: one kernel
            return
        for _, piece in part.pieces():
            weight = piece.weight.to(torch.float32, copy=True)
            step = piece.gradient32()
            if decay:
                step.add_(weight, alpha=decay)
            _write(piece, weight.add_(step, alpha=-part.lr), self.stochastic)


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with states in fp32, or in 8 bits by blocks of 256."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    eight_bits: bool = False
    stochastic: bool = False

    def new_states(self, numel: int, device: torch.device) -> States:
        """See Optimizer."""
        if not self.eight_bits:
            return {name: torch.zeros(numel, device=device) for name in ("first", "second")}
        blocks = -(-numel // BLOCK)
        return {
            "first": torch.zeros(numel, dtype=torch.int8, device=device),
            "first_top": torch.zeros(blocks, device=device),
            "second": torch.zeros(numel, dtype=torch.uint8, device=device),
            "second_top": torch.zeros(blocks, device=device),
        }

    def update(self, part: ParameterUpdate, states: States) -> None:
        """See Optimizer."""
        if self.eight_bits and part.weight.is_cuda:
            self._update_by_triton(part, states)
            return
        for own, piece in part.pieces():
            blocks = slice(own.start // BLOCK, -(-own.stop // BLOCK))
            mine = {name: state[blocks if name.endswith("_top") else own] for name, state in states.items()}
            self._update(piece, mine)

    def _update(self, part: ParameterUpdate, states: States) -> None:
        gradient, weight = part.gradient32(), part.weight.float()
        first, second = self._moments(states)
        first.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        self._keep(first, second, states, part.chance)
        size = part.lr / (1 - self.beta1**part.step)
        spread = second.div(1 - self.beta2**part.step).sqrt_().add_(self.epsilon)
        if part.decays and self.weight_decay:
            weight = weight * (1 - part.lr * self.weight_decay)
        weight = weight - size * first / spread
        _write(part, weight, self.stochastic)

    def _update_by_triton(self, part: ParameterUpdate, states: States) -> None:
        from neuzip.kernels.quantizers.triton import states as triton_states

        decay = self.weight_decay if part.decays else 0.0
        rates = triton_states.Rates(
            self.beta1, self.beta2, self.epsilon, part.lr / (1 - self.beta1**part.step),
            1 / (1 - self.beta2**part.step), 1 - part.lr * decay,
        )  # fmt: skip
        triton_states.adamw(
            part.weight, part.gradient.contiguous(), states, rates, part.chance, part.scale,
            stochastic=self.stochastic and part.weight.dtype == torch.bfloat16,
        )  # fmt: skip

    def _moments(self, states: States) -> tuple[Tensor, Tensor]:
        if not self.eight_bits:
            return states["first"], states["second"]
        first = quantized.decode(states["first"], states["first_top"])
        return first, quantized.decode(states["second"], states["second_top"])

    def _keep(self, first: Tensor, second: Tensor, states: States, chance: RngKey) -> None:
        if self.eight_bits:
            for name, moment, signed, use in (
                ("first", first, True, FIRST),
                ("second", second, False, SECOND),
            ):
                code, top = quantized.encode(moment, signed, chance, use)
                states[name].copy_(code)
                states[f"{name}_top"].copy_(top)


def _write(part: ParameterUpdate, weight: Tensor, stochastic: bool) -> None:
    """Put new weights, fp32, in their place."""
    if stochastic and part.weight.dtype == torch.bfloat16:
        weight = quantized.stochastic_round(weight, part.weight.dtype, part.chance, WEIGHT)
    part.weight.copy_(weight)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "sgd-stochastic": SGD(stochastic=True),
    "adamw": AdamW(),
    "adamw8bit": AdamW(eight_bits=True, stochastic=True),
}


def optimizer_of(name: str) -> Optimizer:
    """The optimizer of a name. Raises UsageError."""
    if name not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {name!r}", f"choose from {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
