"""Ternary models trained on a text from random weights, as BitNet b1.58 and a4.8 are.

    make_ternary(model)                                   before the model has a trainer
    stages = TernaryStages("a4.8", steps)
    for number in range(steps):
        set_activations(model, stages.activations_at(number))
        trainer.step(batch, lr)

The trainer holds latent weights, in the dtype of the model, and the layers multiply with codes and a scale
(see `recovery.straight_through`). `Trainer.save` with `resumable=False` writes scale * codes: a checkpoint
that `neuzip compress --ternary` stores exactly.

Sources: BitNet b1.58 (arXiv 2402.17764), BitNet a4.8 (arXiv 2411.04965, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations
from neuzip.train.presets import int8_steps
from neuzip.train.recovery.latent import make_latent
from neuzip.train.recovery.straight_through import LatentLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INT8_FRACTION = 0.95
"""Share of the steps with 8-bit activations: 95 of the paper's 100 billion tokens."""

FIRST_STAGE = "b1.58"
"""The mode of the first stage: all inputs in 8 bits."""


@dataclass(frozen=True)
class TernaryStages:
    """The activations of each step.

    activations    of the last steps: a mode, or what config.json may have
    steps          number of all steps
    int8_fraction  share of the steps before, in which all inputs are int8
    """

    activations: str | Mapping[str, Any] | Activations
    steps: int
    int8_fraction: float = INT8_FRACTION

    def activations_at(self, step: int) -> Activations:
        """The activations of a step, counted from 0."""
        return Activations.of(FIRST_STAGE if step < self.first_hybrid_step else self.activations)

    @property
    def first_hybrid_step(self) -> int:
        """The first step of the second stage.

        >>> TernaryStages("a4.8", 200).first_hybrid_step
        190
        """
        return int8_steps(self.int8_fraction, self.steps)


def make_ternary(model: PreTrainedModel) -> None:
    """Put LatentLinear layers in the place of all linear modules of the decoder layers.

    Weights keep their values and dtype. Raises NeuzipError for a model whose layers are not found.
    """
    dtype = model.dtype
    make_latent(model, model, {}, FIRST_STAGE, learned=False, group=None, dtype=dtype, latent_dtype=dtype)
    set_activations(model, Activations(FIRST_STAGE))


def latent_layers(model: nn.Module) -> dict[str, LatentLinear]:
    """The LatentLinear layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LatentLinear)}


def set_activations(model: PreTrainedModel, activations: Activations) -> None:
    """Quantise the inputs of all latent layers so from now on, and have the model's config say so."""
    for name, layer in latent_layers(model).items():
        layer.activation = activations.at(name)
    ACTIVATIONS_ENTRY.set(model.config, activations)


@torch.no_grad()
def round_to_ternary(model: nn.Module) -> None:
    """Make the weights of all latent layers scale * codes, in their dtype, as they are stored."""
    for layer in latent_layers(model).values():
        layer.weight = nn.Parameter(layer.ternary().dequantize(layer.weight.dtype))
