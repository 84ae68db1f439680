"""Counts how often the routers of a live model choose each expert.

merged experts    one module that holds the matrices of all experts in 3-D parameters, as in transformers 5:
                  it is called with the chosen experts and their weights, [tokens, k] each
lists of modules  one module for each expert, as in transformers 4 and in code of model authors: each is
                  called with the tokens that chose it, and the weights are not seen
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.errors import NeuzipError
from neuzip.eval.experts.expert_use import LayerUse
from neuzip.runtime.hf.decoder import decoder_layers, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnTokens = Callable[[int], None]


class NotCounted(NeuzipError):
    """It cannot be seen which experts a model chooses."""


def count_use(
    model: PreTrainedModel, batches: Iterable[Tensor], on_tokens: OnTokens = lambda count: None
) -> tuple[LayerUse, ...]:
    """The use of the experts of each layer on some tokens, int64 [B, T] a batch; empty without experts.

    Raises NotCounted for a model that calls its experts in a way that does not show who was chosen.
    """
    counters = list(_counters(model))
    if not counters:
        return ()
    body: Any = getattr(model, model.base_model_prefix, model)
    hooks = [hook for counter in counters for hook in counter.hooks()]
    try:
        with torch.inference_mode():
            for ids in batches:
                body(input_ids=ids.to(input_device(model)), use_cache=False)
                on_tokens(ids.numel())
    finally:
        for hook in hooks:
            hook.remove()
    seen = [counter.use() for counter in counters if counter.calls]
    if not seen:
        raise NotCounted(
            f"{model.config.name_or_path}: {type(model).__name__} does not tell its experts which of them are"
            " chosen, so they cannot be counted",
            "its experts would have to be called with an index of [tokens, experts per token]",
        )
    return tuple(seen)


@dataclass
class _Counter:
    """Counts for the experts of one module: `merged`, or a list of modules."""

    layer: int
    name: str
    module: nn.Module
    experts: int
    calls: int = 0
    tokens: Tensor | None = None
    weights: Tensor | None = None
    _rows: dict[int, int] = field(default_factory=dict)

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Begin to count."""
        if isinstance(self.module, nn.ModuleList):
            for number, expert in enumerate(self.module):
                yield expert.register_forward_pre_hook(partial(self._count_rows, number))
        else:
            yield self.module.register_forward_pre_hook(self._count_pairs, with_kwargs=True)

    def use(self) -> LayerUse:
        """The counts so far."""
        if self.tokens is None:
            rows = tuple(self._rows.get(number, 0) for number in range(self.experts))
            return LayerUse(self.layer, self.name, rows, None)
        weights = None if self.weights is None else tuple(self.weights.tolist())
        return LayerUse(self.layer, self.name, tuple(self.tokens.tolist()), weights)

    def _count_rows(self, number: int, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            self.calls += 1
            rows = arguments[0].shape[:-1].numel()
            self._rows[number] = self._rows.get(number, 0) + rows

    def _count_pairs(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)]
        index = next((x for x in tensors if x.dtype in (torch.int64, torch.int32) and x.dim() == 2), None)
        if index is None:
            return
        self.calls += 1
        weights = _weights_of(index, tensors, self.experts)
        known = ((index >= 0) & (index < self.experts)).flatten()  # experts of other processes have none
        chosen = index.flatten()[known]
        tokens = torch.bincount(chosen, minlength=self.experts)
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        if weights is not None:
            sums = torch.bincount(chosen, weights.flatten()[known].double(), minlength=self.experts)
            self.weights = sums if self.weights is None else self.weights + sums


def _weights_of(index: Tensor, tensors: Iterable[Tensor], experts: int) -> Tensor | None:
    """The routing weights [tokens, k] among what experts are called with, None if there are none.

    gpt-oss of transformers 4 has a row of all experts for each token.
    """
    _, *floats = [x for x in tensors if x.is_floating_point()]  # the first one is what experts multiply
    for x in floats:
        if x.shape == index.shape:
            return x
        if x.shape == (len(index), experts):
            return x.gather(1, index.long())
    return None


def _counters(model: PreTrainedModel) -> Iterator[_Counter]:
    """A counter for each module of experts, by layer."""
    names = {module: name for name, module in model.named_modules()}
    for layer, block in enumerate(decoder_layers(model)):
        for path, module in block.named_modules():
            if isinstance(module, nn.ModuleList):
                if path.rpartition(".")[2] == "experts" and len(module) > 1:
                    yield _Counter(layer, names[module], module, len(module))
                continue
            sizes = {len(p) for p in module.parameters(recurse=False) if p.dim() == 3}
            if len(sizes) == 1 and max(sizes) > 1 and not isinstance(module, nn.modules.conv._ConvNd):
                yield _Counter(layer, names[module], module, max(sizes))
