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

import functools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn import functional

from neuzip.compress.pieces import Map, pieces
from neuzip.compress.plan import PlannedTensor, make_plan
from neuzip.compress.rules import LOSSLESS, Rule
from neuzip.compress.scheme import Scheme
from neuzip.compress.schemes import lossless, truncated
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.measures.head import HeadedModel, Predictions, divergence
from neuzip.eval.measures.histograms import TOP_BITS, Counts
from neuzip.eval.plans.allocation import Option
from neuzip.kernels.float_fields import FORMATS, Bits, Census, FloatFormat, census, non_finite
from neuzip.kernels.float_fields.values import to_float64
from neuzip.runtime.dtypes import TORCH_DTYPES, shaped
from neuzip.runtime.hf.bos import behind
from neuzip.runtime.hf.decoder import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Literal["measured", "fisher", "weights"]

MEASURED_BITS = 2
"""Mantissa bits up to which a scheme is measured, if any is."""

BATCH = 1024
"""Tokens fed at a time, or those of one window."""

FINEST = 15
"""Mantissa bits up to which there is a scheme for every number: beyond, a tensor is lossless."""

OnWork = Callable[[int], None]


def ignore_progress(_: int) -> None:
    """Look away."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that get one scheme, and the globs that name them and no others.

    `aliases` are the names of those that are stored as another one, whose bytes they have.
    """

    globs: tuple[str, ...]
    tensors: tuple[SourceTensor, ...]
    aliases: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are."""
        return sum(t.info.nbytes for t in self.tensors)


@dataclass(frozen=True)
class SchemeChoice:
    """One scheme for a group: its bytes when stored, and the squared error as a share of the squares."""

    scheme: Scheme
    nbytes: int
    relative_error: float


@dataclass(frozen=True)
class GroupCandidates:
    """A group and its choices, the lossless one first, then ever fewer mantissa bits."""

    group: TensorGroup
    choices: tuple[SchemeChoice, ...]


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
        """What `allocate` takes; `by` is what there is a budget of."""
        return [
            [
                Option(c.nbytes, d) if by == "bytes" else Option(d, c.nbytes)
                for c, d in zip(one.choices, divergences, strict=True)
            ]
            for one, divergences in zip(self.candidates, self.divergences, strict=True)
        ]


def find_groups(source: FolderSource, workers: Workers, rules: Sequence[Rule]) -> list[TensorGroup]:
    """The tensors that may be rounded: matrices of floats that `rules` leave lossless, by what they are.

    Tensors with equal bytes go together. Raises NeuzipError if there are none.
    """
    by_kind: dict[str, list[PlannedTensor]] = defaultdict(list)
    for t in make_plan(source, rules, workers).tensors:
        if t.scheme == LOSSLESS and len(t.tensor.info.shape) > 1:
            by_kind[_kind((t.alias_of or t.tensor).name)].append(t)
    if not by_kind:
        raise NeuzipError(
            f"{source.checkpoint.path}: there is no matrix of floats that could be rounded",
            "leave out `include` and `exclude`, or the target",
        )
    names = [t.name for t in source.tensors()]
    return [
        TensorGroup(
            _globs([t.tensor.name for t in members], names),
            tuple(t.tensor for t in members),
            frozenset(t.tensor.name for t in members if t.alias_of is not None),
        )
        for members in by_kind.values()
    ]


def _kind(name: str) -> str:
    """A name with its numbers replaced, but not the first: so those of experts, not that of the layer.

    >>> _kind("model.layers.3.mlp.experts.17.w1.weight")
    'model.layers.3.mlp.experts.*.w1.weight'
    """
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    return ".".join("*" if at in numbers[1:] else part for at, part in enumerate(parts))


def _globs(members: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Globs that match the members and none of the other names: those of their kinds, or else each name."""
    kinds = tuple(dict.fromkeys(_kind(name) for name in members))
    if len(kinds) < len(members):
        matches = [name for name in names if any(fnmatchcase(name, kind) for kind in kinds)]
        if sorted(matches) == sorted(members):
            return kinds
    return tuple(re.sub(r"([*?[])", r"[\1]", name) for name in dict.fromkeys(members))


def rules_of(groups: Sequence[TensorGroup], schemes: Sequence[Scheme]) -> list[Rule]:
    """The rules that give each group its scheme. What is lossless needs none."""
    return [
        Rule(glob, scheme, min_dimensions=2)
        for group, scheme in zip(groups, schemes, strict=True)
        if scheme != LOSSLESS
        for glob in group.globs
    ]


def predict_candidates(
    source: FolderSource,
    groups: Sequence[TensorGroup],
    block_size: int | None,
    workers: Workers,
    on_bytes: OnWork = ignore_progress,
) -> list[GroupCandidates]:
    """Count what every group is in every scheme, to know its bytes, about, and the squared error.

    Nothing is coded: `lossless.expected_bytes`. `on_bytes` is told of bytes done.
    """
    candidates = []
    for group in groups:
        totals: dict[Scheme, tuple[int, float, float]] = {}
        for tensor in group.tensors:
            bits = read_bits(source, tensor)
            for scheme, squares, original in _squares(
                tensor, bits, schemes_of(group, block_size), workers.map
            ):
                before = totals.get(scheme, (0, 0.0, 0.0))
                stored = tensor.name not in group.aliases
                nbytes = _expected_bytes(tensor, bits, scheme, workers.map) if stored else 0
                totals[scheme] = before[0] + nbytes, before[1] + squares, before[2] + original
            on_bytes(tensor.info.nbytes)
        choices = [
            SchemeChoice(scheme, nbytes, squares / (original or 1.0))
            for scheme, (nbytes, squares, original) in totals.items()
        ]
        candidates.append(GroupCandidates(group, tuple(choices)))
    return candidates


def schemes_of(group: TensorGroup, block_size: int | None) -> list[Scheme]:
    """What a group can become: lossless, or rounded to ever fewer bits."""
    formats = [FORMATS[t.info.dtype] for t in group.tensors]
    if not all(truncated.normalisable(fmt) for fmt in formats):
        block_size = None
    most = min(FINEST, max(fmt.mantissa_bits for fmt in formats) - 1)
    return [LOSSLESS, *(Scheme("truncated", k, block_size) for k in range(most, -1, -1))]


def read_bits(source: FolderSource, tensor: SourceTensor) -> Bits:
    """The bit patterns of a whole tensor of floats."""
    return source.read(tensor).view(FORMATS[tensor.info.dtype].dtype)


def restore_rounded(tensor: SourceTensor, bits: Bits, scheme: Scheme, parallel: Map = map) -> Bits:
    """What comes back of a tensor's bit patterns once they were stored in a scheme."""
    rounding = _rounding(tensor, bits, scheme)
    if rounding is None:
        return bits
    parts = parallel(lambda piece: rounding.restore(*rounding.apply(bits[slice(*piece)])), pieces(bits.size))
    return np.concatenate(list(parts))


def _rounding(tensor: SourceTensor, bits: Bits, scheme: Scheme) -> truncated.Rounding | None:
    """How a scheme rounds a tensor; None where it comes back as it is."""
    fmt = FORMATS[tensor.info.dtype]
    k = scheme.mantissa_bits
    if k is None or k >= fmt.mantissa_bits or non_finite(bits, fmt).any():
        return None
    return truncated.Rounding(fmt, k, scheme.block_size)


def _expected_bytes(tensor: SourceTensor, bits: Bits, scheme: Scheme, parallel: Map) -> int:
    """About the bytes of a tensor's streams, or of the tensor where it would not shrink."""
    fmt, rounding = FORMATS[tensor.info.dtype], _rounding(tensor, bits, scheme)

    def count(piece: tuple[int, int]) -> Census:
        part = bits[slice(*piece)]
        return census(part if rounding is None else rounding.apply(part)[0], fmt)

    counted = functools.reduce(operator.add, parallel(count, pieces(bits.size)))
    expected = lossless.expected_bytes(counted, bits.size, fmt)
    if rounding is not None:
        expected += truncated.normaliser_bytes(bits.size, rounding.block_size)
    return min(expected, tensor.info.nbytes)


def _squares(
    tensor: SourceTensor, bits: Bits, schemes: Sequence[Scheme], parallel: Map
) -> Iterator[tuple[Scheme, float, float]]:
    """The squared error of a tensor in each scheme, and the sum of its squares; 0 and 0 where it is exact.

    Of formats of up to 16 bits every pattern is rounded once, however many weights have it.
    """
    fmt, counts = FORMATS[tensor.info.dtype], None
    if fmt.bits <= TOP_BITS and all(scheme.block_size is None for scheme in schemes):
        parts = parallel(lambda piece: Counts.of(bits[slice(*piece)], fmt), pieces(bits.size))
        counted = functools.reduce(operator.add, parts).top
        patterns = np.flatnonzero(counted)
        bits, counts = patterns.astype(fmt.dtype), counted[patterns]
    for scheme in schemes:
        restored = restore_rounded(tensor, bits, scheme, parallel)
        if restored is bits:
            yield scheme, 0.0, 0.0
        elif counts is not None:
            before, after = to_float64(bits, fmt), to_float64(restored, fmt)
            yield scheme, float(counts @ (after - before) ** 2), float(counts @ before**2)
        else:
            error = _error(bits, restored, fmt, parallel)
            yield scheme, error.squares, error.original_squares


def _error(bits: Bits, restored: Bits, fmt: FloatFormat, parallel: Map) -> truncated.ErrorSums:
    parts = parallel(
        lambda piece: truncated.ErrorSums.between(bits[slice(*piece)], restored[slice(*piece)], fmt),
        pieces(bits.size),
    )
    return sum(parts, truncated.ErrorSums())


# What a choice does to the model


@dataclass(frozen=True, eq=False)
class CalibrationWindows:
    """Calibration text: `fed` int64 [windows, T], and the token after each of them, `targets`."""

    fed: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, width: int, front: int | None = None) -> CalibrationWindows:
        """Cut tokens, int64 [n], into windows that do not overlap; what fills no window is left out.

        Windows begin with `front`, which is not of `ids`, if there is one.
        """
        if front is not None:
            width = min(width, len(ids))
            targets = ids[: len(ids) // width * width].view(-1, width)
            return cls(behind(front, targets[:, :-1]), targets)
        width = min(width, len(ids) - 1)
        count = (len(ids) - 1) // width
        used = count * width
        return cls(ids[:used].view(count, width), ids[1 : used + 1].view(count, width))

    @property
    def tokens(self) -> int:
        """How many are predicted."""
        return self.targets.numel()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Some windows at a time, with their targets in one row."""
        rows = max(1, BATCH // self.fed.shape[1])
        for fed, targets in zip(torch.split(self.fed, rows), torch.split(self.targets, rows), strict=True):
            yield fed, targets.flatten()


ParametersByTensor = Mapping[str, torch.nn.Parameter]
"""The parameters that hold tensors of a checkpoint, by the tensors' names."""


def find_parameters(
    model: PreTrainedModel, source: FolderSource, groups: Sequence[TensorGroup]
) -> dict[str, torch.nn.Parameter]:
    """The parameters whose values are those of a tensor, by the tensor's name; some models merge tensors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    endings: dict[str, list[str]] = defaultdict(list)
    for name in parameters:
        endings[_ending(name)].append(name)
    places = {}
    for tensor in (t for group in groups for t in group.tensors):
        names = [tensor.name, prefix + tensor.name, tensor.name.removeprefix(prefix)]
        alike = endings[_ending(tensor.name)]  # models of several parts have stored them under other names
        for name in (*names, *(alike if len(alike) == 1 else ())):
            parameter = parameters.get(name)
            if parameter is not None and parameter.shape == torch.Size(tensor.info.shape):
                values = _values(tensor, read_bits(source, tensor), parameter)
                if torch.equal(values, parameter.detach()):
                    places[tensor.name] = parameter
                    break
    return places


def _ending(name: str) -> str:
    """A name from its last list of modules on, which tells layers and what is in them; or its last two words.

    >>> _ending("language_model.model.layers.7.mlp.up_proj.weight"), _ending("model.lm_head.weight")
    ('layers.7.mlp.up_proj.weight', 'lm_head.weight')
    """
    words = name.split(".")
    last = max((at for at, word in enumerate(words) if word.isdecimal()), default=len(words) - 1)
    return ".".join(words[max(0, last - 1) :])


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
    """Round one group at a time in a live model, and put it back. `on_tokens` is told of tokens predicted.

    A scheme that makes the model give no finite divergence is left out. Raises NeuzipError if no tensor is
    found in the model.
    """
    places = find_parameters(model.model, source, [one.group for one in candidates])
    _require_some(places, source)
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
    """How many passes `measure` makes at most."""
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
    places = find_parameters(model, source, [one.group for one in candidates])
    _require_some(places, source)
    information = _fisher_diagonal(model, places, windows, on_tokens)
    divergences: list[tuple[float, ...] | None] = []
    for one in candidates:
        if any(t.name not in places for t in one.group.tensors):
            divergences.append(None)
            continue
        sums = [0.0] * len(one.choices)
        once = {places[tensor.name]: tensor for tensor in one.group.tensors}  # ties are one parameter
        for parameter, tensor in once.items():
            bits = read_bits(source, tensor)
            for number, choice in enumerate(one.choices):
                change = _values(tensor, restore_rounded(tensor, bits, choice.scheme), parameter).float()
                change -= parameter.detach().float()
                sums[number] += 0.5 * float((change.square_().mul_(information[parameter])).sum())
        divergences.append(tuple(sums))
    return _filled("fisher", candidates, divergences)


def _fisher_diagonal(
    model: PreTrainedModel, places: ParametersByTensor, windows: CalibrationWindows, on_tokens: OnWork
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The mean over tokens of squared gradients of log likelihoods of tokens drawn from the model, fp32.

    A window's gradients are summed before they are squared: those of tokens that are drawn independently are
    not correlated, so that the squares have the same mean.
    """
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in set(places.values())}
    had_gradient = {p: p.requires_grad for p in model.parameters()}

    def take(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
        sums[parameter] += parameter.grad.float().square_()
        parameter.grad = None  # before that of the next layer is made

    hooks = []
    try:
        for parameter in had_gradient:
            parameter.requires_grad_(parameter in sums)
        hooks = [p.register_post_accumulate_grad_hook(take) for p in sums]  # type: ignore[no-untyped-call]
        source = torch.Generator().manual_seed(0)  # on the CPU: the same tokens on every device
        for fed in windows.fed:
            logits = model(input_ids=fed[None].to(input_device(model)), use_cache=False).logits[0].float()
            height = torch.rand(len(fed), 1, generator=source, dtype=torch.float64).to(logits.device)
            with torch.no_grad():
                chances = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
                drawn = torch.searchsorted(chances, height).clamp_(max=logits.shape[1] - 1)[:, 0]
            functional.cross_entropy(logits, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
            on_tokens(len(fed))
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, had in had_gradient.items():
            parameter.requires_grad_(had)
    return {p: total / windows.tokens for p, total in sums.items()}


@contextmanager
def _rounded_in_place(
    group: TensorGroup, bits: Mapping[str, Bits], scheme: Scheme, places: ParametersByTensor
) -> Iterator[None]:
    """Have a live model compute with the rounded tensors of a group; what it had before comes back after."""
    before = {places[t.name]: places[t.name].data for t in group.tensors}
    try:
        for t in group.tensors:
            places[t.name].data = _values(t, restore_rounded(t, bits[t.name], scheme), places[t.name])
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


def _values(tensor: SourceTensor, bits: Bits, like: torch.Tensor) -> torch.Tensor:
    """Bit patterns as a tensor of the dtype and on the device of another."""
    data = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    plain = shaped(data, TORCH_DTYPES[tensor.info.dtype], tensor.info.shape)
    return plain.to(device=like.device, dtype=like.dtype, copy=True)


def _require_some(places: ParametersByTensor, source: FolderSource) -> None:
    if not places:
        raise NeuzipError(
            f"{source.checkpoint.path}: none of its matrices is a parameter of the model as it is stored",
            "give `sensitivity='weights'`",
        )
