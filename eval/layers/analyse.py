"""What each layer of a decoder is worth: how little it changes, and what the model loses without it.

    angular distance  d(x^l, x^(l+n)) = arccos(cos(x^l, x^(l+n))) / pi between what layers l and l + n are
                      given, for all l and n: at the last token of each window (Gromov et al. 2024, "The
                      Unreasonable Ineffectiveness of the Deeper Layers"; Mix-LN, arXiv 2412.13795), and at
                      all tokens
    block influence   1 - E cos(x^l, x^(l+1)), over all tokens (Men et al. 2024, "ShortGPT")
    gradient norm     of the mean loss of a window, over all parameters of the layer
    left out          divergence and loss of the model with this layer passing on what it is given

The last is the measure, the others predict it; how well they do is told as Spearman's rank correlation.
States are compared in fp64: where two are nearly parallel, arccos halves the digits of their cosine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuzip.choices import LayerChoice
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.conventions import Reading, TokenWindow
from neuzip.eval.measures.distributed import ROWS, batches
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate, Values, mean
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Text
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import decoder_layers, input_device
from neuzip.runtime.hf.messages import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

"""How layers to drop are chosen: see `choose`."""

MAX_TOKENS = 16384
"""Tokens predicted if nothing else is asked for."""

GRADIENT_WINDOWS = 8
"""Windows that gradients are taken of, if there are as many and nothing else is asked for."""

STATE_BYTES = 128 << 20
"""Hidden states in fp64 that are compared at a time."""

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
        """From the sums of each window, [L + 1, L + 1], over as many tokens."""
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
        """What `n` layers from this one on do."""
        return Estimate(self.mean[n - 1][layer], self.standard_error[n - 1][layer])


@dataclass(frozen=True)
class LayerReport:
    """A layer, and what it is worth. `without` is the model without it, None where that is not finite.

    `angular_distance` is at last tokens. `gradient_norm` is None where none was asked for.
    """

    number: int
    parameters: int
    block_influence: Estimate
    angular_distance: Estimate
    angular_distance_all_tokens: Estimate
    gradient_norm: Estimate | None
    without: Comparison | None

    @property
    def kld(self) -> float:
        """The divergence of the model without it, in nats a token; infinite where it is not finite."""
        return math.inf if self.without is None else self.without.kld.mean.value


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


@dataclass(frozen=True)
class LayerAnalysis:
    """What was measured of the layers of a model.

    `rank_correlations` are those of each metric with the divergence of the model without the layer, None
    where a metric is the same for all; "depth" says that later layers are worth less. `parameters` are all of
    the model's; it computed in `dtype`, its config says `stored_dtype`. `special_tokens` says what stands in
    front of windows, as in `Convention`.
    """

    text: str
    window: int
    windows: int
    tokens: int
    gradient_windows: int
    layers: tuple[LayerReport, ...]
    last_token: Distances
    all_tokens: Distances
    rank_correlations: dict[str, float | None]
    removal: LayerRemoval | None
    parameters: int
    blocks: str
    device: str
    dtype: str
    stored_dtype: str
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)
    special_tokens: str = "none"


def analyse(
    path: str | os.PathLike[str],
    text: Text,
    stage: Stage,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    gradient_windows: int = GRADIENT_WINDOWS,
    drop: int | None = None,
    choice: LayerChoice = "greedy",
    device: str = "auto",
    dtype: str = "auto",
) -> LayerAnalysis:
    """Measure the layers of a checkpoint folder on a text; and choose `drop` of them that it misses least.

    Raises NeuzipError for what is no decoder and for a text that is too short, and UsageError for windows
    that cannot be and for a `drop` that leaves no layer.
    """
    began = time.monotonic()
    baseline = BaselineComparison(
        path, text, window=window, max_tokens=max_tokens or MAX_TOKENS, device=device, dtype=dtype
    )
    model, reading = baseline.model, baseline.reading
    stack = decoder_layers(model)
    require_some_left(len(stack), drop)
    with stage("states", reading.convention.tokens, "tokens") as advance:
        geometry = compare_states(model, reading, advance)
    windows = reading.windows[:gradient_windows]
    norms: list[Estimate] | None = None
    if windows:
        with stage("gradients", len(windows), "windows") as advance:
            norms = gradient_norms(model, reading.ids, windows, advance)
    model_without = ModelWithout(model)
    reports = []
    with stage("layers left out", len(stack) * baseline.tokens, "tokens") as advance:
        for number, layer in enumerate(stack):
            reports.append(
                LayerReport(
                    number=number,
                    parameters=sum(p.numel() for p in layer.parameters()),
                    block_influence=reading.blocks.mean(geometry.influence[:, number]),
                    angular_distance=geometry.last_token.between(number),
                    angular_distance_all_tokens=geometry.all_tokens.between(number),
                    gradient_norm=None if norms is None else norms[number],
                    without=measure_without(baseline, model_without, [number], advance),
                )
            )
    removal = None
    if drop is not None:
        removal = choose(baseline, model_without, reports, geometry.last_token, drop, choice, stage)
    convention = reading.convention
    return LayerAnalysis(
        text=text.name,
        window=convention.window,
        windows=convention.windows,
        tokens=convention.tokens,
        gradient_windows=len(windows),
        layers=tuple(reports),
        last_token=geometry.last_token,
        all_tokens=geometry.all_tokens,
        rank_correlations=rank_correlations(reports),
        removal=removal,
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=reading.blocks.text,
        device=device_name(baseline.device),
        dtype=str(model.dtype).removeprefix("torch."),
        stored_dtype=str(load_config(path).dtype or model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
        special_tokens=convention.special_tokens,
    )


def require_some_left(layers: int, drop: int | None) -> None:
    """Raise UsageError for a number of layers that cannot be dropped."""
    if drop is not None and not 0 < drop < layers:
        raise UsageError(
            f"`drop={drop}`: the model has {layers} layer{'' if layers == 1 else 's'}, one has to stay",
            f"drop {f'1 to {layers - 1}' if layers > 2 else '1'} of them" if layers > 1 else "leave it out",
        )


# Geometry of the states between layers


@dataclass(frozen=True, eq=False)
class Geometry:
    """What lies between layers: `influence` is 1 - cos(x^l, x^(l+1)) of each token, [tokens, L]."""

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
    """What each layer is given, and what the last one gives, [B, T, D] each; `ids` int64 [B, T].

    Raises NeuzipError for layers that are given something else.
    """
    stack = decoder_layers(model)
    states: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states.append(_states_given(arguments, keywords))

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


def _states_given(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The hidden states among what a layer is called with."""
    states: Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return states


@dataclass(frozen=True, eq=False)
class _Angles:
    """Of all pairs of states of a window, [L + 1, L + 1], as parts of pi: summed over tokens, the last."""

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


# Gradients


def gradient_norms(
    model: PreTrainedModel,
    ids: Tensor,
    windows: Sequence[TokenWindow],
    on_window: OnTokens = lambda count: None,
) -> list[Estimate]:
    """The norm of the gradient of each layer's parameters: of a window's mean loss, the mean over windows.

    A gradient is dropped as soon as its squares are summed. Raises NeuzipError where one is not finite.
    """
    stack = decoder_layers(model)
    owner = {p: number for number, layer in enumerate(stack) for p in layer.parameters()}
    had_gradient = {p: p.requires_grad for p in model.parameters()}
    norms = []

    def take(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        squares[owner[parameter]] += parameter.grad.float().square().sum(dtype=torch.float64)
        parameter.grad = None

    hooks = []
    try:
        for parameter in had_gradient:
            parameter.requires_grad_(parameter in owner and parameter.is_floating_point())
        hooks = [
            p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            for p in owner
            if p.requires_grad
        ]
        for w in windows:
            squares = torch.zeros(len(stack), dtype=torch.float64, device=input_device(model))
            fed, targets = ids[w.start : w.stop], ids[w.start + 1 : w.stop + 1]
            with torch.enable_grad():
                logits = model(input_ids=fed[None].to(input_device(model)), use_cache=False).logits[0]
                functional.cross_entropy(logits.float(), targets.to(logits.device)).backward()  # type: ignore[no-untyped-call]
            norms.append(squares.sqrt().tolist())
            on_window(1)
    except torch.OutOfMemoryError as error:
        raise NeuzipError(
            f"{model.config.name_or_path}: gradients of a window of {w.stop - w.start} tokens do not fit",
            "leave them out with `gradients=0`, or make the `window` smaller",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, had in had_gradient.items():
            parameter.requires_grad_(had)
    if not np.isfinite(norms).all():
        raise NeuzipError(
            f"{model.config.name_or_path}: gradients of its layers are not finite",
            "leave them out with `gradients=0`, or try `dtype='float32'`",
        )
    return [mean([of_window[n] for of_window in norms], [1] * len(norms)) for n in range(len(stack))]


# Layers left out


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
    """Have layers give the states that they are given.

    They still compute: what else they give keeps its form, which differs from model to model.
    """

    def pass_on(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        states = _states_given(arguments, keywords)
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
    """Of sets of layers the one without which the divergence is smallest, of equals the first."""
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


# How well metrics predict what is measured


def rank_correlations(layers: Sequence[LayerReport]) -> dict[str, float | None]:
    """Spearman's rank correlation of each metric with the divergence of the model without the layer."""
    klds = [layer.kld for layer in layers]
    metrics: dict[str, list[float]] = {
        "angular_distance": [layer.angular_distance.value for layer in layers],
        "angular_distance_all_tokens": [layer.angular_distance_all_tokens.value for layer in layers],
        "block_influence": [layer.block_influence.value for layer in layers],
        "depth": [-layer.number for layer in layers],
    }
    norms = [layer.gradient_norm.value for layer in layers if layer.gradient_norm is not None]
    if len(norms) == len(layers):
        metrics["gradient_norm"] = norms
    return {name: spearman(values, klds) for name, values in sorted(metrics.items())}


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share the mean of their ranks. None if either is constant.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / spread if spread else None


def _ranks(values: Sequence[float]) -> Matrix:
    _, place, count = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Matrix = (last - (count - 1) / 2)[place]
    return ranks
