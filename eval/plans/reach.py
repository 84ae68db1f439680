"""Sizes that a checkpoint can have, predicted from samples of its tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from neuzip.compress import Plan, make_plan
from neuzip.compress.rules import LOSSLESS, Rule
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.errors import NeuzipError
from neuzip.eval.plans.candidates import schemes_of
from neuzip.eval.plans.target_values import CompressionTarget
from neuzip.eval.plans.tensor_groups import find_groups, find_matrices, rules_of
from neuzip.formats.checkpoint import config_files, index_files

LOSS_RECORD = 96
"""Most bytes by which the record of a rounded tensor is longer than that of a lossless one."""

UNCERTAIN = 0.03
"""Relative error of sizes predicted from samples that is allowed for."""


class OutOfReach(NeuzipError):
    """No plan reaches the target size."""


@dataclass(frozen=True)
class Reach:
    """Bytes of the weight files of a checkpoint.

    original   as they are
    lossless   predicted for lossless compression
    least      predicted for rounding to 0 mantissa bits, or for codes that take nothing
    matrices   number of tensors that may lose something
    quantized  whether they lose it by quantisation
    """

    original: int
    lossless: int
    least: int
    matrices: int
    quantized: bool = False

    def is_lossless(self, target: CompressionTarget) -> bool:
        """Whether lossless compression reaches the size, even if predictions are off by UNCERTAIN."""
        return target.limit >= self.lossless * (1 + UNCERTAIN)

    def require(self, target: CompressionTarget) -> None:
        """Raise OutOfReach if no plan reaches the size, even if predictions are off by UNCERTAIN."""
        if target.limit < self.least * (1 - UNCERTAIN):
            raise out_of_reach(target, self.least, self.original, quantized=self.quantized)


def predict_reach(src: Path, rules: Sequence[Rule], block_size: int | None, jobs: int | None) -> Reach:
    """Predict the sizes that a checkpoint can have by rounding, from samples. Raises NeuzipError."""
    with FolderSource(src) as source, Workers(jobs) as workers:
        groups = find_groups(source, workers, rules)
        coarsest = rules_of(groups, [schemes_of(group, block_size)[-1] for group in groups])
        lossless = make_plan(source, rules, workers, predict=True)
        rounded = make_plan(source, before_lossless(rules, coarsest), workers, predict=True)
        original = sum(path.stat().st_size for path in source.checkpoint.weight_paths())
        whole = (lossless.predicted_bytes or 0) - _bytes_beside(source)
    pairs = zip(lossless.tensors, rounded.tensors, strict=True)
    saved = sum(max(0, (a.predicted or 0) - (b.predicted or 0)) for a, b in pairs)
    return Reach(original, whole, whole - saved, sum(len(group.tensors) for group in groups))


def predict_quantized_reach(src: Path, rules: Sequence[Rule], jobs: int | None) -> Reach:
    """Predict the sizes that a checkpoint can have by quantisation, from samples. Raises NeuzipError."""
    with FolderSource(src) as source, Workers(jobs) as workers:
        lossless = make_plan(source, rules, workers, predict=True)
        names = {t.tensor.name for t in find_matrices(source, lossless)}
        original = sum(path.stat().st_size for path in source.checkpoint.weight_paths())
        whole = (lossless.predicted_bytes or 0) - _bytes_beside(source)
    coded = sum(t.predicted or 0 for t in lossless.tensors if t.tensor.name in names)
    return Reach(original, whole, whole - coded, len(names), quantized=True)


def out_of_reach(
    target: CompressionTarget, least: float, original: int, *, quantized: bool = False
) -> OutOfReach:
    """An error that states the least size in MB and percent, rounded up."""
    megabytes, percent = math.ceil(least / 1e4) / 100, math.ceil(1000 * least / original) / 10
    more = "give more bits" if target.kind == "bits" else "give a larger size"
    why = "`exclude` and `block_size` cost some; `drop_layers='auto'` saves some"
    return OutOfReach(
        f"{target}: the weight files take about {megabytes:,.2f} MB ({percent:.1f} %) at least",
        f"{more}; {'`exclude` costs some' if quantized else why}",
    )


def before_lossless(rules: Sequence[Rule], more: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules with `more` inserted before the first lossless one, as the first match decides."""
    before = list(takewhile(lambda rule: rule.scheme != LOSSLESS, rules))
    return (*before, *more, *rules[len(before) :])


def _bytes_beside(source: FolderSource) -> int:
    """Bytes that a plan's prediction counts in addition to the weight files."""
    checkpoint = source.checkpoint
    rewritten = {*index_files(checkpoint), *config_files(checkpoint)}  # a plan counts them three times
    return sum(
        (checkpoint.root / file).stat().st_size * (3 if file in rewritten else 1)
        for file in checkpoint.others
    )


@dataclass(frozen=True)
class FixedBytes:
    """Predicted bytes of the weight files without the tensors that lose something.

    of_tensors  the part of each tensor, by name
    """

    total: int
    of_tensors: dict[str, int]

    @classmethod
    def of(
        cls,
        source: FolderSource,
        plan: Plan,
        lossy: Collection[str],
    ) -> FixedBytes:
        """Take them from a plan with predictions, but for the tensors whose names are among the `lossy`."""
        beside = _bytes_beside(source)
        predicted = {t.tensor.name: t.predicted or 0 for t in plan.tensors}
        inside = sum(predicted[name] for name in lossy)
        records = dict.fromkeys(lossy, LOSS_RECORD)
        total = (plan.predicted_bytes or 0) - beside - inside + LOSS_RECORD * len(lossy)
        return cls(total, predicted | records)

    def without(self, names: Collection[str]) -> int:
        """The bytes of a checkpoint without these tensors."""
        return self.total - sum(self.of_tensors[name] for name in names)
