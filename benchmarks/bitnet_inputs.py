"""Distributions of the inputs of a ternary model: Figures 2 and 3 of BitNet a4.8 in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neuzip.runtime.activations import ACTIVATIONS, site_of
from neuzip.runtime.bitlinear import BitLinear
from neuzip.runtime.hf.sparsity import gates_apart

SMALL_INPUT = 0.1
"""Inputs below this, in roots of the mean square of their token, count as small. Of a Gaussian 8.0 % are."""


@torch.no_grad()
def input_statistics(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Any]:
    """How the inputs of each site are distributed, and those of o_proj once they are quantised.

    inputs      by site, of x over the root of the mean square of its token: excess kurtosis (0 of a
                Gaussian), share of small inputs, and the mean over tokens of the largest magnitude
    out_inputs  by quantiser: share of zeros, and squared error as a share of the squares
    """
    by_site: dict[str, list[Tensor]] = {}
    by_quantizer: dict[str, list[Tensor]] = {}

    def look(site: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2).double()
        z = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        figures = [z.pow(4).mean() - 3, (z.abs() < SMALL_INPUT).double().mean(), z.abs().amax(-1).mean()]
        by_site.setdefault(site, []).append(torch.stack(figures))
        if site != "out":
            return
        for name in ("int8", "int4", "top_k_int8"):
            quantize = ACTIVATIONS[name]
            assert quantize is not None
            tokens = quantize(inputs[0].flatten(0, -2))
            error = (tokens.dequantize().double() - x).square().sum() / x.square().sum()
            zeros = (tokens.codes == 0).double().mean()
            by_quantizer.setdefault(name, []).append(torch.stack([zeros, error]))

    hooks = [
        module.register_forward_pre_hook(partial(look, site_of(name) or "other"))
        for name, module in model.named_modules()
        if isinstance(module, BitLinear)
    ]
    try:
        with gates_apart(model):
            for batch in batches:
                model(batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "inputs": means(by_site, ("excess_kurtosis", "small", "largest")),
        "out_inputs": means(by_quantizer, ("zeros", "relative_error")),
    }


def means(figures: Mapping[str, list[Tensor]], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """The means over layers and batches, by name."""
    return {
        key: dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))
        for key, rows in figures.items()
    }
