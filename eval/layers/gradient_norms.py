"""Norms of the gradients of the parameters of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuzip.errors import NeuzipError
from neuzip.eval.layers.distances import OnTokens
from neuzip.eval.measures.estimates import Estimate, mean
from neuzip.eval.measures.windows import TokenWindow
from neuzip.runtime.hf.decoder import decoder_layers, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def gradient_norms(
    model: PreTrainedModel,
    ids: Tensor,
    windows: Sequence[TokenWindow],
    on_window: OnTokens = lambda count: None,
) -> list[Estimate]:
    """The norm of the gradient of each layer's parameters: of a window's mean loss, the mean over windows.

    A gradient is dropped as soon as its squares are summed. Raises NeuzipError where one is not finite.
    """
    stack = decoder_layers(model)
    owner = {p: number for number, layer in enumerate(stack) for p in layer.parameters()}
    had_gradient = {p: p.requires_grad for p in model.parameters()}
    norms = []

    def add_squares(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        squares[owner[parameter]] += parameter.grad.float().square().sum(dtype=torch.float64)
        parameter.grad = None

    hooks = []
    try:
        for parameter in had_gradient:
            parameter.requires_grad_(parameter in owner and parameter.is_floating_point())
        hooks = [
            p.register_post_accumulate_grad_hook(add_squares)  # type: ignore[no-untyped-call]
            for p in owner
            if p.requires_grad
        ]
        for w in windows:
            squares = torch.zeros(len(stack), dtype=torch.float64, device=input_device(model))
            fed, targets = ids[w.start : w.stop], ids[w.start + 1 : w.stop + 1]
            with torch.enable_grad():
                logits = model(input_ids=fed[None].to(input_device(model)), use_cache=False).logits[0]
                functional.cross_entropy(logits.float(), targets.to(logits.device)).backward()  # type: ignore[no-untyped-call]
            norms.append(squares.sqrt().tolist())
            on_window(1)
    except torch.OutOfMemoryError as error:
        raise NeuzipError(
            f"{model.config.name_or_path}: gradients of a window of {w.stop - w.start} tokens do not fit",
            "leave them out with `gradients=0`, or make the `window` smaller",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, had in had_gradient.items():
            parameter.requires_grad_(had)
    if not np.isfinite(norms).all():
        raise NeuzipError(
            f"{model.config.name_or_path}: gradients of its layers are not finite",
            "leave them out with `gradients=0`, or try `dtype='float32'`",
        )
    return [mean([of_window[n] for of_window in norms], [1] * len(norms)) for n in range(len(stack))]
