"""Routes of tokens to experts: recorded, and taken by another form of a model, so that only products differ.

A router takes the experts with the largest scores. Where two scores are nearly equal, a sum in another order
may choose another expert, and the outputs of two experts of random weights have nothing in common. So forms
are compared on the same routes, and how many routes differ is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from neuzip.runtime.decode.agreement import Agreement, agreement
from neuzip.runtime.decode.greedy import GreedyDecoder, NotGraphable
from neuzip.runtime.residency import expert_modules

Tensor = torch.Tensor


@dataclass(frozen=True)
class Route:
    """The experts of tokens in one layer, int64 [tokens, k], and their weights [tokens, k]."""

    index: Tensor
    weights: Tensor


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[list[Route]]]:
    """Within which every call of experts adds its routes to the list of its layer."""
    modules = list(expert_modules(model))
    routes: list[list[Route]] = [[] for _ in modules]

    def hook_of(calls: list[Route]) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            calls.append(Route(inputs[1].clone(), inputs[2].clone()))

        return hook

    with ExitStack() as stack:
        for module, calls in zip(modules, routes, strict=True):
            stack.callback(module.register_forward_pre_hook(hook_of(calls)).remove)
        yield routes


@contextmanager
def replayed(model: nn.Module, routes: Sequence[Route]) -> Iterator[list[int]]:
    """Within which each layer takes these routes in place of its own.

    The list has for each layer how many of its own choices were among them, [tokens, k] together.
    """
    modules = list(expert_modules(model))
    same = [0] * len(modules)

    def hook_of(number: int, route: Route) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            hidden, own, weights = inputs
            same[number] += int((own[..., None] == route.index[..., None, :]).any(-1).sum())
            return hidden, route.index, route.weights.to(weights.dtype)

        return hook

    with ExitStack() as stack:
        for number, (module, route) in enumerate(zip(modules, routes, strict=True)):
            stack.callback(module.register_forward_pre_hook(hook_of(number, route)).remove)
        yield same


def joined(routes: Sequence[Sequence[Route]]) -> list[Route]:
    """One route a layer of several calls, whose tokens follow each other."""
    return [
        Route(torch.cat([call.index for call in calls]), torch.cat([call.weights for call in calls]))
        for calls in routes
    ]


def decoder_of(model: PreTrainedModel, batch: int, length: int) -> GreedyDecoder:
    """A decoder whose step is a CUDA graph if that is possible; its `graphed` says whether it is."""
    try:
        return GreedyDecoder(model, batch, length)
    except NotGraphable:
        return GreedyDecoder(model, batch, length, graph=False)


@dataclass(frozen=True)
class GreedyAgreement:
    """Greedy tokens of a form of a model, by a CUDA graph if `graphed`, and what the original makes of them.

    `own` is the agreement of the original as it is; `routed` that of the original on the routes of the form,
    of which `same_routes` of `routes` are the original's choice.
    """

    graphed: bool
    own: Agreement
    routed: Agreement
    same_routes: int
    routes: int

    @property
    def fits(self) -> bool:
        """Whether every token is the original's choice or tied with it, on the routes of the form."""
        return self.routed.chosen + self.routed.tied == self.routed.tokens


@torch.no_grad()
def greedy_agreement(
    original: PreTrainedModel, form: PreTrainedModel, ids: Tensor, new_tokens: int
) -> GreedyAgreement:
    """Decode one text, int64 [1, tokens], with `form`, and have `original` judge the tokens.

    Raises ValueError if a CUDA graph gives other tokens than steps without one, whose routes are recorded.
    """
    length = ids.shape[1] + new_tokens
    decoder = decoder_of(form, 1, length)
    with recorded(form) as calls:
        tokens = GreedyDecoder(form, 1, length, graph=False).generate(ids, new_tokens)
    if decoder.graphed and not torch.equal(tokens, decoder.generate(ids, new_tokens)):
        raise ValueError("a CUDA graph chooses other tokens than steps without one")
    routes = joined(calls)
    own = agreement(original, ids, tokens)
    with replayed(original, routes) as same:
        routed = agreement(original, ids, tokens)
    count = sum(route.index.numel() for route in routes)
    return GreedyAgreement(decoder.graphed, own, routed, sum(same), count)


@dataclass(frozen=True)
class RouteSpread:
    """How evenly tokens are routed, means over layers and steps.

    `experts` is how many experts have a token; `busiest` the tokens of the one with the most, as a multiple
    of what each would have if all had as many.
    """

    experts: float
    busiest: float


def use_of(indices: Sequence[Tensor], experts: int) -> RouteSpread:
    """How evenly tokens are routed, of the experts [tokens, k] of every layer and step."""
    counts = torch.stack([index.flatten().bincount(minlength=experts) for index in indices]).float()
    busiest = counts.amax(dim=1) / counts.mean(dim=1)
    return RouteSpread(float((counts > 0).sum(dim=1).float().mean()), float(busiest.mean()))


@torch.no_grad()
def use_in_steps(model: PreTrainedModel, texts: Tensor, new_tokens: int) -> RouteSpread:
    """How evenly the last `new_tokens` of texts, int64 [batch, tokens], are routed, a step at a time."""
    with recorded(model) as calls:
        model(texts, use_cache=False, logits_to_keep=1)
    steps = [
        step
        for route in joined(calls)
        for step in route.index.view(*texts.shape, -1)[:, -new_tokens:].unbind(1)
    ]
    return use_of(steps, len(next(expert_modules(model)).gate_up_proj))
