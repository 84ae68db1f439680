"""Gradients of a backward pass: their sums, their squares, and updates as soon as one exists (LOMO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from neuzip.kernels.quantizers.states import RngKey
from neuzip.train.optimizers import ParameterUpdate
from neuzip.train.states import StatePieces, StateStore
from neuzip.train.units import ParameterSlot


def world_size() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@dataclass(eq=False)
class BackwardPass:
    """One backward pass over a batch.

    count    tokens predicted in the whole batch, by all processes, an int64 scalar
    seed     seed of stochastic rounding; `step` is the number of the step, from 1 on
    scale    fp32 scalar that gradients are multiplied with, or None
    decay    whether weight decay applies in this step, to the parameters that decay
    exact    gradients are summed over micro-batches or processes, and therefore in fp32
    update   whether weights are changed; a pass that changes none can be repeated
    measure  whether `squares`, the sum of the squares of all gradients, is computed: an fp64 scalar
    others   gradients of the trained parameters outside layers and tables; None where there is none yet
    """

    store: StateStore
    count: Tensor
    seed: int
    step: int
    lr: float
    scale: Tensor | None
    exact: bool
    update: bool
    measure: bool
    others: list[Tensor | None]
    decay: bool = True
    squares: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.squares = torch.zeros((), dtype=torch.float64, device=self.count.device)

    def use(
        self,
        slot: ParameterSlot,
        rows: slice | None,
        weight: Tensor,
        gradient: Tensor,
        states: StatePieces,
    ) -> None:
        """Add a gradient to the norm, and update its weights with it.

        rows    the rows of the parameter that `weight` holds, None for all
        states  the optimizer states of these weights
        """
        if self.measure:
            self.squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if not self.update:
            return
        first = 0 if rows is None else rows.start * weight[0].numel()
        key = RngKey(self.seed, self.step, slot.number, first)
        decays = slot.decays and self.decay
        with torch.no_grad():
            self.store.update(
                states,
                ParameterUpdate(weight.view(-1), gradient.reshape(-1), self.lr, key, self.scale, decays),
            )


def summed_gradients(gradients: list[Tensor]) -> list[Tensor]:
    """The sums over all processes, in fp32. Empties the list, to free the gradients."""
    if world_size() == 1 or not gradients:
        return gradients
    shapes = [gradient.shape for gradient in gradients]
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    gradients.clear()
    dist.all_reduce(flat)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def summed(value: Tensor) -> Tensor:
    """The sum of a value over all processes."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def plus(total: Tensor | None, gradient: Tensor, exact: bool) -> Tensor:
    """The sum of two gradients, in fp32 if `exact`, in place if there is a total."""
    if total is None:
        return gradient.float() if exact else gradient
    return total.add_(gradient)


def add_to(totals: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to totals in fp32. None is no gradient."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            totals[i] = plus(totals[i], gradient, True)


def gradients_of(out: Tensor, inputs: Sequence[Tensor], out_gradient: Tensor) -> list[Tensor | None]:
    """The gradients of some inputs; None for inputs that `out` does not depend on."""
    return list(torch.autograd.grad(out, inputs, out_gradient, allow_unused=True))
