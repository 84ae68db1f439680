"""Gradients of the log likelihood of tokens drawn from a model: what its Fisher information is made of.

To second order in a change d of the weights the KL divergence is d'Fd / 2, F the Fisher information: the mean
over tokens of g g', g the gradient of the log likelihood of a token drawn from the model itself. The
gradients of all tokens of a pass are summed before they are squared: those of tokens that are drawn
independently are not correlated, so that the squares have the same mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.runtime.hf.decoder import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnGradient = Callable[[nn.Parameter, Tensor], None]
"""on_gradient(parameter, gradient): called with the gradient of one pass, in the parameter's shape."""

OnTokens = Callable[[int], None]


def drawn_gradients(
    model: PreTrainedModel,
    parameters: Iterable[nn.Parameter],
    windows: CalibrationWindows,
    on_gradient: OnGradient,
    on_tokens: OnTokens,
    *,
    batch: int = 1,
) -> None:
    """Call `on_gradient` with the gradient of each parameter, in passes over `batch` windows.

    Each is freed before that of the next layer is made. Tokens are drawn on the CPU, so that they are the
    same on every device.
    """
    wanted = set(parameters)
    had_gradient = {p: p.requires_grad for p in model.parameters()}

    def take(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        on_gradient(parameter, gradient)

    hooks = []
    try:
        for parameter in had_gradient:
            parameter.requires_grad_(parameter in wanted)
        hooks = [p.register_post_accumulate_grad_hook(take) for p in wanted]  # type: ignore[no-untyped-call]
        source = torch.Generator().manual_seed(0)
        with torch.enable_grad():
            for fed in torch.split(windows.fed, batch):
                logits = model(input_ids=fed.to(input_device(model)), use_cache=False).logits.float()
                drawn = torch.cat([_draw(of_window, source) for of_window in logits.detach()])
                functional.cross_entropy(logits.flatten(0, 1), drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
                on_tokens(fed.numel())
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, had in had_gradient.items():
            parameter.requires_grad_(had)


def fisher_diagonal(
    model: PreTrainedModel,
    parameters: Iterable[nn.Parameter],
    windows: CalibrationWindows,
    on_tokens: OnTokens,
) -> dict[nn.Parameter, Tensor]:
    """The mean over tokens of squared gradients of each weight, fp32 in the parameters' shapes."""
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters}

    def add_squares(parameter: nn.Parameter, gradient: Tensor) -> None:
        sums[parameter] += gradient.float().square_()

    drawn_gradients(model, sums, windows, add_squares, on_tokens)
    return {p: total / windows.tokens for p, total in sums.items()}


def _draw(logits: Tensor, source: torch.Generator) -> Tensor:
    """One token for each row of logits [N, V], by their chances: int64 [N]."""
    height = torch.rand(len(logits), 1, generator=source, dtype=torch.float64).to(logits.device)
    chances = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    return torch.searchsorted(chances, height).clamp_(max=logits.shape[1] - 1)[:, 0]
