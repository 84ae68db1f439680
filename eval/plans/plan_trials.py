"""Plans for a target from what every choice costs, and their trials.

allocation    one choice per group: the costs of single choices are taken to add up
trial         compress with that plan, load the result, compare it with the original on calibration text
correction    if the trial costs more or less than the sum, allocate again with a budget in proportion
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from neuzip.compress import compress
from neuzip.compress.expert_names import expert_name
from neuzip.compress.rules import Rule
from neuzip.compress.sources.folder import weight_bytes
from neuzip.eval.experts.expert_use import CLASSES, UseClass
from neuzip.eval.layers.drops import Drop, Drops, folder_beside
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.plans.allocation import Allocation, OverBudget, allocate
from neuzip.eval.plans.candidates import GroupCandidates
from neuzip.eval.plans.plan_request import TargetRequest
from neuzip.eval.plans.reach import FixedBytes, before_lossless, out_of_reach
from neuzip.eval.plans.search import search_budget
from neuzip.eval.plans.sensitivity import Sensitivity
from neuzip.eval.plans.target_values import sought_value, value_of
from neuzip.eval.plans.tensor_groups import rules_of
from neuzip.formats.checkpoint import file_checksum, find_checkpoint


@dataclass(frozen=True)
class Trial:
    """A plan that was tried.

    predicted_kld  sum of the divergences of single tensors, in nats a token; None where nothing predicts it
    bytes          of the compressed weight files, predicted where they were not written
    comparison     with the original; None without a text, and if predictions are not finite
    mean_step      of quantised weights, None for other plans
    nearest        quantised tensors whose errors nothing compensates, in spite of calibration
    """

    predicted_kld: float | None
    bytes: int
    comparison: Comparison | None
    mean_step: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The rules that reach a target, and how they were found.

    schemes        how many tensors get which scheme
    experts        the classes of experts that were told apart by use, and what they get
    predicted_kld  sum of the divergences of single tensors, None where nothing predicts it; without meaning
                   for the method "weights"
    bytes          of the weight files, predicted if there were no trials
    trials         the last one is that of the rules
    estimated      as in Sensitivity
    dropped        layers that the model no longer has; the rules are for the rest
    drops          the sets of layers that were compared
    passed_over    last trial of the plan that was not taken, with all layers or with fewer
    pays_from      limit from which dropping one layer is predicted to pay, if none pays at the target
    measured       comparison of what the rules produce, if there was one
    mean_step      of quantised weights, None for other plans
    nearest        quantised tensors whose errors nothing compensates, in spite of calibration
    """

    rules: tuple[Rule, ...]
    schemes: tuple[tuple[str, int], ...]
    predicted_kld: float | None
    bytes: int
    trials: tuple[Trial, ...]
    estimated: int
    dropped: tuple[int, ...] = ()
    drops: Drops | None = None
    passed_over: Trial | None = None
    pays_from: float | None = None
    measured: MeasuredResult | None = None
    experts: tuple[ExpertsOfUse, ...] = ()
    mean_step: float | None = None
    nearest: int = 0


@dataclass(frozen=True)
class ExpertsOfUse:
    """The experts of one class of use, in all layers.

    token_share      share of the choices of all routers that fell on them
    bits_per_weight  predicted, of their tensors
    """

    use: UseClass
    experts: int
    token_share: float
    bits_per_weight: float


class MeasuredResult(Protocol):
    """A comparison of a model, and whether a compressed checkpoint has that model's weights."""

    @property
    def comparison(self) -> Comparison: ...

    def holds_for(self, dst: Path) -> bool: ...


@dataclass(frozen=True)
class MeasuredFiles:
    """A comparison of a compressed model, and the checksums of the weight files that it was loaded from."""

    checksums: tuple[str, ...]
    comparison: Comparison

    def holds_for(self, dst: Path) -> bool:
        """Whether a compressed checkpoint has the same weight files."""
        return _checksums(dst) == self.checksums


def _checksums(path: Path) -> tuple[str, ...]:
    return tuple(map(file_checksum, find_checkpoint(path).weight_paths()))


NOTHING = Drop((), 0, None, math.inf)
"""No layer is dropped."""


class Planner:
    """Plans for a request, from the sensitivity of its checkpoint, and their trials.

    fixed     bytes of everything that is not rounded
    baseline  the original on a text, None to measure nothing
    drop      layers that the checkpoint no longer has
    """

    def __init__(
        self,
        request: TargetRequest,
        sensitivity: Sensitivity,
        fixed: FixedBytes,
        baseline: BaselineComparison | None,
        stage: Stage,
        drop: Drop = NOTHING,
    ) -> None:
        self.request, self.sensitivity, self.fixed = request, sensitivity, fixed
        self._baseline, self._stage, self._drop = baseline, stage, drop
        self._trials = 0
        self._measured: dict[tuple[int, ...], MeasuredFiles] = {}

    def without(self, drop: Drop) -> Planner:
        """A planner of the checkpoint from which these layers were dropped."""
        return Planner(self.request, self.sensitivity, self.fixed, self._baseline, self._stage, drop)

    def best(self, *, compare: bool = False) -> SearchResult:
        """The best plan by trials. With `compare` the last trial has a comparison, whatever the target."""
        return self.by_size(compare) if self.request.target.limits_size else self.by_quality()

    def untried(self) -> SearchResult:
        """The plan that the sum of single tensors predicts to reach the target, without a trial."""
        limit = self.request.target.limit
        if self.request.target.limits_size:
            return self._result(self._within(limit))
        return self._result(allocate(self.sensitivity.options("divergence"), limit))

    def by_quality(self) -> SearchResult:
        """The smallest plan with at most the divergence, or increase of loss, of the target."""
        options = self.sensitivity.options("divergence")
        *others, best = search_budget(
            lambda budget: allocate(options, budget), self._value, self.request.target.limit, self._floor()
        )
        return self._result(best.choice, *(attempt.product for attempt in others), best.product)

    def _floor(self) -> float:
        """The divergence, or increase of loss, before any tensor is rounded."""
        if self._drop.comparison is None:
            return 0.0
        return value_of(self.request.target.kind, self._drop.comparison).value

    def by_size(self, compare: bool = False) -> SearchResult:
        """The plan of least divergence within the target size."""
        limit, excess = math.floor(self.request.target.limit), 0
        while True:
            allocation = self._within(limit - excess)
            trial = self._try(allocation, compare=compare)
            if trial.bytes <= limit:
                return self._result(allocation, trial)
            excess += trial.bytes - limit

    def _within(self, nbytes: float) -> Allocation:
        try:
            return allocate(self.sensitivity.options("bytes"), nbytes - self.fixed.total)
        except OverBudget as failure:
            least = self.fixed.total + failure.least
            original = sum(p.stat().st_size for p in find_checkpoint(self.request.src).weight_paths())
            raise out_of_reach(self.request.target, least, original) from None

    def _value(self, allocation: Allocation) -> tuple[Estimate, Trial]:
        trial = self._try(allocation)
        if trial.comparison is None:  # predictions are not finite
            return Estimate(math.inf, None), trial
        return sought_value(self.request.target.kind, trial.comparison), trial

    def _try(self, allocation: Allocation, *, compare: bool = True) -> Trial:
        """Compress with an allocation's rules, and compare the result with the original."""
        request = self.request
        self._trials += 1
        label = f"trial {self._trials}"
        with folder_beside(request.dst, "trial") as folder:
            with self._stage(f"{label}: compress", weight_bytes(request.src), "bytes") as advance:
                report = compress(
                    request.src, folder / "trial", self._rules(allocation), verify=False,
                    jobs=request.jobs, device=request.coder, on_bytes=advance,
                )  # fmt: skip
            comparison = None
            if compare and self._baseline is not None:
                with (
                    suppress(NotFinite),
                    self._stage(f"{label}: compare", self._baseline.tokens, "tokens") as advance,
                ):
                    comparison = self._baseline.run(report.dst, advance).comparison
                    self._measured[allocation.chosen] = MeasuredFiles(_checksums(report.dst), comparison)
        return Trial(self._divergence(allocation), report.stored_weight_bytes, comparison)

    def _chosen(self, allocation: Allocation) -> list[tuple[GroupCandidates, int]]:
        return list(zip(self.sensitivity.candidates, allocation.chosen, strict=True))

    def _divergence(self, allocation: Allocation) -> float:
        pairs = zip(self.sensitivity.divergences, allocation.chosen, strict=True)
        return math.fsum([self._drop.kld, *(values[number] for values, number in pairs)])

    def _rules(self, allocation: Allocation) -> tuple[Rule, ...]:
        """The rules of the groups, before those of the request that say lossless."""
        chosen = self._chosen(allocation)
        rounded = rules_of([c.group for c, _ in chosen], [c.choices[i].scheme for c, i in chosen])
        return before_lossless(self.request.rules, rounded)

    def _result(self, allocation: Allocation, *trials: Trial) -> SearchResult:
        chosen = self._chosen(allocation)
        counts = Counter[str]()
        for one, number in chosen:
            counts[str(one.choices[number].scheme)] += len(one.group.tensors)
        return SearchResult(
            rules=self._rules(allocation),
            schemes=tuple(counts.items()),
            predicted_kld=self._divergence(allocation),
            bytes=trials[-1].bytes
            if trials
            else self.fixed.total + sum(c.choices[i].nbytes for c, i in chosen),
            trials=trials,
            estimated=self.sensitivity.estimated,
            dropped=self._drop.layers,
            measured=self._measured.get(allocation.chosen),
            experts=_by_use(chosen),
        )


def _by_use(chosen: Sequence[tuple[GroupCandidates, int]]) -> tuple[ExpertsOfUse, ...]:
    """Sum up groups of experts, each with the number of its choice, by class of use."""
    uses = [(c.group.use, c.group, c.choices[i].nbytes) for c, i in chosen if c.group.use is not None]
    all_tokens = sum(use.tokens for use, _, _ in uses)
    rows = []
    for name in CLASSES:
        groups = [(use, group, nbytes) for use, group, nbytes in uses if use.name == name]
        if groups:
            tensors = [t for _, group, _ in groups for t in group.tensors]
            names = [one for one in (expert_name(t.name) for t in tensors) if one is not None]
            rows.append(
                ExpertsOfUse(
                    name,
                    len({(one.layer, one.expert) for one in names}),
                    sum(use.tokens for use, _, _ in groups) / max(1, all_tokens),
                    8 * sum(nbytes for _, _, nbytes in groups) / sum(t.info.numel for t in tensors),
                )
            )
    return tuple(rows)
