"""Optimizers that update one array at a time, as soon as its gradient exists.

    states = optimizer.new_states(numel, device)
    optimizer.update(update, states)

An update is of a tensor or of whole blocks of its elements, in flat order. The result for an element depends
on its block only, so a tensor can be cut anywhere between blocks.

| name             | states, bytes a weight | rounding of bf16 weights          |
|------------------|------------------------|-----------------------------------|
| sgd              | 0                      | to nearest even, as NeuZip does   |
| sgd-stochastic   | 0                      | stochastic                        |
| adamw            | 8, fp32; or coded, 6.7 | to nearest even                   |
| adamw8bit        | 2.03, 8 bits by blocks | stochastic                        |

On a GPU a Triton kernel runs adamw8bit, and torch the others. `states` stores states between steps.

Stochastic rounding: at learning rates of 1e-5 most updates are smaller than half a step of bf16. Rounding to
nearest loses them; stochastic rounding keeps them in expectation.
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
"""Elements that are updated at a time in fp32: 64 MB an array on a GPU, and what caches hold on a CPU.

Both are multiples of BLOCK.
"""

FIRST, SECOND, WEIGHT = range(3)
"""Numbers of the uses of random numbers in a step: for each moment, and for the weight."""


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """An update of some weights by their gradient.

    weight, gradient  [n]; the weight is changed in place, and the gradient may be
    rng_key           key of stochastic rounding
    scale             fp32 scalar that the gradient is multiplied with, or None
    decays            whether weight decay applies, as for matrices
    """

    weight: Tensor
    gradient: Tensor
    lr: float
    rng_key: RngKey
    scale: Tensor | None = None
    decays: bool = True

    @property
    def step(self) -> int:
        """Number of the step, from 1 on."""
        return self.rng_key.step

    def pieces(self) -> Iterator[tuple[slice, ParameterUpdate]]:
        """The update in pieces of PIECE or CPU_PIECE elements, with the place of each."""
        size = PIECE if self.weight.is_cuda else CPU_PIECE
        for start in range(0, self.weight.numel(), size):
            span = slice(start, start + size)
            yield span, self.cut(span)

    def cut(self, span: slice) -> ParameterUpdate:
        """The update of some of the elements."""
        key = replace(self.rng_key, element=self.rng_key.element + span.start)
        return replace(self, weight=self.weight[span], gradient=self.gradient[span], rng_key=key)

    def gradient32(self) -> Tensor:
        """The scaled gradient in fp32, in memory of its own."""
        gradient = self.gradient.to(torch.float32, copy=True)
        return gradient if self.scale is None else gradient.mul_(self.scale)


class Optimizer(Protocol):
    """A rule that changes weights by their gradients, and the states that it needs for it."""

    @property
    def stochastic(self) -> bool:
        """Whether weights are rounded stochastically, which is for bf16."""
        ...

    def new_states(self, numel: int, device: torch.device) -> States:
        """States of `numel` elements before the first step."""
        ...

    def update(self, update: ParameterUpdate, states: States) -> None:
        """Change weights and states in place."""
        ...


@dataclass(frozen=True)
class SGD:
    """w -= lr * (g + weight_decay * w), without momentum (NeuZip, section 4; LOMO)."""

    weight_decay: float = 0.0
    stochastic: bool = False

    def new_states(self, numel: int, device: torch.device) -> States:
        """No states."""
        return {}

    def update(self, update: ParameterUpdate, states: States) -> None:
        """Change weights and states in place."""
        decay = self.weight_decay if update.decays else 0.0
        if (
            update.scale is None
            and not decay
            and not self.stochastic
            and update.gradient.dtype == update.weight.dtype
        ):
            update.weight.add_(update.gradient, alpha=-update.lr)  # in fp32, rounded once: one kernel
            return
        for _, piece in update.pieces():
            weight = piece.weight.to(torch.float32, copy=True)
            step = piece.gradient32()
            if decay:
                step.add_(weight, alpha=decay)
            _write(piece, weight.add_(step, alpha=-update.lr), self.stochastic)


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
        """Both moments of `numel` elements, zero; in 8 bits with a scale per block."""
        if not self.eight_bits:
            return {name: torch.zeros(numel, device=device) for name in ("first", "second")}
        blocks = -(-numel // BLOCK)
        return {
            "first": torch.zeros(numel, dtype=torch.int8, device=device),
            "first_top": torch.zeros(blocks, device=device),
            "second": torch.zeros(numel, dtype=torch.uint8, device=device),
            "second_top": torch.zeros(blocks, device=device),
        }

    def update(self, update: ParameterUpdate, states: States) -> None:
        """Change weights and states in place."""
        if self.eight_bits and update.weight.is_cuda:
            self._update_by_triton(update, states)
            return
        for span, piece in update.pieces():
            blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
            piece_states = {
                name: state[blocks if name.endswith("_top") else span] for name, state in states.items()
            }
            self._update(piece, piece_states)

    def _update(self, update: ParameterUpdate, states: States) -> None:
        gradient, weight = update.gradient32(), update.weight.float()
        first, second = self._moments(states)
        first.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        self._store(first, second, states, update.rng_key)
        size = update.lr / (1 - self.beta1**update.step)
        spread = second.div(1 - self.beta2**update.step).sqrt_().add_(self.epsilon)
        if update.decays and self.weight_decay:
            weight = weight * (1 - update.lr * self.weight_decay)
        weight = weight - size * first / spread
        _write(update, weight, self.stochastic)

    def _update_by_triton(self, update: ParameterUpdate, states: States) -> None:
        from neuzip.kernels.quantizers.triton import states as triton_states

        decay = self.weight_decay if update.decays else 0.0
        rates = triton_states.Rates(
            self.beta1, self.beta2, self.epsilon, update.lr / (1 - self.beta1**update.step),
            1 / (1 - self.beta2**update.step), 1 - update.lr * decay,
        )  # fmt: skip
        triton_states.adamw(
            update.weight, update.gradient.contiguous(), states, rates, update.rng_key, update.scale,
            stochastic=self.stochastic and update.weight.dtype == torch.bfloat16,
        )  # fmt: skip

    def _moments(self, states: States) -> tuple[Tensor, Tensor]:
        if not self.eight_bits:
            return states["first"], states["second"]
        first = quantized.decode(states["first"], states["first_top"])
        return first, quantized.decode(states["second"], states["second_top"])

    def _store(self, first: Tensor, second: Tensor, states: States, key: RngKey) -> None:
        if self.eight_bits:
            for name, moment, signed, use in (
                ("first", first, True, FIRST),
                ("second", second, False, SECOND),
            ):
                code, top = quantized.encode(moment, signed, key, use)
                states[name].copy_(code)
                states[f"{name}_top"].copy_(top)


def _write(update: ParameterUpdate, weight: Tensor, stochastic: bool) -> None:
    """Store new weights, fp32, in the dtype of the parameter."""
    if stochastic and update.weight.dtype == torch.bfloat16:
        weight = quantized.stochastic_round(weight, update.weight.dtype, update.rng_key, WEIGHT)
    update.weight.copy_(weight)


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
