"""A model whose layers can be left out, and the choice of those that it misses least."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from neuzip.choices import LayerChoice
from neuzip.errors import NeuzipError
from neuzip.eval.layers.distances import Distances, OnTokens, input_states
from neuzip.eval.layers.layer_report import LayerReport
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.head import HeadedModel
from neuzip.runtime.hf.decoder import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LayerRemoval:
    """Layers to drop, rising, and the model without them. `order` is that in which they were chosen.

    `klds` are the divergences, in nats a token, after each choice. `parameters` are those that go.
    """

    choice: LayerChoice
    layers: tuple[int, ...]
    order: tuple[int, ...]
    klds: tuple[float, ...]
    parameters: int
    comparison: Comparison


class ModelWithout(HeadedModel):
    """A model that predicts as if the layers `left_out` were not there; at all other times it is whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.left_out: Collection[int] = ()
        super().__init__(model)

    def _run(self, ids: Tensor) -> Tensor:
        stack = decoder_layers(self.model)
        with _passing_on([stack[number] for number in self.left_out]):
            return super()._run(ids)


@contextmanager
def _passing_on(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which layers return their input states.

    They still compute: what else they give keeps its form, which differs from model to model.
    """

    def pass_on(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        states = input_states(arguments, keywords)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    hooks = [layer.register_forward_hook(pass_on, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_without(
    baseline: BaselineComparison,
    model: ModelWithout,
    layers: Collection[int],
    on_tokens: OnTokens = lambda count: None,
) -> Comparison | None:
    """The model without some layers beside the whole one; None where its predictions are not finite."""
    model.left_out = layers
    try:
        return baseline.compare(model, on_tokens)
    except NotFinite:
        return None
    finally:
        model.left_out = ()


def choose(
    baseline: BaselineComparison,
    model: ModelWithout,
    layers: Sequence[LayerReport],
    distances: Distances,
    drop: int,
    choice: LayerChoice,
    stage: Stage,
) -> LayerRemoval:
    """`drop` layers that are missed least.

    greedy   one after the other, each the one that with those before it makes the smallest divergence
    block    neighbours, those without which the divergence is smallest
    angular  neighbours with the smallest angular distance at last tokens, as Gromov et al. choose

    Raises NeuzipError if no choice leaves a model whose predictions are finite.
    """
    order: list[int] = []
    klds: list[float] = []
    best: Comparison | None = None
    if choice == "greedy":
        for step in range(drop):
            candidates = [[*order, n] for n in range(len(layers)) if n not in order]
            known = [layer.without for layer in layers] if step == 0 else None
            order, best = _least(baseline, model, candidates, stage, f"drop {step + 1} of {drop}", known)
            klds.append(best.kld.mean.value)
    else:
        starts: Sequence[int] = range(len(layers) - drop + 1)
        if choice == "angular":
            starts = [min(starts, key=lambda at: distances.mean[drop - 1][at])]
        blocks = [list(range(at, at + drop)) for at in starts]
        order, best = _least(baseline, model, blocks, stage, "blocks")
        klds.append(best.kld.mean.value)
    assert best is not None
    return LayerRemoval(
        choice=choice,
        layers=tuple(sorted(order)),
        order=tuple(order),
        klds=tuple(klds),
        parameters=sum(layers[n].parameters for n in order),
        comparison=best,
    )


def _least(
    baseline: BaselineComparison,
    model: ModelWithout,
    candidates: Sequence[list[int]],
    stage: Stage,
    label: str,
    known: Sequence[Comparison | None] | None = None,
) -> tuple[list[int], Comparison]:
    """The set of layers without which the divergence is smallest; the first of equal ones."""
    if known is None:
        with stage(label, len(candidates) * baseline.tokens, "tokens") as advance:
            known = [measure_without(baseline, model, one, advance) for one in candidates]
    finite = [
        (one, comparison) for one, comparison in zip(candidates, known, strict=True) if comparison is not None
    ]
    if not finite:
        raise NeuzipError(
            f"{baseline.base.name}: without {len(candidates[0])} of its layers no prediction is finite",
            "drop fewer, or try `dtype='float32'`",
        )
    return min(finite, key=lambda pair: pair[1].kld.mean.value)
