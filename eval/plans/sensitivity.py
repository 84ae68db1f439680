"""How far a model's predictions move when one of its tensors is rounded, and what the rounding saves.

    measured   one pass over calibration text a tensor and scheme: the KL divergence from the original, over
               the whole vocabulary, with that tensor rounded and all others as they are. Schemes of more than
               two mantissa bits follow from that of two by the squared error of the weights: in bf16 their
               own effect is not larger than that of any change of the order of sums.
    fisher     one backward pass over calibration text. To second order in the change d of the weights the
               divergence is d'Fd / 2, F the Fisher information: the mean of g g', g the gradient of the log
               likelihood of a token drawn from the model itself. Of F the diagonal is taken, as errors of
               rounding are hardly correlated.
    weights    the squared error of a tensor as a share of its squares, without any text. Only the ratios mean
               something.

Tensors that differ only in a number behind the layer's are one group: the experts of a layer have one scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from neuzip.compress.scheme import Scheme
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import NeuzipError
from neuzip.eval.measures.head import HeadedModel, Predictions, divergence
from neuzip.eval.plans.allocation import Option
from neuzip.eval.plans.candidates import (
    GroupCandidates,
    OnWork,
    SchemeChoice,
    ignore_progress,
    restore_rounded,
)
from neuzip.eval.plans.tensor_groups import TensorGroup
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.eval.quantize.checkpoint_parameters import (
    PartsByTensor,
    find_parameters,
    read_bits,
    require_some,
    values_for,
)
from neuzip.eval.quantize.gradients import fisher_diagonal
from neuzip.kernels.float_fields import Bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Literal["measured", "fisher", "weights"]

MEASURED_BITS = 2
"""Largest number of mantissa bits of a scheme that is measured."""


@dataclass(frozen=True)
class Sensitivity:
    """Groups with their choices, and the divergence that each choice alone brings, in nats a token.

    `estimated` counts the groups whose divergences come from their weights alone, though the method is
    another: they have no parameter of their own in the model.
    """

    method: Method
    candidates: tuple[GroupCandidates, ...]
    divergences: tuple[tuple[float, ...], ...]
    estimated: int = 0

    def options(self, by: Literal["bytes", "divergence"]) -> list[list[Option]]:
        """The options of each group for `allocate`, with a budget of bytes or of divergence."""
        return [
            [
                Option(c.nbytes, d) if by == "bytes" else Option(d, c.nbytes)
                for c, d in zip(one.choices, divergences, strict=True)
            ]
            for one, divergences in zip(self.candidates, self.divergences, strict=True)
        ]


def weights_only(candidates: Sequence[GroupCandidates]) -> Sensitivity:
    """Squared errors as shares of the squares, in place of divergences."""
    shares = [tuple(c.relative_error for c in one.choices) for one in candidates]
    return Sensitivity("weights", tuple(candidates), tuple(shares))


def measure(
    model: HeadedModel,
    source: FolderSource,
    candidates: Sequence[GroupCandidates],
    windows: CalibrationWindows,
    on_tokens: OnWork = ignore_progress,
) -> Sensitivity:
    """Round one group at a time in a live model, and restore it. `on_tokens` counts predictions.

    A scheme that makes the model give no finite divergence is left out. Raises NeuzipError if no tensor is
    found in the model.
    """
    places = find_parameters(model.model, source, _tensors(candidates))
    require_some(places, source)
    base = [model.predictions(fed) for fed, _ in windows.batches()]
    divergences: list[tuple[float, ...] | None] = []
    for one in candidates:
        if any(t.name not in places for t in one.group.tensors):
            divergences.append(None)
            continue
        bits = {t.name: read_bits(source, t) for t in one.group.tensors}
        measured: dict[int, float] = {}
        for number, choice in enumerate(one.choices):
            k = choice.scheme.mantissa_bits
            if k is not None and k <= MEASURED_BITS and choice.relative_error:
                with _rounded_in_place(one.group, bits, choice.scheme, places):
                    measured[number] = _mean_divergence(model, base, windows)
                on_tokens(windows.tokens)
        divergences.append(_completed(one.choices, measured))
    return _filled("measured", candidates, divergences)


def passes(candidates: Sequence[GroupCandidates]) -> int:
    """The largest number of passes of `measure`."""
    bits = [c.scheme.mantissa_bits for one in candidates for c in one.choices]
    return sum(k is not None and k <= MEASURED_BITS for k in bits)


def fisher(
    model: PreTrainedModel,
    source: FolderSource,
    candidates: Sequence[GroupCandidates],
    windows: CalibrationWindows,
    on_tokens: OnWork = ignore_progress,
) -> Sensitivity:
    """The second-order estimate, from the Fisher information. Raises NeuzipError as `measure`."""
    places = find_parameters(model, source, _tensors(candidates))
    require_some(places, source)
    information = fisher_diagonal(model, {part.parameter for part in places.values()}, windows, on_tokens)
    divergences: list[tuple[float, ...] | None] = []
    for one in candidates:
        if any(t.name not in places for t in one.group.tensors):
            divergences.append(None)
            continue
        sums = [0.0] * len(one.choices)
        once = {places[tensor.name].place: tensor for tensor in one.group.tensors}  # ties are one parameter
        for tensor in once.values():
            part, bits = places[tensor.name], read_bits(source, tensor)
            for number, choice in enumerate(one.choices):
                restored = restore_rounded(tensor, bits, choice.scheme)
                change = values_for(tensor, restored, part.values).float() - part.values.float()
                sums[number] += 0.5 * float(
                    (change.square_().mul_(part.of(information[part.parameter]))).sum()
                )
        divergences.append(tuple(sums))
    return _filled("fisher", candidates, divergences)


def _tensors(candidates: Sequence[GroupCandidates]) -> Iterator[SourceTensor]:
    return (tensor for one in candidates for tensor in one.group.tensors)


@contextmanager
def _rounded_in_place(
    group: TensorGroup, bits: Mapping[str, Bits], scheme: Scheme, places: PartsByTensor
) -> Iterator[None]:
    """Context in which a live model computes with the rounded tensors of a group."""
    before = {p: p.data for p in (places[t.name].parameter for t in group.tensors)}
    try:
        for parameter, data in before.items():
            parameter.data = (
                data.clone()
            )  # what was predicted before may still refer to the weights of a head
        for t in group.tensors:
            view = places[t.name].values
            view.copy_(values_for(t, restore_rounded(t, bits[t.name], scheme), view))
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data


def _mean_divergence(model: HeadedModel, base: Sequence[Predictions], windows: CalibrationWindows) -> float:
    """The mean of the divergences from what the model predicted before, in nats a token."""
    sums = [
        float(divergence(before, model.predictions(fed), targets).kld.double().sum())
        for before, (fed, targets) in zip(base, windows.batches(), strict=True)
    ]
    return math.fsum(sums) / windows.tokens if all(map(math.isfinite, sums)) else math.inf


def _completed(choices: Sequence[SchemeChoice], measured: Mapping[int, float]) -> tuple[float, ...]:
    """Divergences of all choices: what was not measured follows by squared error from the finest that was."""
    divergences = [measured.get(number, 0.0) for number in range(len(choices))]
    finest = min((n for n, d in measured.items() if math.isfinite(d)), default=None)
    for number, choice in enumerate(choices):
        if number not in measured and choice.relative_error:
            if finest is None:
                divergences[number] = math.inf
            else:
                divergences[number] = (
                    divergences[finest] * choice.relative_error / choices[finest].relative_error
                )
    return tuple(divergences)


def _filled(
    method: Method, candidates: Sequence[GroupCandidates], measured: Sequence[tuple[float, ...] | None]
) -> Sensitivity:
    """Estimate divergences that were not measured, from squared errors; drop choices that are not finite.

    Groups that rounding changes without any effect are estimated too: the text does not pass through them, as
    with parts for images. Raises NeuzipError if no group was measured.
    """
    pairs = zip(candidates, measured, strict=True)
    usable = [None if d is None or _is_blind(one, d) else d for one, d in pairs]
    known = [(one, d) for one, d in zip(candidates, usable, strict=True) if d is not None]
    if not known:
        raise NeuzipError(
            "the calibration text goes through none of the matrices that could be rounded",
            "give `sensitivity='weights'`",
        )
    ends = [(d[-1], one.choices[-1].relative_error) for one, d in known if math.isfinite(d[-1])]
    weight = sum(d for d, _ in ends) / (sum(error for _, error in ends) or 1.0)
    used: list[GroupCandidates] = []
    divergences: list[tuple[float, ...]] = []
    for one, values in zip(candidates, usable, strict=True):
        if values is None:
            values = tuple(weight * c.relative_error for c in one.choices)
        finite = [(c, d) for c, d in zip(one.choices, values, strict=True) if math.isfinite(d)]
        used.append(replace(one, choices=tuple(c for c, _ in finite)))
        divergences.append(tuple(d for _, d in finite))
    return Sensitivity(method, tuple(used), tuple(divergences), len(candidates) - len(known))


def _is_blind(one: GroupCandidates, divergences: Sequence[float]) -> bool:
    """Whether rounding changes the weights of a group, and the predictions by nothing at all."""
    changes = any(choice.relative_error for choice in one.choices)
    return changes and not any(divergences)
