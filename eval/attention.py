"""Attention in few bits, layer by layer: how close it comes, what it does to a model, and where it is taken.

    similarity   of each layer's quantised attention to exact attention, on the queries, keys and values that
                 the layer has on a text, window by window: the figures of SageAttention2's tables
    divergence   of the model with this layer's attention quantised, and all else as it is, from the original
    choice       the fewest bits that keep the divergence of all layers together within a budget

SageAttention2 (arXiv 2411.10958, first versions) ranks layers by cosine * (1 - relative L1), which is told
here too. It says how far a layer's output moves; the divergence says what the model makes of that.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from neuzip.choices import AttentionMode
from neuzip.compress.overwrite_guard import require_free
from neuzip.compress.workspace import clear, copy_file, publish, recover, workspace, writing
from neuzip.errors import NeuzipError
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.distributed import batches
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Text
from neuzip.eval.observed_attention import (
    TRIED,
    ObservedAttention,
    layer_count,
    observed,
    quantised,
    refusals,
    run_body,
)
from neuzip.eval.plans.allocation import Allocation, Option, allocate
from neuzip.eval.plans.search import search_budget
from neuzip.eval.plans.target_values import value_of
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels import attention as kernels
from neuzip.kernels.attention.reference import exact_attention
from neuzip.kernels.attention.similarity import Similarity, similarity
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.hf.attention_config import record_layers
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import positions
from neuzip.runtime.hf.messages import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MODES: dict[AttentionMode, tuple[int, ...]] = {"auto": (8,), "8bit": (8,), "4bit": (4, 8)}
"""Bits that a layer may get, the fewest first; full precision is always the last resort."""

BITS = (8, 4)
"""Bits for which similarities are measured."""

FULL = 16
"""Bits that a layer at full precision counts as: its keys and queries have at least these."""

AUTO_MAX_KLD = 0.001
"""Nats per token: the budget of the mode "auto", which is 0.1 % of perplexity."""

WINDOW, MAX_TOKENS = 2048, 16384
"""Tokens of a window, if the model has so many positions, and of all windows: the error grows with length."""

SIMILARITY_WINDOWS = 8
"""Windows over which similarities are measured, if there are as many."""

SIMILARITY_ROWS = 1
"""Tokens fed at once, but at least a window: exact attention takes fp64 logits."""

STRANGE = 0.05
"""Relative L1 distance from exact attention above which a layer computes something else."""


@dataclass(frozen=True)
class Closeness:
    """Similarity of a layer's output to exact attention, over windows of the text.

    `worst` has each figure of the window where it is worst. `score` is the mean of cosine * (1 - relative
    L1), `deviation` its standard deviation, None of one window.
    """

    mean: Similarity
    worst: Similarity
    score: float
    deviation: float | None
    worst_score: float

    @staticmethod
    def of(windows: Sequence[Similarity]) -> Closeness:
        """The closeness over the similarities of one or more windows."""
        cosines, errors, roots = zip(*((s.cosine, s.relative_l1, s.rmse) for s in windows), strict=True)
        scores = [s.score for s in windows]
        return Closeness(
            Similarity(*map(statistics.fmean, (cosines, errors, roots))),
            Similarity(min(cosines), max(errors), max(roots)),
            statistics.fmean(scores),
            statistics.stdev(scores) if len(scores) > 1 else None,
            min(scores),
        )


@dataclass(frozen=True)
class QuantizedAttention:
    """A layer's attention in `bits`. `kld` is in nats a token, None if not measured or not finite."""

    bits: int
    closeness: Closeness
    kld: Estimate | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """A layer, and what was chosen for it: bits, or None for full precision.

    `refused` is why its attention cannot be quantised, in words, None if it can; then there are forms.
    """

    number: int
    forms: tuple[QuantizedAttention, ...] = ()
    refused: str | None = None
    bits: int | None = None

    def form(self, bits: int) -> QuantizedAttention | None:
        """The layer's attention in `bits`, None if it cannot be quantised."""
        return next((form for form in self.forms if form.bits == bits), None)


@dataclass(frozen=True)
class AttentionCalibration:
    """Layers with their bits, and what all of them together do to the model.

    Divergences are in nats a token. `limit` is the budget, None where there was none; `offered` are the bits
    that layers could get, `sum_of_layers` the sum of the divergences of single layers as they were chosen,
    `trials` the divergence of each choice that was measured as a whole, the last one taken. `comparison` is
    of the model with the choice. `special_tokens` says what stands in front of windows, as in `Convention`.
    """

    mode: AttentionMode
    limit: float | None
    offered: tuple[int, ...]
    layers: tuple[AttentionLayer, ...]
    sum_of_layers: float
    trials: tuple[float, ...]
    comparison: Comparison
    text: str
    window: int
    windows: int
    tokens: int
    similarity_windows: int
    device: str
    dtype: str
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)
    special_tokens: str = "none"

    @property
    def bits(self) -> tuple[int | None, ...]:
        """The bits of each layer, None for full precision."""
        return tuple(layer.bits for layer in self.layers)

    def rank(self, layer: AttentionLayer, bits: int) -> int:
        """The rank of a layer, from 1, by the score of its attention in `bits`."""
        return by_score(self.layers, bits).index(layer.number) + 1


def calibrate(
    path: str | os.PathLike[str],
    text: Text,
    mode: AttentionMode,
    stage: Stage,
    *,
    max_kld: float | None = None,
    window: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
) -> AttentionCalibration:
    """Measure the layers of a checkpoint folder on a text, and choose.

    `max_kld` None is AUTO_MAX_KLD in the mode "auto", and no budget in the others: there every layer that can
    gets the mode's bits. Raises NeuzipError for a model whose attention cannot be quantised at all, and
    UsageError for windows that cannot be.
    """
    began = time.monotonic()
    limit = AUTO_MAX_KLD if max_kld is None and mode == "auto" else max_kld
    offered = MODES[mode] if limit is not None else MODES[mode][:1]
    if window is None:
        window = min(WINDOW, positions(load_config(path)) or WINDOW)
    baseline = BaselineComparison(
        path, text, window=window, max_tokens=max_tokens or MAX_TOKENS, device=device
    )
    model = baseline.model
    layers, seen = similarities(baseline, stage)
    layers = divergences(baseline, layers, offered, stage)
    chosen, trials, comparison = choose(baseline, layers, offered, limit, stage)
    convention = baseline.reading.convention
    return AttentionCalibration(
        mode=mode,
        limit=limit,
        offered=offered,
        layers=tuple(chosen),
        sum_of_layers=math.fsum(_kld_of(layer) for layer in chosen),
        trials=trials,
        comparison=comparison,
        text=text.name,
        window=convention.window,
        windows=convention.windows,
        tokens=convention.tokens,
        similarity_windows=seen,
        device=device_name(baseline.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
        special_tokens=convention.special_tokens,
    )


def similarities(baseline: BaselineComparison, stage: Stage) -> tuple[list[AttentionLayer], int]:
    """Layers with the similarity of each form; and over how many windows.

    Raises NeuzipError if no layer's attention can be quantised, UsageError if it cannot be replaced at all.
    """
    reading = baseline.reading
    windows = reading.windows[:SIMILARITY_WINDOWS]
    refused = refusals(baseline.model, reading.ids[None, :TRIED])
    by_layer: dict[int, dict[int, list[Similarity]]] = {}

    def see(call: ObservedAttention) -> None:
        if call.layer in refused:
            return
        exact, _ = exact_attention(call.q, call.k, call.v, **call.options)
        if similarity(call.own, exact).relative_l1 > STRANGE:
            refused[call.layer] = "its attention is not the softmax of scaled products alone"
            return
        for bits in BITS:
            out = kernels.sage_attention(call.q, call.k, call.v, bits=bits, **call.options)
            assert isinstance(out, Tensor)
            of_layer = by_layer.setdefault(call.layer, {}).setdefault(bits, [])
            of_layer += [similarity(one, right) for one, right in zip(out, exact, strict=True)]

    with stage("similarity", len(windows), "windows") as advance, observed(baseline.model, see):
        for batch in batches(reading.ids, windows, SIMILARITY_ROWS):
            run_body(baseline.model, batch.ids)
            advance(len(batch.ids))
    layers = [
        AttentionLayer(number, refused=refused.get(number, "it has no attention"))
        if number in refused or number not in by_layer
        else AttentionLayer(
            number, tuple(QuantizedAttention(bits, Closeness.of(by_layer[number][bits])) for bits in BITS)
        )
        for number in range(layer_count(baseline.model))
    ]
    if not any(layer.forms for layer in layers):
        raise NeuzipError(
            f"{baseline.base.name}: the attention of no layer can be quantised: {layers[0].refused}",
            "it stays as it is: there is nothing to record",
        )
    return layers, len(windows)


class _Quantised(HeadedModel):
    """A model whose layers have attention in `bits` while it predicts, and its own at all other times."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.bits: Sequence[int | None] = [None] * layer_count(model)
        super().__init__(model)

    def _run(self, ids: Tensor) -> Tensor:
        with quantised(self.model, self.bits):
            return super()._run(ids)


def divergences(
    baseline: BaselineComparison, layers: Sequence[AttentionLayer], offered: Sequence[int], stage: Stage
) -> list[AttentionLayer]:
    """Layers with the divergence of each form that is offered, measured with that layer alone quantised."""
    model = _Quantised(baseline.model)
    passes = sum(form.bits in offered for layer in layers for form in layer.forms)
    measured_layers = []
    with stage("divergence", passes * baseline.tokens, "tokens") as advance:
        for layer in layers:
            forms = []
            for form in layer.forms:
                if form.bits in offered:
                    model.bits = [form.bits if n == layer.number else None for n in range(len(layers))]
                    form = replace(form, kld=_kld(baseline, model, advance))
                forms.append(form)
            measured_layers.append(replace(layer, forms=tuple(forms)))
    return measured_layers


def _kld(
    baseline: BaselineComparison, model: HeadedModel, on_tokens: Callable[[int], None]
) -> Estimate | None:
    try:
        return baseline.compare(model, on_tokens).kld.mean
    except NotFinite:
        return None


def choose(
    baseline: BaselineComparison,
    layers: Sequence[AttentionLayer],
    offered: Sequence[int],
    limit: float | None,
    stage: Stage,
) -> tuple[list[AttentionLayer], tuple[float, ...], Comparison]:
    """Layers with their bits, the divergence of each choice that was measured as a whole, and the last one.

    Without a limit each layer gets the first of the bits that are offered. With one, as few bits as the
    divergence of all together allows; that is measured, as single ones only about add up.
    """
    model = _Quantised(baseline.model)
    number = 0

    def measured(bits: Sequence[int | None]) -> Comparison:
        nonlocal number
        number += 1
        model.bits = bits
        with stage(f"choice {number}", baseline.tokens, "tokens") as advance:
            return baseline.compare(model, advance)

    if limit is None:
        bits = [next((b for b in offered if usable(layer, b)), None) for layer in layers]
        comparison = measured(bits)
        return with_bits(layers, bits), (comparison.kld.mean.value,), comparison

    def tried(allocation: Allocation) -> tuple[Estimate, Comparison | None]:
        try:
            comparison = measured(bits_of(layers, offered, allocation))
        except NotFinite:
            return Estimate(math.inf, None), None
        return value_of("max-kld", comparison), comparison

    attempts = search_budget(lambda budget: within(layers, offered, budget), tried, limit)
    last = attempts[-1]
    assert last.product is not None  # at full precision it is the model itself
    return (
        with_bits(layers, bits_of(layers, offered, last.choice)),
        tuple(attempt.estimate.value for attempt in attempts),
        last.product,
    )


def usable(layer: AttentionLayer, bits: int) -> bool:
    """Whether a layer can be quantised to `bits`: its divergence was measured and is finite."""
    form = layer.form(bits)
    return form is not None and form.kld is not None


def within(layers: Sequence[AttentionLayer], offered: Sequence[int], budget: float) -> Allocation:
    """The fewest bits whose divergences add up to at most `budget`; of equal layers those of higher score.

    Options of the allocation are full precision, then the bits offered that a layer can have.
    """
    order = by_score(layers, offered[0])
    allocation = allocate([_options(layers[n], offered) for n in order], budget)
    chosen = dict(zip(order, allocation.chosen, strict=True))
    return replace(allocation, chosen=tuple(chosen[n] for n in range(len(layers))))


def bits_of(
    layers: Sequence[AttentionLayer], offered: Sequence[int], allocation: Allocation
) -> list[int | None]:
    """Bits of each layer as allocated."""
    return [
        [None, *(b for b in offered if usable(layer, b))][number]
        for layer, number in zip(layers, allocation.chosen, strict=True)
    ]


def by_score(layers: Sequence[AttentionLayer], bits: int) -> list[int]:
    """Numbers of layers, the most similar first: the order in which SageAttention2 takes fewer bits."""

    def score(layer: AttentionLayer) -> float:
        form = layer.form(bits)
        return -math.inf if form is None else form.closeness.score

    return sorted(range(len(layers)), key=lambda n: -score(layers[n]))


def _options(layer: AttentionLayer, offered: Sequence[int]) -> list[Option]:
    forms = [layer.form(b) for b in offered]
    measured = [(form.kld.value, form.bits) for form in forms if form is not None and form.kld is not None]
    return [Option(0.0, FULL), *(Option(max(0.0, kld), bits) for kld, bits in measured)]


def with_bits(layers: Sequence[AttentionLayer], bits: Sequence[int | None]) -> list[AttentionLayer]:
    """Layers with what was chosen for each."""
    return [replace(layer, bits=b) for layer, b in zip(layers, bits, strict=True)]


def _kld_of(layer: AttentionLayer) -> float:
    form = None if layer.bits is None else layer.form(layer.bits)
    return 0.0 if form is None or form.kld is None else form.kld.value


def copy_patched(
    src: str | os.PathLike[str],
    dst: Path,
    bits: Sequence[int | None],
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Copy a checkpoint folder, plain or compressed, and record the bits in the copy's config.json.

    `on_bytes` is told of bytes copied. Raises NeuzipError, before anything is written if `dst` exists.
    """
    checkpoint = find_checkpoint(src)
    require_free(checkpoint.path, dst, overwrite)
    recover(dst)
    with workspace(dst, checkpoint.root) as work:
        clear(work, overwrite)
        with writing(work):
            for file in (*checkpoint.weights, *checkpoint.others):
                copy_file(checkpoint.root / file, work / file)
                on_bytes((work / file).stat().st_size)
            record_layers(work, bits)
        publish(work, dst)
