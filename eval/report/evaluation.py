"""What there is to tell about an evaluation: what was compared, how, and what came out.

A report is plain data, so what is measured elsewhere need not know of pages. See `report_page` for what is
made of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.histograms import Inspection
from neuzip.eval.report.distribution import Distribution, distribution
from neuzip.eval.report.rows import ReportRow, cost_rows, divergence_rows, perplexity_rows
from neuzip.eval.report.sweep_results import SweepPoint, SweepResults
from neuzip.eval.report.tensors import TensorRow, read_tensors, tensors_of_headers, weight_file_bytes
from neuzip.formats.checkpoint import find_checkpoint

if TYPE_CHECKING:
    from neuzip.eval.measures.perplexity import (
        Evaluation,
    )
    from neuzip.eval.measures.texts import Text

SCHEMA = 1


@dataclass(frozen=True)
class EvaluationReport:
    """The content of a report. Sections of figures that are None or empty are left out.

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
    """The report of an evaluation, with figures of the checkpoints' files and, optionally, of a sweep.

    Without `read_weights` no weight is read, and tensors are told as the headers of the files have them.

    `title` and `base_title` are what they are called; `text` is what was predicted, to tell whether that of
    the sweep was another; `versions` are those of other programs that had a part in it; `on_bytes` as in
    `read_tensors`. Raises NeuzipError.
    """
    differs = () if sweep is None else sweep.differing(_depends_on(evaluation, base, text))
    inspection, tensors, missing = (
        read_tensors(path, base, on_bytes=on_bytes) if read_weights else (None, tensors_of_headers(path), ())
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
    """The conditions of an evaluation under the names in rows of a sweep; unknown ones are left out."""
    name = evaluation.compared or evaluation.measured[0].convention.name
    convention = evaluation.by(name).convention
    facts: dict[str, Any] = {"rule": convention.rule, "tokens": convention.tokens}
    if base is not None:
        facts["checkpoint"] = fingerprint.of_checkpoint(find_checkpoint(base))
    if text is not None:
        facts["text"] = fingerprint.of_text(text.content)
    return facts


def _attention_text(bits: Sequence[int | None] | None) -> str:
    """Words for quantised attention, with its layers and bits; empty if there is none."""
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
        perplexity=tuple(row for m in evaluation.measured for row in perplexity_rows(m, before is not None)),
        nll_difference=changes[0].nll if changes else None,
        blocks=evaluation.measured[0].blocks,
        divergence=() if compared is None else divergence_rows(compared, _windows_compared(evaluation)),
        distribution=distribution(paired.kld) if paired is not None else None,
        cost=cost_rows(last, before, evaluation.memory),
        **more,
    )


def _windows_compared(evaluation: Evaluation) -> str:
    assert evaluation.compared is not None
    return evaluation.by(evaluation.compared).convention.rule


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
