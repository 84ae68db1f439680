"""Ternary weights for a model that was not trained for them, from what its layers see of a text.

Layer after layer, in place: a layer's linear weights become codes times scales, and the next layer sees what
the changed ones give it. Without a text every matrix is quantised by itself. Once they have the checkpoint's
dtype, `neuzip compress --ternary` stores the weights exactly.

Measured on wikilm-26m: benchmarks/ternary_conversion.py. What a language model loses by this is far more than
by any other scheme here; only training brings it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from neuzip.compress.workspace import (
    copy_file,
    publish,
    recover,
    refuse_existing,
    refuse_nesting,
    remove,
    workspace,
    writing,
)
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.runtime.load import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantizer = Literal["absmean", "least-squares", "error-feedback"]


@dataclass(frozen=True)
class Recipe:
    """How weights become ternary.

    quantizer  "absmean" as in b1.58, "least-squares", or "error-feedback", which needs a text
    group      weights of a row that share a scale; "row" for all of them, None for one a tensor
    """

    quantizer: Quantizer = "error-feedback"
    group: int | Literal["row"] | None = "row"

    def apply(self, weight: Tensor, gram: Tensor | None) -> Ternary:
        """The ternary form of weights [out, in], whose inputs have the products `gram`."""
        group = weight.shape[1] if self.group == "row" else self.group
        if self.quantizer == "absmean":
            return quantizers.absmean(weight, group=group)
        if self.quantizer == "least-squares":
            return quantizers.least_squares(weight, group=group)
        assert gram is not None
        return quantizers.error_feedback(weight, gram, group=group)


@torch.no_grad()
def convert(
    model: PreTrainedModel,
    recipe: Recipe,
    windows: Tensor | None = None,
    on_layer: Callable[[], None] = lambda: None,
) -> dict[str, Ternary]:
    """Make the linear weights of all decoder layers ternary; returns them by the names of their parameters.

    windows  int64 [n, T], tokens of a text, one window a row; needed for "error-feedback"

    Raises UsageError without them, NeuzipError for a model whose layers are not found, or are of no use.
    """
    if recipe.quantizer == "error-feedback" and (windows is None or not windows.numel()):
        raise UsageError("error feedback needs a text that the layers see", "give --calibration TEXT")
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    feed = _Feed(model, layers[0], windows) if recipe.quantizer == "error-feedback" else None
    found = {}
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        grams = feed.grams(layer, linears) if feed else {}
        for linear in linears:
            ternary = _rounded(recipe.apply(linear.weight, grams.get(linear)), linear.weight.dtype)
            linear.weight.copy_(ternary.dequantize(linear.weight.dtype))
            found[f"{names[linear]}.weight"] = ternary
        if feed:
            feed.advance(layer)
        on_layer()
    if not found:
        raise NeuzipError(f"{type(model).__name__}: its layers have no linear modules")
    return found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder: the one list of as many modules as the configuration says.

    Raises NeuzipError if there is none.
    """
    number = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise NeuzipError(
        f"{type(model).__name__} has no list of {number} layers", "only decoders of such layers are converted"
    )


def _rounded(ternary: Ternary, dtype: torch.dtype) -> Ternary:
    """With scales that the dtype of the weights holds."""
    return Ternary(ternary.codes, ternary.scale.to(dtype).float(), ternary.group)


class _Seen(Exception):
    """The first layer was reached."""


class _Feed:
    """What goes into a layer, window by window, on the way through the model."""

    def __init__(self, model: PreTrainedModel, first: nn.Module, windows: Tensor | None) -> None:
        assert windows is not None
        self.states: list[Tensor] = []
        self.keywords: dict[str, Any] = {}

        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states, *rest = (*arguments, *([keywords.pop("hidden_states")] if not arguments else []))
            if rest:
                raise NeuzipError(f"{type(first).__name__} takes more than hidden states by position")
            self.states.append(states)
            self.keywords = keywords
            raise _Seen

        hook = first.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            for window in windows.to(model.device):
                try:
                    model(window[None], use_cache=False)
                except _Seen:
                    continue
        finally:
            hook.remove()

    def grams(self, layer: nn.Module, linears: list[nn.Linear]) -> Mapping[nn.Linear, Tensor]:
        """X^T X of the inputs of each linear module, fp32 [in, in]."""
        grams = {
            linear: linear.weight.new_zeros((linear.in_features,) * 2, dtype=torch.float32)
            for linear in linears
        }

        def add(linear: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
            grams[linear].addmm_(x.T, x)  # type: ignore[index]

        hooks = [linear.register_forward_pre_hook(add) for linear in linears]
        try:
            for _ in self._outputs(layer):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return grams

    def advance(self, layer: nn.Module) -> None:
        """Through a layer."""
        self.states = list(self._outputs(layer))

    def _outputs(self, layer: nn.Module) -> Iterator[Tensor]:
        for states in self.states:
            out = layer(states, **self.keywords)
            yield out[0] if isinstance(out, tuple) else out


def save(model: PreTrainedModel, src: str | os.PathLike[str], dst: Path, overwrite: bool = False) -> None:
    """Write a converted model as a plain checkpoint, with all else that lies in the folder `src`.

    Raises NeuzipError, before anything is written if `dst` exists.
    """
    checkpoint = find_checkpoint(src)
    refuse_existing(dst, overwrite)
    refuse_nesting(checkpoint.path, dst)
    recover(dst)
    with workspace(dst) as work:
        for old in work.iterdir():
            remove(old)
        with writing(work):
            with quiet_transformers():
                model.save_pretrained(work)
            for file in checkpoint.others:
                if not (work / file).exists() and not file.endswith(".index.json"):
                    copy_file(checkpoint.root / file, work / file)
        publish(work, dst)
