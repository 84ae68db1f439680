"""Ternary layers in models of transformers: which modules they replace, and the mode of a live model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.activations import ReLUSquaredActivation
from transformers.pytorch_utils import Conv1D

from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.kernels.ternary_linear.weight import MOST_COLUMNS
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations, is_glob, site_of
from neuzip.runtime.bitlinear import SUB_NORMS, BitLinear, ReLU2GLU, bit_linears
from neuzip.runtime.weights import BitWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_relu2_glu(module: nn.Module) -> bool:
    """Whether a module is an MLP of gate, up and down with a squared ReLU, and nothing else."""
    children = dict(module.named_children())
    return (
        set(children) - set(SUB_NORMS) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and isinstance(children["act_fn"], ReLUSquaredActivation)
        and not list(module.parameters(recurse=False))
    )


def install(
    model: nn.Module, ternary: Mapping[str, TernaryWeight], activations: Activations | str = "b1.58"
) -> None:
    """Put BitLinear layers in the place of layers of a model, named with their weights, and ReLU2GLUs.

    A layer is an nn.Linear, or a Conv1D whose weight came with one scale. Warns of layers of no site where
    the mode is not the same for all.
    """
    activations = Activations.of(activations)
    layers: dict[int, BitLinear] = {}
    for name, weight in ternary.items():
        old = model.get_submodule(name)
        if id(old) not in layers:
            layers[id(old)] = layer = BitLinear(weight, old.bias, activations.at(name), old.weight.dtype)  # type: ignore[arg-type]
            layer.train(old.training)
            _keep_hook(old, layer)
        model.set_submodule(name, layers[id(old)])
    for name, module in list(model.named_modules()):
        if is_relu2_glu(module) and any(isinstance(m, BitLinear) for m in module.children()):
            model.set_submodule(name, ReLU2GLU(module).train(module.training))
    _warn_of_others(ternary, activations)


def _keep_hook(old: nn.Module, new: nn.Module) -> None:
    """Move what accelerate has hung on a module to another: it sends inputs where the module is."""
    if (hook := getattr(old, "_hf_hook", None)) is not None:
        from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]

        add_hook_to_module(new, hook)


def _warn_of_others(names: Iterable[str], activations: Activations) -> None:
    globs = [glob for glob in activations.sites if is_glob(glob)]
    others = [
        name for name in names if site_of(name) is None and not any(fnmatchcase(name, glob) for glob in globs)
    ]
    if others and activations.mode.startswith("a4.8"):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{activations.mode} has no rule for the layer {others[0]}{more}: inputs are int8", stacklevel=3
        )


def install_arrived(model: nn.Module, activations: Activations | str = "b1.58") -> None:
    """Make BitLinear layers of those of a model whose weight is a BitWeight. Other BitWeights become dense:

    those of layers with the activation "none", those that something else than a layer uses too, and those of
    a Conv1D with several scales, whose groups lie across its products.
    """
    activations = Activations.of(activations)
    users: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    weights: dict[int, BitWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if isinstance(parameter, BitWeight):
                users[id(parameter)].append((path, module, name))
                weights[id(parameter)] = parameter
    ternary: dict[str, TernaryWeight] = {}
    for key, places in users.items():
        as_layer = [_as_layer(module, name, weights[key]) for _, module, name in places]
        if all(as_layer) and all(activations.at(path) != "none" for path, _, _ in places):
            ternary |= {path: w for (path, _, _), w in zip(places, as_layer, strict=True) if w is not None}
        else:
            parameter = nn.Parameter(weights[key].dense())
            for _, module, name in places:
                module._parameters[name] = parameter
    install(model, ternary, activations)


def _as_layer(module: nn.Module, name: str, weight: BitWeight) -> TernaryWeight | None:
    """The weight [out, in] of a layer; None if the module is none that can multiply by it."""
    if name != "weight" or weight.flipped:
        return None
    if isinstance(module, nn.Linear):
        return weight.ternary
    if isinstance(module, Conv1D) and weight.ternary.group is None and weight.shape[0] <= MOST_COLUMNS:
        codes = weight.ternary.codes().t().contiguous()
        return TernaryWeight.of(Ternary(codes, weight.scale), codes.device)
    return None


def set_activations(model: PreTrainedModel, activations: str | Mapping[str, Any] | Activations) -> None:
    """Run the BitLinear layers of a live model in another mode, and have its config say so.

    Raises UsageError for what are no activations.
    """
    activations = Activations.of(activations)
    layers = bit_linears(model)
    for name, layer in layers.items():
        layer.activation = activations.at(name)
    _warn_of_others(layers, activations)
    ACTIVATIONS_ENTRY.set(model.config, activations)


def activations_in_use(model: PreTrainedModel) -> Activations | None:
    """How the inputs of a live model's layers are quantised, None if no layer's are. Raises FormatError."""
    return ACTIVATIONS_ENTRY.get(model.config) if bit_linears(model) else None
