"""The figures of the experts of a mixture, summed up for each layer, so that a table of them can be read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from neuzip.compress.expert_names import expert_name
from neuzip.eval.measures.histograms import Entropies, TensorFigures, visible
from neuzip.formats.records import Loss


@dataclass(frozen=True)
class ExpertFigures(TensorFigures):
    """A tensor of several experts of a layer, summed up: bytes, mean entropies, the largest errors.

    The shape begins with the number of experts. `least_ratio` and `largest_ratio` are the stored bytes as a
    share of the original's, of the expert with the smallest share and of that with the largest.
    """

    least_ratio: float
    largest_ratio: float

    @classmethod
    def of(cls, kind: str, experts: Sequence[TensorFigures]) -> ExpertFigures:
        """Sum up tensors of one dtype and shape, and call them `kind`."""
        first = experts[0]
        bounds = [t.bound_bytes for t in experts if t.bound_bytes is not None]
        used = [t.used_mantissa_bits for t in experts if t.used_mantissa_bits is not None]
        ratios = [t.stored_bytes / (t.nbytes or 1) for t in experts]
        return cls(
            label=visible(first.file[: first.file.rfind("/") + 1] + kind),
            file=first.file,
            name=kind,
            dtype=first.dtype,
            shape=(len(experts), *first.shape),
            nbytes=sum(t.nbytes for t in experts),
            stored_bytes=sum(t.stored_bytes for t in experts),
            scheme=_schemes(experts),
            loss=_largest([t.loss for t in experts if t.loss is not None]),
            entropies=_mean([t.entropies for t in experts if t.entropies is not None]),
            used_mantissa_bits=max(used, default=None),
            bound_bytes=sum(bounds) if len(bounds) == len(experts) else None,
            codes=None,
            least_ratio=min(ratios),
            largest_ratio=max(ratios),
        )


def sum_up_experts(tensors: Sequence[TensorFigures]) -> list[TensorFigures]:
    """The tensors in order; those of the experts of a layer that have one kind of name are one row."""
    together: dict[object, list[TensorFigures]] = defaultdict(list)
    for t in tensors:
        name = expert_name(t.name)
        folder = t.file[: t.file.rfind("/") + 1]
        together[(t.label,) if name is None else (folder, name.kind, t.dtype, t.shape)].append(t)
    rows: list[TensorFigures] = []
    for group in together.values():
        name = expert_name(group[0].name)
        if name is None or len(group) == 1:
            rows += group
        else:
            rows.append(ExpertFigures.of(name.kind, group))
    return rows


def _schemes(experts: Sequence[TensorFigures]) -> str:
    """The scheme, or the number of experts of each."""
    counts = Counter(t.short_scheme for t in experts)
    if len(counts) == 1:
        return experts[0].scheme
    return ", ".join(f"{count} {scheme}" for scheme, count in counts.most_common())


def _mean(entropies: Sequence[Entropies]) -> Entropies | None:
    if not entropies:
        return None
    count, joints = len(entropies), [e.joint for e in entropies if e.joint is not None]
    return Entropies(
        sum(e.sign for e in entropies) / count,
        sum(e.exponent for e in entropies) / count,
        sum(e.mantissa for e in entropies) / count,
        sum(joints) / count if len(joints) == count else None,
    )


def _largest(losses: Sequence[Loss]) -> Loss | None:
    """The largest of each error."""
    if not losses:
        return None
    norms = [loss.relative_l2 for loss in losses if loss.relative_l2 is not None]
    return Loss(
        max(loss.max_relative for loss in losses),
        max(loss.rms_relative for loss in losses),
        max(norms, default=None),
    )
