"""What calibration learns of the tensors of a model from one pass over a text, forward and back.

    gradients   squared: how sensitive predictions are to errors of a tensor's weights
    inputs      X^T X of what comes into a linear module: which errors of columns compensate each other

Linear modules that see the same inputs share X^T X, and so do the experts of a layer. A tensor that is not
the weight of one linear module alone, such as an embedding or the merged experts of a layer, has the products
of its gradients in its place, G^T G: the Fisher information of columns, which X^T X stands for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.compress.expert_names import expert_name
from neuzip.errors import NeuzipError
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.quantize.calibration_windows import BATCH, CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import ParameterPart, PartsByTensor
from neuzip.eval.quantize.gradients import OnTokens, drawn_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRADIENT_TOKENS, GRADIENT_SHARE = 2048, 3
"""Gradients are taken of one window of so many, but of so many tokens at least.

The steps of SmolLM2-135M from every third of 24 windows of 256 tokens cost 0.1 to 0.3 % more divergence than
those from all.
"""

PASSES = 8
"""Backward passes on a GPU, at least, if there are as many windows: a square is the mean of so many."""

LOGITS = 1 << 28
"""Logits of a backward pass over several windows, at most."""

FED = 8192
"""Tokens of a forward pass on a GPU, which few tokens leave idle."""


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """Statistics of a tensor.

    sensitivity  mean squared gradient of a weight, for a token
    gram         key of its Gram matrix, None without
    """

    sensitivity: float
    gram: str | None


@dataclass(frozen=True, eq=False)
class ModelStatistics:
    """Statistics by the names of tensors, and Gram matrices by their keys.

    A Gram matrix is fp32 [C, C], C the last dimension of its tensors.
    """

    tensors: Mapping[str, TensorStatistics]
    grams: dict[str, Tensor]


def gather(
    model: PreTrainedModel,
    places: PartsByTensor,
    windows: CalibrationWindows,
    on_tokens: OnTokens,
    *,
    grams: bool = True,
) -> ModelStatistics:
    """Gather the statistics of the tensors that have a place in the model; without `grams` only gradients.

    Some windows run forward only, without the head's logits, which costs less than a third: inputs have to be
    many, as X^T X has to be of full rank, but the mean square of all gradients of a tensor is known from few
    windows. A GPU runs several windows at once.
    """
    gathering = _Gathering(model, places, grams)
    of_gradients, of_inputs = windows.divided(GRADIENT_TOKENS, GRADIENT_SHARE)
    headed = HeadedModel(model)
    on_cpu = headed.device.type == "cpu"
    batch = 1 if on_cpu else windows_of_pass(of_gradients, headed.vocabulary)

    def on_window(count: int) -> None:
        gathering.forget_inputs()
        on_tokens(count)

    hooks = [module.register_forward_pre_hook(gathering.see) for module in gathering.linears]
    try:
        parameters = {part.parameter for part in places.values()}
        drawn_gradients(model, parameters, of_gradients, gathering.add_gradient, on_window, batch=batch)
        for fed, _ in of_inputs.batches(BATCH if on_cpu else FED) if gathering.linears else ():
            headed.predictions(fed)
            on_window(fed.numel())
    finally:
        for hook in hooks:
            hook.remove()
    return gathering.result(of_gradients.tokens)


def windows_of_pass(windows: CalibrationWindows, vocabulary: int) -> int:
    """How many windows a backward pass takes: of few logits in all, and so that there are PASSES.

    >>> windows_of_pass(CalibrationWindows(torch.zeros(32, 1024), torch.zeros(32, 1024)), 49152)
    4
    """
    count, width = windows.fed.shape
    return max(1, min(count // PASSES, LOGITS // (width * vocabulary)))


class _Gathering:
    """Sums over the windows so far.

    linears  the modules that are the only ones with their weight, and the names of their tensors
    """

    def __init__(self, model: PreTrainedModel, places: PartsByTensor, grams: bool) -> None:
        self._parts: dict[nn.Parameter, list[tuple[str, ParameterPart]]] = defaultdict(list)
        for name, part in places.items():
            self._parts[part.parameter].append((name, part))
        self.linears = _linears(model, self._parts) if grams else {}
        others = places.keys() - self.linears.values() if grams else set()
        self._of_gradients = {name: _key(name, places[name].parameter.shape) for name in others}
        self._keys = dict(self._of_gradients)
        self._squares: dict[str, Tensor] = {}
        self._grams: dict[str, Tensor] = {}
        self._last: tuple[object, str] = (None, "")

    def see(self, linear: nn.Linear, arguments: tuple[Any, ...]) -> None:
        """Add the inputs of a linear module, unless the module before it has seen them."""
        inputs, name = arguments[0], self.linears[linear]
        if inputs is self._last[0]:
            self._keys[name] = self._last[1]
            return
        key = self._keys.setdefault(name, _key(name, linear.weight.shape))
        self._last = inputs, key
        self._add(key, inputs.detach().reshape(-1, inputs.shape[-1]).float())

    def forget_inputs(self) -> None:
        """Keep no inputs of a window that is done."""
        self._last = (None, "")

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of a pass."""
        for name, part in self._parts[parameter]:
            g = part.of(gradient).float()
            squares = g.square().mean(dtype=torch.float64)
            self._squares[name] = self._squares.get(name, 0) + squares
            if name in self._of_gradients and g.dim():
                self._add(self._of_gradients[name], g.reshape(-1, g.shape[-1]))

    def result(self, tokens: int) -> ModelStatistics:
        """The sums, and squares as their means over tokens. Raises NeuzipError for what is not finite."""
        means = {name: float(squares) / tokens for name, squares in self._squares.items()}
        for name, mean in means.items():
            gram = self._grams.get(self._keys.get(name, ""))
            if not math.isfinite(mean) or (gram is not None and not bool(gram.isfinite().all())):
                raise NeuzipError(
                    f"{name}: its gradients or inputs on the calibration text hold NaN or infinity",
                    "check the checkpoint's weights, or give `calibration='none'`",
                )
        smoothed = _smoothed(means)
        return ModelStatistics(
            {name: TensorStatistics(mean, self._keys.get(name)) for name, mean in smoothed.items()},
            self._grams,
        )

    def _add(self, key: str, x: Tensor) -> None:
        """Add X^T X of rows, fp32 [n, C]."""
        if key not in self._grams:
            self._grams[key] = x.new_zeros(x.shape[1], x.shape[1])
        self._grams[key].addmm_(x.T, x)


def _linears(
    model: PreTrainedModel, parts: Mapping[nn.Parameter, Sequence[tuple[str, ParameterPart]]]
) -> dict[nn.Linear, str]:
    """The linear modules whose weight is one tensor, and no other module's; with the tensors' names."""
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    linears = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, nn.Parameter):
            tensors = parts.get(weight, ())
            if owners[weight] == 1 and len(tensors) == 1:
                linears[module] = tensors[0][0]
    return linears


def _smoothed(means: Mapping[str, float]) -> dict[str, float]:
    """Sensitivities, that of each expert halfway to the mean of its layer: a text chooses few experts."""
    layers: dict[str, list[float]] = defaultdict(list)
    for name, mean in means.items():
        layers[_kind(name)].append(mean)
    of_layer = {kind: math.fsum(values) / len(values) for kind, values in layers.items()}
    return {name: (mean + of_layer[_kind(name)]) / 2 for name, mean in means.items()}


def _kind(name: str) -> str:
    """A tensor's name, without the number of its expert."""
    expert = expert_name(name)
    return name if expert is None else expert.kind


def _key(name: str, shape: torch.Size) -> str:
    """The key of a tensor's Gram matrix: the experts of a layer that have one shape share it."""
    return f"{_kind(name)} {tuple(shape)}"
