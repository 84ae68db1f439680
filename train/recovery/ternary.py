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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from neuzip.choices import ConversionQuantizer
from neuzip.compress.overwrite_guard import require_free
from neuzip.compress.storing import storing
from neuzip.compress.workspace import clear, publish, recover, workspace
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.train.plain import write_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TernaryRecipe:
    """The recipe by which weights become ternary.

    quantizer  "absmean" as in b1.58, "least-squares", or "error-feedback", which needs a text
    group      weights of a row that share a scale; "row" for all of them, None for one a tensor
    """

    quantizer: ConversionQuantizer = "error-feedback"
    group: int | Literal["row"] | None = "row"

    def apply(self, weight: Tensor, gram: Tensor | None) -> Ternary:
        """The ternary form of weights [out, in], whose inputs have the products `gram`."""
        columns = weight.shape[1]
        group = columns if self.group == "row" else self.group and min(self.group, columns)
        if self.quantizer == "absmean":
            return quantizers.absmean(weight, group=group)
        if self.quantizer == "least-squares":
            return quantizers.least_squares(weight, group=group)
        assert gram is not None
        return quantizers.error_feedback(weight, gram, group=group)


@torch.no_grad()
def convert(
    model: PreTrainedModel,
    recipe: TernaryRecipe,
    windows: Tensor | None = None,
    on_layer: Callable[[], None] = lambda: None,
) -> dict[str, Ternary]:
    """Make the linear weights of all decoder layers ternary; returns them by the names of their parameters.

    windows  int64 [n, T], tokens of a text, one window a row; needed for "error-feedback"

    Raises UsageError without them, NeuzipError for a model whose layers are not found, or are of no use.
    """
    if recipe.quantizer == "error-feedback" and (windows is None or not windows.numel()):
        raise UsageError("error feedback needs a text that the layers see", "give `text`")
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    feed = _Feed(model, layers, windows) if recipe.quantizer == "error-feedback" else None
    weights = {}
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        grams = feed.grams(layer, linears) if feed else {}
        for linear in linears:
            try:
                ternary = _rounded(recipe.apply(linear.weight, grams.get(linear)), linear.weight.dtype)
            except ValueError as error:  # NaN or infinity
                raise NeuzipError(
                    f"{names[linear]}: {error}", "its dtype may overflow: `device='cpu'` computes in fp32"
                ) from error
            linear.weight.copy_(ternary.dequantize(linear.weight.dtype))
            weights[f"{names[linear]}.weight"] = ternary
        if feed:
            feed.advance(layer)
        on_layer()
    if not weights:
        raise NeuzipError(f"{type(model).__name__}: its layers have no linear modules")
    return weights


def _rounded(ternary: Ternary, dtype: torch.dtype) -> Ternary:
    """Ternary weights with scales rounded to the dtype of the weights."""
    return Ternary(ternary.codes, ternary.scale.to(dtype).float(), ternary.group)


TOKENS_AT_ONCE = 2048
"""Tokens that go through a layer together: short windows one by one would take several times as long."""


class _Seen(Exception):
    """The layer was reached whose arguments are wanted; what comes behind it would be in vain."""


class _Feed:
    """The inputs of a layer, a few windows at a time, as the model is converted layer by layer."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, windows: Tensor | None) -> None:
        assert windows is not None
        first = layers[0]
        self.states: list[Tensor] = []
        parts = torch.split(windows.to(model.device), max(1, TOKENS_AT_ONCE // windows.shape[1]))
        # Layers differ in these: masks of windows, rotary embeddings. The last part may have fewer windows.
        ends = {len(part): part for part in (parts[0], parts[-1])}
        self.keywords = {count: _keywords(model, layers, part) for count, part in ends.items()}

        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states, *rest = (*arguments, *([keywords.pop("hidden_states")] if not arguments else []))
            if rest:
                raise NeuzipError(f"{type(first).__name__} takes more than hidden states by position")
            self.states.append(states)
            raise _Seen

        hook = first.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            for part in parts:
                with suppress(_Seen):
                    model(part, use_cache=False)
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
            out = layer(states, **self.keywords[len(states)][layer])
            yield out[0] if isinstance(out, tuple) else out


def _keywords(
    model: PreTrainedModel, layers: nn.ModuleList, windows: Tensor
) -> dict[nn.Module, dict[str, Any]]:
    """The keyword arguments of each layer beside the hidden states."""
    by_layer: dict[nn.Module, dict[str, Any]] = {}

    def keep(layer: nn.Module, _: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        by_layer[layer] = {name: x for name, x in keywords.items() if name != "hidden_states"}
        if len(by_layer) == len(layers):
            raise _Seen

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        with suppress(_Seen):
            model(windows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return by_layer


def save(model: PreTrainedModel, src: str | os.PathLike[str], dst: Path, overwrite: bool = False) -> None:
    """Write a converted model as a plain checkpoint, with all else that lies in the folder `src`.

    Raises NeuzipError, before anything is written if `dst` exists.
    """
    require_free(src, dst, overwrite)
    recover(dst)
    with workspace(dst, find_checkpoint(src).root) as work:
        clear(work, overwrite)
        with storing(work):
            write_plain(model, work, src)
        publish(work, dst)
