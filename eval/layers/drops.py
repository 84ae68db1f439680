"""Which layers a plan by target may do without, before anything is written.

    measured   the model without a layer beside the whole one, as `layers` does, for every layer in turn
    chosen     the layer whose loss costs least divergence for each of its bytes; then, together with it, the
               next one, and so on
    predicted  what rounding reaches with the room that dropping leaves of the target; the two losses are
               taken to add up, which trials correct. As soon as a layer more is predicted to gain nothing,
               it stays.

Layers whose absence a config cannot describe are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workspace import remove_scratch, scratch_folder, writing
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.layers.left_out import ModelWithout, measure_without
from neuzip.eval.layers.removal import Pruned, remove_layers, require_removable
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.divergence import Comparison

Predict = Callable[[tuple[int, ...], Comparison | None], float]
"""The predicted bytes, or nats per token, of a plan without these layers; infinite beyond the target."""


@dataclass(frozen=True)
class Drop:
    """Layers, rising, the `bytes` of their tensors as they are, and the model without them beside the whole.

    `predicted` is what a plan without them comes to. `comparison` is None where nothing is dropped, and where
    predictions are not finite.
    """

    layers: tuple[int, ...]
    bytes: int
    comparison: Comparison | None
    predicted: float

    @property
    def kld(self) -> float:
        """The divergence by dropping alone, in nats per token; infinite if predictions are not finite."""
        if self.comparison is None:
            return math.inf if self.layers else 0.0
        return self.comparison.kld.mean.value


@dataclass(frozen=True)
class Drops:
    """The compared sets of layers: `singles` each layer alone, `steps` none, then one layer more each.

    `rejected` is the step that was predicted to gain nothing, if one was. `refused` says why layers were
    passed over.
    """

    singles: tuple[Drop, ...]
    steps: tuple[Drop, ...]
    rejected: Drop | None
    refused: tuple[str, ...]

    @property
    def chosen(self) -> Drop:
        """The layers that the plan is to do without: none, if dropping does not pay."""
        return self.steps[-1]


def weigh(
    baseline: BaselineComparison,
    source: FolderSource,
    layer_bytes: Sequence[int],
    count: int | None,
    predict: Predict,
    stage: Stage,
) -> Drops:
    """Choose `count` layers to drop, or with None as many as pay, none if none does.

    Raises UsageError for a number that leaves no layer, and NeuzipError where `count` cannot be dropped.
    """
    total = len(layer_bytes)
    _require_some_left(count, total)
    without = ModelWithout(baseline.model)
    singles: tuple[Drop, ...] = ()
    steps = [Drop((), 0, None, predict((), None))]
    rejected, refused = None, list[str]()
    while len(steps) <= (total - 1 if count is None else count):
        now = steps[-1]
        sets = [tuple(sorted((*now.layers, n))) for n in range(total) if n not in now.layers]
        drops = []
        with stage(
            f"without {len(steps)} of {total} layers", len(sets) * baseline.tokens, "tokens"
        ) as advance:
            for layers in sets:
                comparison = measure_without(baseline, without, layers, advance)
                predicted = math.inf if comparison is None else predict(layers, comparison)
                drops.append(Drop(layers, sum(layer_bytes[n] for n in layers), comparison, predicted))
        singles = singles or tuple(drops)
        best = _cheapest(source, drops, refused)
        if best is None and count is not None:
            reason = refused[0] if refused else "without more of its layers no prediction is finite"
            raise NeuzipError(f"`drop_layers={count}`: {reason}", "drop fewer layers")
        if count is None and (best is None or math.inf > now.predicted <= best.predicted):
            rejected = best
            break
        assert best is not None
        steps.append(best)
    while count is None and math.isinf(steps[-1].predicted) and len(steps) > 1:
        rejected = steps.pop()
    return Drops(singles, tuple(steps), rejected, tuple(refused))


def _require_some_left(count: int | None, total: int) -> None:
    if count is not None and not 0 < count < total:
        raise UsageError(
            f"`drop_layers={count}`: the model has {total} layer{'' if total == 1 else 's'}, one has to stay",
            f"give 1 to {total - 1}, or auto" if total > 1 else "leave it out",
        )


def _cheapest(source: TensorSource, drops: Sequence[Drop], refused: list[str]) -> Drop | None:
    """The drop of least divergence per byte that can be written. Reasons against others go into `refused`."""
    finite = [drop for drop in drops if drop.comparison is not None]
    for drop in sorted(finite, key=lambda drop: (drop.kld / drop.bytes, drop.layers)):
        try:
            require_removable(source, drop.layers)
        except NeuzipError as failure:
            refused.append(failure.message)
        else:
            return drop
    return None


def pays_from(
    whole: Callable[[float], float], without: Callable[[float], float], low: float, high: float
) -> float | None:
    """The least target between two at which a plan without a layer takes fewer bytes than one with all.

    Both give the predicted bytes for a target, infinite if there is none; `high` is one at which dropping
    pays, if it ever does: None if not. Found by bisection, to 1 %.

    >>> round(pays_from(lambda x: 10 - x, lambda x: 12 - 2 * x, 0.1, 9), 1)
    2.0
    """
    if not 0 < low < high or without(high) >= whole(high):
        return None
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        if without(middle) < whole(middle):
            high = middle
        else:
            low = middle
    return high


@contextmanager
def pruned(src: Path, dst: Path, layers: Sequence[int], stage: Stage) -> Iterator[Pruned]:
    """A plain checkpoint without these layers, beside DST, for as long as it is worked on."""
    with folder_beside(dst, "pruned") as folder:
        with stage("drop layers", weight_bytes(src), "bytes") as advance:
            written = remove_layers(src, folder / "pruned", layers, on_bytes=advance)
        yield written


@contextmanager
def folder_beside(dst: Path, what: str) -> Iterator[Path]:
    """A folder for a while, on the disk that has to have room for the result."""
    path = dst.with_name(f"{dst.name}.neuzip-{what}")
    with writing(path):
        remove_scratch(path)
        folder = scratch_folder(path)
    try:
        yield folder
    finally:
        remove_scratch(path)
