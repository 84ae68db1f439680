"""Training of a small Llama with its norms in the places of a config, by the recipes of the Mix-LN paper.

Li et al. 2024, arXiv 2412.13795, Table 7 and the text beside it: Adam, a cosine down to a tenth of the peak
after a warm-up of a tenth of the steps, batches of 512 windows of 256 tokens. The paper's code clips
gradients to the norm 1 for Pre-LN and not at all for Mix-LN; here one rule holds for all placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.runtime.hf.norm_placement import NormPlacementConfig, NormPlacementForCausalLM, Placement
from neuzip.train.loop import Figures, Schedule

if TYPE_CHECKING:
    from neuzip.train.text import TrainingWindows

LENGTH = 256
"""Tokens of a window in the paper."""

CLIP = 1.0
"""The global norm that gradients are clipped to, as for Pre-LN in the paper's code."""


@dataclass(frozen=True)
class Recipe:
    """One row of Table 7. `tokens` is the paper's figure, rounded and not always steps * batch * 256."""

    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    steps: int
    tokens: float
    peak: float
    batch: int = 512
    post_norm_ratio: float = 0.25

    def config(self, placement: Placement, vocab_size: int, **more: Any) -> NormPlacementConfig:
        """The config of a model of this size."""
        sizes = {
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads, "num_hidden_layers": self.layers,
            "vocab_size": vocab_size, "max_position_embeddings": LENGTH,
        }  # fmt: skip
        return NormPlacementConfig(placement, self.post_norm_ratio, **(sizes | more))

    def schedule(self, steps: int | None = None, peak: float | None = None) -> Schedule:
        """The learning rates, of other steps or another peak as well."""
        steps = self.steps if steps is None else steps
        return Schedule(self.peak if peak is None else peak, steps, math.ceil(steps / 10), least=0.1)


RECIPES = {
    "71M": Recipe(512, 1368, 8, 12, 10_000, 1.1e9, 1e-3),
    "130M": Recipe(768, 2048, 12, 12, 20_000, 2.2e9, 1e-3),
    "250M": Recipe(1024, 2560, 16, 24, 40_000, 3.9e9, 1e-3),
    "1B": Recipe(2048, 5461, 32, 24, 100_000, 5.0e9, 5e-4),
    "7B": Recipe(4096, 11008, 32, 32, 13_000, 1.7e9, 5e-4, post_norm_ratio=0.0625),
}
"""By the paper's names. "250M" has 355 M parameters as in the table; 247 M with the 768 of its code."""


def new_model(config: NormPlacementConfig, seed: int, device: torch.device) -> NormPlacementForCausalLM:
    """A model with the first weights of a seed, drawn on the CPU: the same for all devices."""
    torch.manual_seed(seed)
    model = NormPlacementForCausalLM(config)
    model.to(device)  # type: ignore[arg-type]
    model.train()
    return model


def stepper(
    model: nn.Module, windows: TrainingWindows, *, clip: float = CLIP, bf16: bool = True
) -> Callable[[int, float], Figures]:
    """A step for `loop.run`: one batch, gradients clipped, Adam. The model is trained in place, in fp32.

    With `bf16` products are of bf16 numbers (autocast), their sums and all else fp32. The figures have the
    loss, the norm of the gradient before it is clipped, and tokens.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)

    def step(number: int, lr: float) -> Figures:
        for group in optimizer.param_groups:
            group["lr"] = lr
        ids = windows.batch(number).to(device)
        loss = mean_loss(model, ids, bf16=bf16)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return {"loss": loss.item(), "gradient_norm": norm.item(), "tokens": ids[:, 1:].numel()}

    return step


def mean_loss(model: nn.Module, ids: Tensor, *, bf16: bool) -> Tensor:
    """The mean loss, in nats, of windows [batch, length + 1], each token predicted from those before it."""
    with _precision(ids.device, bf16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: Tensor, *, length: int = LENGTH, batch: int = 64) -> float:
    """The mean loss over a text [n], in fp32: windows without overlap, what fills no window left out.

    Raises NeuzipError for a text that fills none.
    """
    count = (ids.numel() - 1) // length
    if not count:
        raise NeuzipError(f"a held-out text of {ids.numel()} tokens is too short", f"give more than {length}")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for first in range(0, count, batch):
        rows = range(first, min(first + batch, count))
        windows = torch.stack([ids[row * length : (row + 1) * length + 1] for row in rows]).to(device)
        total += mean_loss(model, windows, bf16=False).item() * len(rows)
    model.train(was_training)
    return total / count


def gradient_norms(model: Any, batches: Iterable[Tensor], *, bf16: bool = True) -> list[float]:
    """The norm of each layer's gradient, of the mean loss of some batches. Leaves no gradients behind."""
    model.zero_grad(set_to_none=True)
    count = 0
    for ids in batches:
        mean_loss(model, ids.to(model.device), bf16=bf16).backward()  # type: ignore[no-untyped-call]
        count += 1
    norms = []
    for layer in model.base_model.layers:
        squares = [p.grad.double().square().sum() for p in layer.parameters() if p.grad is not None]
        norms.append(torch.stack(squares).sum().sqrt().item() / count)
    model.zero_grad(set_to_none=True)
    return norms


def _precision(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
