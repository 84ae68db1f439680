"""Models whose linear weights are latent, made of ternary or of dense ones, and made ternary again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from neuzip.compress.schemes import ternary_coding as forms
from neuzip.errors import NeuzipError
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.ternary_layers import install
from neuzip.train.recovery.straight_through import Group, LatentLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLOSE = {torch.float32: 1e-3}
"""Relative error up to which the logits of a model are those of a plain linear head."""
CLOSE_OTHERWISE = 0.02


def runnable(
    path: str | os.PathLike[str], activations: str | None = None, device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A plain checkpoint with ternary weights as it runs once it is compressed: inputs quantised.

    `activations` None is what config.json says, or b1.58. Raises NeuzipError if no weight is ternary.
    """
    model = load_model(path, dtype, device, attention=False)
    layers = ternary_layers(model)
    if not layers:
        raise NeuzipError(f"{path}: has no ternary weights", "neuzip recover makes them")
    mode = activations or ACTIVATIONS_ENTRY.read(path) or "b1.58"
    install(model, {n: TernaryWeight.of(t, device) for n, t in layers.items()}, mode)
    return model


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear modules of the decoder layers, by their names."""
    names = {module: name for name, module in model.named_modules()}
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                yield names[module], module


def ternary_layers(model: PreTrainedModel) -> dict[str, Ternary]:
    """The linear weights with ternary values and a scale a tensor or row, by the names of layers."""
    layers = {}
    for name, linear in linear_layers(model):
        ternary = forms.find_exact(linear.weight.detach())
        if ternary is not None:
            layers[name] = ternary
    return layers


def make_latent(
    student: PreTrainedModel,
    base: PreTrainedModel,
    starts: Mapping[str, Ternary],
    activations: str,
    learned: bool,
    group: Group,
    dtype: torch.dtype,
    latent_dtype: torch.dtype = torch.float32,
) -> None:
    """Put LatentLinear layers in the place of those in `starts`, or of all linear ones if there is none.

    Latent weights are those of `base`. With `learned` they are moved to where they have the codes of
    `starts`, and scales are those of it, of values of `dtype`. Raises NeuzipError for another base.
    """
    originals = dict(linear_layers(base))
    by_site = Activations.of(activations)
    for name, linear in list(linear_layers(student)):
        if name not in originals or originals[name].weight.shape != linear.weight.shape:
            raise NeuzipError(
                f"{name}: is not in {base.config.name_or_path}, or has another shape there",
                "`original` is the model that `source` was made of",
            )
        if starts and name not in starts:
            continue
        start = starts.get(name) if learned else None
        layer = LatentLinear(
            originals[name].weight.to(student.device), linear.bias, start=start, learned=learned,
            group=group if start is None else "row" if start.scale.dim() else None,
            activation=by_site.at(name), dtype=dtype, latent_dtype=latent_dtype,
        )  # fmt: skip
        student.set_submodule(name, layer)
    student.requires_grad_(True)


def dense_layer(layer: LatentLinear, ternary: Ternary) -> nn.Linear:
    """An ordinary layer, of scale * codes in the dtype of the checkpoint."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
    linear.weight = nn.Parameter(ternary.dequantize(layer.dtype))
    linear.register_parameter("bias", layer.bias)
    return linear


def head_weight(model: PreTrainedModel) -> Tensor:
    """The weight of the output head, [V, D]."""
    weight = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def require_plain_head(model: PreTrainedModel) -> None:
    """Raise NeuzipError if logits are not hidden states times a matrix: a soft cap, a bias."""
    ids = torch.arange(8, device=model.device)[None]
    logits = model(ids, use_cache=False).logits.float()
    hidden = model.base_model(ids, use_cache=False).last_hidden_state
    error = (logits - (hidden @ head_weight(model).T).float()).abs().max() / logits.abs().max()
    if not float(error) <= CLOSE.get(model.dtype, CLOSE_OTHERWISE):
        raise NeuzipError(
            f"{type(model).__name__}: its logits are not hidden states times the output embedding",
            "heads with a bias, a scale or a soft cap are not distilled",
        )
