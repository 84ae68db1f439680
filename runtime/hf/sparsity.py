"""How many activations are zero in a model, and weights thereby without effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from neuzip.runtime.activations import ACTIVATIONS, site_of
from neuzip.runtime.bitlinear import BitLinear, ReLU2GLU


@dataclass(frozen=True)
class Sparsity:
    """Shares of zeros among the inputs of layers after they are quantised, as Table 2 of a4.8 has them.

    sites    by site; layers of no site are under "other"
    overall  weighted by the layers' parameters
    active, parameters   of these layers: active = (1 - overall) * parameters
    tokens   that were looked at
    """

    sites: dict[str, float]
    overall: float
    active: int
    parameters: int
    tokens: int


@dataclass
class _Count:
    """Zeros among the inputs of a layer, on its device; None before the first."""

    zeros: Tensor | int = 0
    inputs: int = 0

    def add(self, is_zero: Tensor) -> None:
        self.zeros = self.zeros + is_zero.sum()
        self.inputs += is_zero.numel()

    @property
    def share(self) -> float:
        return float(self.zeros) / self.inputs if self.inputs else 0.0


@torch.inference_mode()
def sparsity(model: nn.Module, batches: Iterable[Any]) -> Sparsity:
    """How many inputs of its layers are zero while a model reads batches: token ids [batch, tokens].

    Layers are BitLinear, whose inputs count as quantised, and others of a known site, whose inputs count as
    they are. A weight of up counts as inactive, too, where the activation function of its gate gave zero:
    1 - (1 - inputs) (1 - gate), the paper's formula. A site's share is the mean of its layers, weighted by
    their parameters. Raises ValueError if there is nothing to count.
    """
    counts: dict[str, _Count] = defaultdict(_Count)
    tokens = 0
    with _hooks(model, counts), gates_apart(model):
        for ids in batches:
            model(ids)
            tokens += ids.numel()
    shares = {name: _inactive(name, counts) for name in counts if not name.endswith(GATED)}
    if not shares:
        raise ValueError("no layer whose inputs could be counted was run")
    sizes = {name: _size(model.get_submodule(name)) for name in shares}
    by_site: dict[str, list[str]] = defaultdict(list)
    for name in shares:
        by_site[site_of(name) or "other"].append(name)

    overall, parameters = mean_share(shares, sizes), sum(sizes.values())
    return Sparsity(
        {site: mean_share({n: shares[n] for n in names}, sizes) for site, names in by_site.items()},
        overall, round((1 - overall) * parameters), parameters, tokens,
    )  # fmt: skip


def mean_share(shares: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The mean of shares, weighted by the sizes of the same names."""
    return sum(share * sizes[name] for name, share in shares.items()) / sum(sizes[name] for name in shares)


GATED = ".act_fn"


def _inactive(name: str, counts: Mapping[str, _Count]) -> float:
    share, mlp = counts[name].share, name.rpartition(".")[0]
    has_gate = any(other.rpartition(".")[0] == mlp and site_of(other) == "gate" for other in counts)
    if site_of(name) != "up" or not has_gate or mlp + GATED not in counts:
        return share
    return 1 - (1 - share) * (1 - counts[mlp + GATED].share)


def _size(module: nn.Module) -> int:
    return module.numel if isinstance(module, BitLinear) else module.get_parameter("weight").numel()


@contextmanager
def _hooks(model: nn.Module, counts: dict[str, _Count]) -> Iterator[None]:
    """Count zeros of what goes into layers, and of what comes out of a gate's activation function."""

    def into(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            quantize = ACTIVATIONS[module.activation] if isinstance(module, BitLinear) else None
            counts[name].add((inputs[0] if quantize is None else quantize(inputs[0]).codes) == 0)

        return look

    def out_of(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            counts[name].add(output == 0)

        return look

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, BitLinear) or (
            isinstance(module, nn.Linear | Conv1D) and site_of(name) is not None
        ):
            handles.append(module.register_forward_pre_hook(into(name)))
        elif f".{name}".endswith(GATED):
            handles.append(module.register_forward_hook(out_of(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def gates_apart(model: nn.Module) -> Iterator[None]:
    """Context in which gate and up are called as modules, so that hooks see their inputs."""
    together = [module for module in model.modules() if isinstance(module, ReLU2GLU) and not module.apart]
    for module in together:
        module.apart = True
    try:
        yield
    finally:
        for module in together:
            module.apart = False
