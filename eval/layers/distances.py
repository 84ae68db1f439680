"""Angular distances and cosines between the hidden states of the layers of a decoder.

States are compared in fp64: where two are nearly parallel, arccos halves the digits of their cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuzip.errors import NeuzipError
from neuzip.eval.measures.conventions import Reading
from neuzip.eval.measures.distributed import ROWS, batches
from neuzip.eval.measures.estimates import Estimate, Values, mean
from neuzip.runtime.hf.decoder import decoder_layers, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_BYTES = 128 << 20
"""Bytes of hidden states in fp64 that are compared at a time."""

Matrix = npt.NDArray[np.float64]

OnTokens = Callable[[int], None]


@dataclass(frozen=True)
class Distances:
    """Angular distances d(x^l, x^(l+n)): `mean[n - 1][l]`, for n from 1 to L and l from 0 to L - n.

    x^l is what layer l is given, x^L what the last one gives. Standard errors are over windows, None of too
    few.
    """

    mean: tuple[tuple[float, ...], ...]
    standard_error: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, sums: Sequence[Matrix], counts: Sequence[int]) -> Distances:
        """Distances from the sum of each window, [L + 1, L + 1], over `counts` tokens."""
        size = len(sums[0])
        rows = [
            [mean([float(s[at, at + n]) for s in sums], counts) for at in range(size - n)]
            for n in range(1, size)
        ]
        return cls(
            tuple(tuple(one.value for one in row) for row in rows),
            tuple(tuple(one.standard_error for one in row) for row in rows),
        )

    def between(self, layer: int, n: int = 1) -> Estimate:
        """The distance over `n` layers, from the input of `layer` on."""
        return Estimate(self.mean[n - 1][layer], self.standard_error[n - 1][layer])


@dataclass(frozen=True, eq=False)
class Geometry:
    """Distances between the states of layers. `influence` is 1 - cos(x^l, x^(l+1)) per token, [tokens, L]."""

    last_token: Distances
    all_tokens: Distances
    influence: Values


def compare_states(
    model: PreTrainedModel, reading: Reading, on_tokens: OnTokens = lambda count: None
) -> Geometry:
    """Angular distances and influences on a text, in one pass. Raises NeuzipError for states not finite."""
    last: list[Matrix] = []
    sums: list[Matrix] = []
    counts: list[int] = []
    influence: list[Values] = []
    for batch in batches(reading.ids, reading.windows, ROWS[input_device(model).type]):
        states = states_between(model, batch.ids)
        for number in range(len(batch.ids)):
            angles, cosines = _compared([x[number] for x in states], str(model.config.name_or_path))
            last.append(angles.last)
            sums.append(angles.sum)
            counts.append(batch.ids.shape[1])
            influence.append(1 - cosines)
        on_tokens(batch.ids.numel())
    return Geometry(
        Distances.of(last, [1] * len(last)), Distances.of(sums, counts), np.concatenate(influence)
    )


@torch.inference_mode()
def states_between(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The input of each layer and the output of the last, [B, T, D] each. `ids` is int64 [B, T].

    Raises NeuzipError for layers with other inputs.
    """
    stack = decoder_layers(model)
    states: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states.append(input_states(arguments, keywords))

    def keep_last(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in stack]
    hooks.append(stack[-1].register_forward_hook(keep_last))
    try:
        body: Any = getattr(model, model.base_model_prefix, model)
        body(input_ids=ids.to(input_device(model)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(states) != len(stack) + 1 or any(x.dim() != 3 or x.shape[:2] != ids.shape for x in states):
        raise NeuzipError(
            f"{model.config.name_or_path}: layers of {type(model).__name__} do not hand on one state a token",
            "only decoders whose layers do can be taken apart",
        )
    return states


def input_states(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The hidden states among what a layer is called with."""
    states: Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return states


@dataclass(frozen=True, eq=False)
class _Angles:
    """Angles / pi of all pairs of states of a window, [L + 1, L + 1]: summed over tokens, and of the last."""

    sum: Matrix
    last: Matrix


def _compared(states: Sequence[Tensor], name: str) -> tuple[_Angles, Values]:
    """Angles of L + 1 states of a window, [T, D] each, and cosines of neighbours, [T, L]."""
    tokens, width = states[0].shape
    total = np.zeros((len(states), len(states)))
    neighbours = []
    rows = max(1, STATE_BYTES // (8 * width * len(states)))
    for start in range(0, tokens, rows):
        part = torch.stack([x[start : start + rows].to(states[0].device) for x in states], 1).double()
        directions = functional.normalize(part, dim=-1)
        cosines = (directions @ directions.mT).clamp(-1, 1)  # [rows, L + 1, L + 1]
        if not bool(cosines.isfinite().all()):
            raise NeuzipError(
                f"{name}: what its layers hand on is not finite",
                "the weights may be broken, or their dtype too narrow: try `dtype='float32'`",
            )
        angles = cosines.arccos() / math.pi
        total += angles.sum(0).cpu().numpy()
        neighbours.append(cosines.diagonal(1, 1, 2).cpu().numpy())
    return _Angles(total, angles[-1].cpu().numpy()), np.concatenate(neighbours)
