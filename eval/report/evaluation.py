"""What there is to tell about an evaluation: what was compared, how, and what came out.

A report is plain data, so what is measured elsewhere need not know of pages. See `report_page` for what is
made of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from neuzip.compress.schemes import describe
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, shell
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.difference import TensorDifference, compare, match
from neuzip.eval.measures.estimates import Estimate, exponential, over, without_meaning
from neuzip.eval.measures.histograms import Inspection, TensorFigures, inspect, labels, select
from neuzip.eval.plans.allocation import Option, pareto_front
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.safetensors_file import parse_json

if TYPE_CHECKING:
    from neuzip.eval.measures.divergence import Comparison
    from neuzip.eval.measures.perplexity import (
        ConventionScores,
        Evaluation,
        MeasuredModel,
        ModelDifference,
        PeakMemory,
    )
    from neuzip.eval.measures.texts import Text

SCHEMA = 1

LOWEST, HIGHEST = -12, 2
"""Powers of ten between which divergences are counted."""

BINS = 5
"""Counters a power of ten."""

MEAN_KLD = "mean KLD"

SPEED = "tokens/s"
"""The unit of figures that were measured once: they are told roughly, and no change of them."""

SWEEP_DEPENDS_ON = {
    "checkpoint": "checkpoint",
    "text": "text",
    "rule": "windows",
    "tokens": "number of tokens",
}
"""What must be the same for figures to be compared: its name in the rows of a sweep, and in words."""

QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "99.9 %": 0.999}


@dataclass(frozen=True)
class ReportRow:
    """A figure of the original (`before`, if it was measured) and of what was made of it.

    `note` is what it must be told with: its convention. `unit` is "", "bytes", "count", or what stands behind
    the figure. `change` is in percent of `before`, paired, where more is known than the two figures.
    """

    name: str
    after: Estimate | None
    before: Estimate | None = None
    note: str = ""
    unit: str = ""
    change: Estimate | None = None


@dataclass(frozen=True)
class Distribution:
    """How the divergences of `tokens` tokens are spread, in nats.

    `counts` are those from 10**LOWEST to 10**HIGHEST in steps of 10**(1 / BINS); `zero` is how many are
    exactly 0, `below` and `above` lie outside, `not_finite` are infinite or no number. `quantiles` are over
    all that are finite.
    """

    tokens: int
    zero: int
    below: int
    counts: tuple[int, ...]
    above: int
    not_finite: int
    quantiles: Mapping[str, float]
    largest: float


@dataclass(frozen=True)
class TensorRow:
    """One tensor: what it takes, and how far it is from the original.

    `identical` is whether its bytes are the original's, None where that is not known. `relative_l2` is
    |restored - original| / |original| over all weights, where both checkpoints were read; `rms_relative` and
    `max_relative` are of the errors relative to each weight, as the container tells them.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    nbytes: int
    stored_bytes: int
    identical: bool | None = None
    relative_l2: float | None = None
    rms_relative: float | None = None
    max_relative: float | None = None

    @property
    def error(self) -> float | None:
        """The error that is drawn: of the whole tensor where it is known."""
        return self.relative_l2 if self.relative_l2 is not None else self.rms_relative


@dataclass(frozen=True)
class SweepPoint:
    """What one scheme costs and does: bits a weight, stored bytes, mean divergence and perplexity."""

    scheme: str
    bits_per_weight: float
    nbytes: int
    kld: Estimate
    perplexity: Estimate


@dataclass(frozen=True)
class SweepResults:
    """The points of a sweep, by size, and what all of them were measured with."""

    points: tuple[SweepPoint, ...]
    depends_on: Mapping[str, Any]

    def differing(self, others: Mapping[str, Any]) -> tuple[str, ...]:
        """What of `others` was another for the sweep, in words."""
        return _differing(others, {name: self.depends_on.get(name) for name in others})


@dataclass(frozen=True)
class EvaluationReport:
    """All that a page tells. What was not measured is None or empty, and its section is left out.

    `identical` is whether all measured figures of both models agree to the last bit; `blocks` is what their
    standard errors are over. `missing` are tensors that only the original has. `sweep_differs` names what was
    another for the sweep than for this report. `stored_bytes` and `original_bytes` are of the weight files.
    `when` is the time to be told, as text; without it the page is the same whenever it is made.
    """

    title: str
    command: str
    versions: Mapping[str, str]
    base: str | None = None
    setting: Mapping[str, str] = field(default_factory=dict)
    identical: bool = False
    perplexity: tuple[ReportRow, ...] = ()
    nll_difference: Estimate | None = None
    blocks: str = ""
    divergence: tuple[ReportRow, ...] = ()
    distribution: Distribution | None = None
    cost: tuple[ReportRow, ...] = ()
    tasks: tuple[ReportRow, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    missing: tuple[str, ...] = ()
    inspection: Inspection | None = None
    original_bytes: int | None = None
    stored_bytes: int | None = None
    sweep: tuple[SweepPoint, ...] = ()
    sweep_differs: tuple[str, ...] = ()
    when: str | None = None

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits of the weight files per element of a tensor, as `compress` counts."""
        weights = sum(math.prod(t.shape) for t in self.tensors)
        return 8 * self.stored_bytes / weights if weights and self.stored_bytes is not None else None

    @property
    def exact(self) -> bool:
        """Whether the tensors are known to be those of the original, byte by byte."""
        return bool(self.tensors) and not self.missing and all(t.identical for t in self.tensors)

    @property
    def unchanged(self) -> bool:
        """Whether the tensors are the original's, and nothing that was measured says otherwise."""
        measured = self.nll_difference is not None or bool(self.divergence)
        return self.exact and (self.identical or not measured)

    def to_json(self) -> dict[str, Any]:
        """Everything, with None for what is infinite or no number."""
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "inspection"}
        weights = None if self.inspection is None else self.inspection.to_json()["histograms"]
        plain: dict[str, Any] = _plain(
            {"schema": SCHEMA, **shown, "bits_per_weight": self.bits_per_weight, "histograms": weights}
        )
        return plain


def distribution(divergences: npt.ArrayLike) -> Distribution:
    """Count the divergences of single tokens, in nats. What rounding made negative counts as `below`."""
    values = np.asarray(divergences, np.float64).ravel()
    finite = values[np.isfinite(values)]
    edges = 10.0 ** (LOWEST + np.arange((HIGHEST - LOWEST) * BINS + 1) / BINS)
    inside = finite[(finite >= edges[0]) & (finite < edges[-1])]
    at = np.searchsorted(edges, inside, "right") - 1
    quantiles = np.quantile(finite, list(QUANTILES.values())).tolist() if finite.size else []
    return Distribution(
        tokens=values.size,
        zero=int((finite == 0).sum()),
        below=int(((finite < edges[0]) & (finite != 0)).sum()),
        counts=tuple(np.bincount(at, minlength=edges.size - 1).tolist()),
        above=int((finite >= edges[-1]).sum()),
        not_finite=values.size - finite.size,
        quantiles=dict(zip(QUANTILES, quantiles, strict=False)),
        largest=float(finite.max()) if finite.size else math.nan,
    )


def build_report(
    evaluation: Evaluation,
    path: Path,
    base: Path | None,
    *,
    title: str,
    base_title: str | None,
    command: str,
    text: Text | None = None,
    sweep: SweepResults | None = None,
    tasks: tuple[ReportRow, ...] = (),
    versions: Mapping[str, str] | None = None,
    read_weights: bool = True,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> EvaluationReport:
    """The report of an evaluation, with what the checkpoints' files tell and, if given, a sweep's results.

    Without `read_weights` no weight is read, and tensors are told as the headers of the files have them.

    `title` and `base_title` are what they are called; `text` is what was predicted, to tell whether that of
    the sweep was another; `versions` are those of other programs that had a part in it; `on_bytes` as in
    `read_tensors`. Raises NeuzipError.
    """
    differs = () if sweep is None else sweep.differing(_depends_on(evaluation, base, text))
    inspection, tensors, missing = (
        read_tensors(path, base, on_bytes=on_bytes) if read_weights else (None, _tensors_of_headers(path), ())
    )
    report = report_of_evaluation(
        evaluation,
        title=title,
        base=base_title,
        command=command,
        inspection=inspection,
        tensors=tensors,
        missing=missing,
        stored_bytes=weight_file_bytes(path),
        original_bytes=weight_file_bytes(base) if base is not None else None,
        sweep=() if sweep is None else sweep.points,
        sweep_differs=differs,
        tasks=tasks,
    )
    return replace(report, versions={**report.versions, **(versions or {})})


def _depends_on(evaluation: Evaluation, base: Path | None, text: Text | None) -> dict[str, Any]:
    """What an evaluation was measured with, as the rows of a sweep tell it; what is not known is left out."""
    name = evaluation.compared or evaluation.measured[0].convention.name
    convention = evaluation.by(name).convention
    facts: dict[str, Any] = {"rule": convention.rule, "tokens": convention.tokens}
    if base is not None:
        facts["checkpoint"] = fingerprint.of_checkpoint(find_checkpoint(base))
    if text is not None:
        facts["text"] = fingerprint.of_text(text.content)
    return facts


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """What is not the same in both of that on which the figures of a sweep depend, in words."""
    others = fingerprint.differing(a, b)
    return tuple(words for name, words in SWEEP_DEPENDS_ON.items() if name in others)


def _attention_text(bits: Sequence[int | None] | None) -> str:
    """What is said of quantised attention, if there is any: of how many layers, in how many bits."""
    counts = [f"{bits.count(n)} of {len(bits)} layers in {n} bits" for n in (8, 4) if bits and n in bits]
    return f", attention of {', '.join(counts)}" if bits and counts else ""


def report_of_evaluation(
    evaluation: Evaluation, *, title: str, command: str, base: str | None = None, **more: Any
) -> EvaluationReport:
    """The report of an evaluation of one model, or of the original and what was made of it.

    `title` and `base` are what they are called, `command` is how it was asked for; `more` are fields of
    EvaluationReport that the evaluation does not have.
    """
    first, last = evaluation.models[0], evaluation.models[-1]
    before = first if len(evaluation.models) > 1 else None
    compared, paired = evaluation.comparison, evaluation.paired
    changes = [change for m in evaluation.measured if (change := m.scores[-1].difference) is not None]
    same = bool(changes) and all(change.identical for change in changes)
    setting = {
        "text": f"{evaluation.text}, {evaluation.documents:,} documents",
        "computed": f"in {last.dtype} on {evaluation.device}, residency {evaluation.residency}"
        + ("" if last.activations is None else f", activations {last.activations.text}")
        + _attention_text(last.attention_bits),
        "processes": f"{evaluation.processes:,}",
    }
    setting |= {f"not measured, {name}": reason for name, reason in evaluation.skipped.items()}
    setting |= {"logits": f"materialised in full: {last.formed}"} if last.formed else {}
    return EvaluationReport(
        title=title,
        command=command,
        base=base,
        versions={"neuzip": version("neuzip-toolkit"), **evaluation.versions},
        setting=setting,
        identical=same and (compared is None or compared.identical),
        perplexity=tuple(row for m in evaluation.measured for row in _perplexities(m, before is not None)),
        nll_difference=changes[0].nll if changes else None,
        blocks=evaluation.measured[0].blocks,
        divergence=() if compared is None else _divergences(compared, _windows_compared(evaluation)),
        distribution=distribution(paired.kld) if paired is not None else None,
        cost=_costs(last, before, evaluation.memory),
        **more,
    )


def _perplexities(measured: ConventionScores, both: bool) -> Iterator[ReportRow]:
    """What is told under a convention: a word and a byte in lm-eval's, a token in the others."""
    c, after = measured.convention, measured.scores[-1]
    before = measured.scores[0] if both else None
    special = "; no special tokens" if c.special_tokens == "none" else ""
    errors = over(measured.blocks, after.token_perplexity.standard_error)
    note = f"{c.rule}{special}; {c.tokens:,} tokens; {errors}"
    names = {"token_perplexity": f"{'token-level' if c.name == 'token' else c.name} perplexity"}
    if c.name == "token":
        names["nll"] = "NLL per token"
    if c.name == "lm-eval":
        names = {
            "word_perplexity": "word-level perplexity, lm-eval",
            "byte_perplexity": "byte-level perplexity, lm-eval",
            "bits_per_byte": "bits per byte, lm-eval",
        }
    for field_name, name in names.items():
        figure = getattr(after, field_name)
        if figure is not None:
            was = None if before is None else getattr(before, field_name)
            unit = "nats" if field_name == "nll" else ""
            figure_note = note
            if "perplexity" in field_name and any(without_meaning(x) for x in (figure, was) if x is not None):
                figure_note = f"tells nothing: its error is more than half of it; use a longer text; {note}"
            yield ReportRow(name, figure, was, figure_note, unit, _change(field_name, was, after.difference))


def _change(of: str, before: Estimate | None, difference: ModelDifference | None) -> Estimate | None:
    """What the paired difference of losses makes of a figure, in percent."""
    if before is None or difference is None:
        return None
    if of == "bits_per_byte" and difference.nll_per_byte is not None:
        return difference.nll_per_byte.times(100 / math.log(2) / before.value)
    differences = {
        "token_perplexity": difference.nll,
        "word_perplexity": difference.nll_per_word,
        "byte_perplexity": difference.nll_per_byte,
    }
    nll = differences.get(of)
    if nll is None:
        return None
    ratio = exponential(nll)
    return Estimate(100 * (ratio.value - 1), ratio.times(100).standard_error)


def _windows_compared(evaluation: Evaluation) -> str:
    assert evaluation.compared is not None
    return evaluation.by(evaluation.compared).convention.rule


def _divergences(comparison: Comparison, windows: str) -> tuple[ReportRow, ...]:
    exact = [
        ("median KLD", comparison.kld.median),
        ("99.9 % KLD", comparison.kld.p999),
        ("largest KLD", comparison.kld.max),
    ]
    return (
        ReportRow(
            MEAN_KLD,
            comparison.kld.mean,
            unit="nats",
            note=f"KL(original || this model), full vocabulary; {windows}",
        ),
        *(ReportRow(name, Estimate(value, None), unit="nats", note="per token") for name, value in exact),
        ReportRow(
            "top-1 agreement", comparison.top_1.times(100), unit="%", note="both rank the same token first"
        ),
        ReportRow(f"top-{comparison.k} overlap", comparison.top_k.times(100), unit="%", note="in any order"),
        ReportRow("perplexity ratio", comparison.perplexity_ratio, note="this model / original, paired"),
        ReportRow(
            "tokens",
            Estimate(float(comparison.tokens), None),
            note=over(comparison.blocks, comparison.kld.mean.standard_error),
            unit="count",
        ),
    )


def _costs(last: MeasuredModel, before: MeasuredModel | None, peak: PeakMemory) -> tuple[ReportRow, ...]:
    def row(name: str, of: str, unit: str, note: str) -> ReportRow:
        was = None if before is None else Estimate(getattr(before, of), None)
        return ReportRow(name, Estimate(getattr(last, of), None), was, note, unit)

    rows = [
        row("weights in memory", "weight_bytes", "bytes", "the parameters"),
        row("speed", "tokens_per_second", SPEED, "one pass without an error; `neuzip bench` measures speed"),
    ]
    if peak.bytes is not None:
        everything = peak.of + (", with both models" if before is not None else "")
        rows.append(
            ReportRow("peak memory", Estimate(float(peak.bytes), None), note=everything, unit="bytes")
        )
    return tuple(rows)


def weight_file_bytes(path: Path) -> int:
    """What the weight files of a checkpoint take on the disk."""
    return sum(file.stat().st_size for file in find_checkpoint(path).weight_paths())


def read_tensors(
    path: Path,
    base: Path | None,
    *,
    jobs: int | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[Inspection, tuple[TensorRow, ...], tuple[str, ...]]:
    """What the tensors of a checkpoint are made of and, with `base`, how far each is from the original's.

    The last are the names of tensors that only the original has. Reads both whole. `on_bytes` is told of
    bytes read, twice those of the tensors with `base`. Raises FormatError.
    """
    gaps: dict[tuple[str, str], TensorDifference] = {}
    missing: tuple[str, ...] = ()
    with FolderSource(path) as source:
        tensors = select(source)
        inspection = inspect(source, tensors, jobs=jobs, on_bytes=on_bytes)
        if base is not None:
            with FolderSource(base) as original:
                pairs = match(original, source)
                differences = compare(original, source, pairs, jobs=jobs, on_bytes=on_bytes)
            gaps = {(gap.b.file, gap.b.name): gap for gap in differences if gap.b is not None}
            missing = tuple(gap.label for gap in differences if gap.b is None)
    rows = [_tensor_row(inspection, t, gaps.get((t.file, t.name))) for t in inspection.tensors]
    return inspection, tuple(rows), missing


def _tensors_of_headers(path: Path) -> tuple[TensorRow, ...]:
    """The tensors of a checkpoint without reading any weight. Raises FormatError."""
    rows = []
    with FolderSource(path) as source:
        tensors = select(source)
        for t, label in zip(tensors, labels(tensors), strict=True):
            info = t.info
            if t.record is None:
                rows.append(TensorRow(label, info.dtype, info.shape, "plain", info.nbytes, info.nbytes))
                continue
            stored, scheme, loss = source.stored_bytes(t), describe(t.record, info.dtype), t.record.loss
            row = TensorRow(label, info.dtype, info.shape, scheme, info.nbytes, stored, loss is None)
            if loss is not None:
                row = replace(row, rms_relative=loss.rms_relative, max_relative=loss.max_relative)
            rows.append(row)
    return tuple(rows)


def _tensor_row(inspection: Inspection, t: TensorFigures, gap: TensorDifference | None) -> TensorRow:
    row = TensorRow(t.label, t.dtype, t.shape, t.scheme, t.nbytes, t.stored_bytes)
    if t.loss is not None:
        row = replace(
            row, identical=False, rms_relative=t.loss.rms_relative, max_relative=t.loss.max_relative
        )
    elif inspection.compressed:  # what a container does not say it rounded is the original's
        row = replace(row, identical=True, rms_relative=0.0, max_relative=0.0)
    if gap is None:
        return row
    if gap.status == "identical":
        return replace(row, identical=True, relative_l2=0.0, max_relative=0.0)
    return replace(
        row,
        identical=False,
        relative_l2=gap.relative_l2,
        max_relative=row.max_relative if gap.max_relative is None else gap.max_relative,
    )


def read_sweep(folder: Path) -> SweepResults:
    """What `neuzip sweep --output` wrote. Raises NeuzipError for other folders and for rows of several."""
    from neuzip.eval.sweep import SweepRow

    points = []
    first: tuple[Path, Mapping[str, Any]] | None = None
    for path in sorted(folder.glob("*.json")):
        try:
            row = SweepRow.from_json(parse_json(path.read_bytes(), path))
            first = first or (path, row.depends_on)
            others = _differing(first[1], row.depends_on)
        except (AttributeError, KeyError, TypeError) as error:
            raise FormatError(
                path, "is no result of neuzip sweep", hint="give the folder that it wrote"
            ) from error
        if others:
            raise NeuzipError(
                f"{path}: was measured with another {' and another '.join(others)} than {first[0].name}",
                "give a folder with the results of one sweep only",
            )
        kld = row.comparison.kld.mean
        points.append(SweepPoint(row.scheme, row.bits_per_weight, row.bytes, kld, row.perplexity))
    if first is None:
        raise NeuzipError(
            f"{folder}: holds no results of neuzip sweep",
            f"first: {shell('neuzip', 'sweep', 'SRC', '--output', folder)}",
        )
    return SweepResults(tuple(sorted(points, key=lambda p: (-p.bits_per_weight, p.scheme))), first[1])


def pareto(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Those that no other beats in both size and mean divergence, the smallest first."""
    return [points[i] for i in pareto_front([Option(p.bits_per_weight, p.kld.value) for p in points])]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
