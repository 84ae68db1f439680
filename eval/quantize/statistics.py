"""What calibration learns of the tensors of a model from one pass over a text, forward and back.

    gradients   squared, summed by row: how sensitive predictions are to errors of a row's weights
    inputs      X^T X of what comes into a linear module: which errors of columns compensate each other

Linear modules that see the same inputs share X^T X, and so do the experts of a layer. A tensor that is not
the weight of one linear module alone, such as an embedding or the merged experts of a layer, has the products
of its gradients in its place, G^T G: the Fisher information of columns, which X^T X stands for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.compress.expert_names import expert_name
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import PartsByTensor
from neuzip.eval.quantize.gradients import OnTokens, drawn_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """Statistics of a tensor of R rows and C columns (its last dimension).

    rows  fp32 [2, R], mean squared gradient of a weight of each row, for a token: of every other window
    gram  key of its Gram matrix, None without
    """

    rows: Tensor
    gram: str | None


@dataclass(frozen=True, eq=False)
class ModelStatistics:
    """Statistics by the names of tensors, and Gram matrices, fp32 [C, C], by their keys."""

    tensors: Mapping[str, TensorStatistics]
    grams: Mapping[str, Tensor]


def gather(
    model: PreTrainedModel,
    places: PartsByTensor,
    windows: CalibrationWindows,
    on_tokens: OnTokens,
    *,
    grams: bool = True,
) -> ModelStatistics:
    """Gather the statistics of the tensors that have a place in the model; without `grams` only gradients."""
    gathering = _Gathering(model, places, grams)
    hooks = [module.register_forward_pre_hook(gathering.see) for module in gathering.linears]
    try:
        parameters = {part.parameter for part in places.values()}
        drawn_gradients(
            model,
            parameters,
            windows,
            gathering.add_gradient,
            lambda count: gathering.next_window(on_tokens, count),
        )
    finally:
        for hook in hooks:
            hook.remove()
    return gathering.result(windows)


class _Gathering:
    """Sums over the windows so far."""

    def __init__(self, model: PreTrainedModel, places: PartsByTensor, grams: bool) -> None:
        self._window = 0
        self._of_parameter = defaultdict(list)
        for name, part in places.items():
            self._of_parameter[part.parameter].append((name, part))
        owners = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
        self.linears: dict[nn.Module, str] = {
            module: self._of_parameter[module.weight][0][0]
            for module in model.modules()
            if grams
            and isinstance(module, nn.Linear)
            and owners[module.weight] == 1
            and len(self._of_parameter.get(module.weight, ())) == 1
        }
        of_linears = set(self.linears.values())
        self._from_gradients = {
            name: _shared_key(name, part.parameter)
            for name, part in places.items()
            if grams and name not in of_linears
        }
        self._rows: dict[str, Tensor] = {}
        self._keys = dict(self._from_gradients)
        self._grams: dict[str, Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def see(self, linear: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Add the inputs of a linear module, unless the module before it has seen them."""
        inputs = arguments[0].detach()
        name = self.linears[linear]
        if self._last is not None and arguments[0] is self._last[0]:
            self._keys[name] = self._last[1]
            return
        expert = expert_name(name)
        key = self._keys.setdefault(name, name if expert is None else expert.kind)
        self._last = arguments[0], key
        x = inputs.reshape(-1, inputs.shape[-1]).float()
        self._gram(key, x).addmm_(x.T, x)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of a window."""
        for name, part in self._of_parameter[parameter]:
            g = part.of(gradient).float()
            g = g.reshape(-1, g.shape[-1]) if g.dim() else g.reshape(1, 1)
            if name not in self._rows:
                self._rows[name] = g.new_zeros(2, len(g))
            self._rows[name][self._window % 2] += g.square().mean(1)
            if name in self._from_gradients:
                self._gram(self._from_gradients[name], g).addmm_(g.T, g)

    def next_window(self, on_tokens: OnTokens, count: int) -> None:
        """A window is done."""
        self._window += 1
        self._last = None
        on_tokens(count)

    def result(self, windows: CalibrationWindows) -> ModelStatistics:
        """The sums as means."""
        halves = [len(windows.fed[half::2]) * windows.targets.shape[1] for half in (0, 1)]
        return ModelStatistics(
            {
                name: TensorStatistics(
                    rows / torch.tensor(halves, device=rows.device).clamp(min=1)[:, None],
                    self._keys.get(name),
                )
                for name, rows in self._rows.items()
            },
            self._grams,
        )

    def _gram(self, key: str, x: Tensor) -> Tensor:
        if key not in self._grams:
            self._grams[key] = x.new_zeros(x.shape[1], x.shape[1])
        return self._grams[key]


def _shared_key(name: str, parameter: nn.Parameter) -> str:
    """Matrices that are merged into one parameter share a key, and so do the experts of a layer."""
    expert = expert_name(name)
    if expert is not None:
        return f"{expert.kind} {tuple(parameter.shape)}"
    return name
