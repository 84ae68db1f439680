"""What the weights of a checkpoint are made of, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.schemes import legend
from neuzip.cli.text import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.measures.histograms import Inspection, TensorFigures

SPARE = (
    "sign", "mant", "joint", "of experts", "stored", "predicted", "dtype", "exp", "shape", "max error",
    "step", "L2 error", "code entropy", "stored bits", "scheme",
)  # fmt: skip
"""Columns that a narrow window does without, the first one first."""


def show_inspection(out: Output, inspection: Inspection) -> None:
    from neuzip.eval.measures.expert_figures import ExpertFigures, sum_up_experts
    from neuzip.eval.measures.histograms import visible

    tensors = sum_up_experts(inspection.tensors)
    stored = "stored" if inspection.compressed else "predicted"
    columns = ["tensor", "dtype", "shape", "scheme", "sign", "exp", "mant", "joint", "bound", stored, "ratio"]
    lines = []
    for t in tensors:
        e = t.entropies
        entropies = (e.sign, e.exponent, e.mantissa, e.joint) if e is not None else (None,) * 4
        lines.append(
            [t.label, visible(t.dtype), "x".join(map(str, t.shape)) or "scalar", visible(t.short_scheme),
             *("-" if bits is None else f"{bits:.2f}" for bits in entropies), *_sizes(t)]
        )  # fmt: skip
    of = "" if inspection.weight_bytes is None else "weight files: "
    count = count_text(len(inspection.tensors), "tensor")
    lines.append([f"{of}{count}", *[""] * 7, *_sizes(inspection)])
    has_experts = any(isinstance(t, ExpertFigures) for t in tensors)
    for name, cell in _further_columns(inspection, has_experts=has_experts).items():
        columns.append(name)
        for line, t in zip(lines, tensors, strict=False):
            line.append(cell(t))
        lines[-1].append("")
    *rows, total = lines
    spare = [name for name in SPARE if name in columns]
    right = set(columns) - {"tensor", "dtype", "shape", "scheme"}
    left_out = out.table(columns, rows, right=right, total=total, spare=spare)
    out.text()
    for note in _notes(inspection, has_experts=has_experts):
        out.text(note)
    out.wider(left_out)


def _further_columns(
    inspection: Inspection, *, has_experts: bool
) -> dict[str, Callable[[TensorFigures], str]]:
    """Columns that not every checkpoint has, each with the text of a tensor's cell."""
    columns: dict[str, Callable[[TensorFigures], str]] = {}
    if has_experts:
        columns["of experts"] = _range
    if inspection.rounded:
        columns["max error"] = lambda t: "-" if t.max_error is None else percent_text(t.max_error, 1)
    if inspection.has_norms:
        columns["L2 error"] = lambda t: "-" if t.l2_error is None else percent_text(t.l2_error, 1)
    if inspection.quantized:
        columns["step"] = lambda t: "-" if t.codes is None else f"{t.codes.step:.4g}"
        columns["code entropy"] = lambda t: "-" if t.codes is None else f"{t.codes.entropy:.2f}"
        columns["stored bits"] = lambda t: "-" if t.codes is None else f"{t.codes.stored_bits:.2f}"
    return columns


def _notes(inspection: Inspection, *, has_experts: bool) -> Iterator[str]:
    """What a reader has to know of the table."""
    yield from legend(t.scheme for t in inspection.tensors)
    yield "Entropies in bits per weight; bound and ratio as shares of the original size."
    yield "Bound: entropy of the exponents, plus sign and used mantissa bits uncompressed."
    if has_experts:
        yield "* is any expert: the experts of a layer share a row, with mean entropies. Of experts: the"
        yield "smallest and the largest ratio of one of them. --json lists every tensor."
    if inspection.weight_bytes is not None:
        yield "The last row includes the headers of the files, as `neuzip compress` does."
    if any(t.scheme.startswith("ternary") for t in inspection.tensors):
        yield "Bound of ternary tensors: entropy of the codes -1, 0 and 1, without scales."
    if inspection.quantized:
        yield "Bound of quantized tensors: entropy of the codes, without factors. A weight is about its"
        yield "code times the step, times the factors of its row and column if there are any."
    if any(counts.fmt.bits > 16 for counts in inspection.counts):
        yield "Mantissa entropies of F32 and F64 are upper bounds."


def _sizes(of: TensorFigures | Inspection) -> list[str]:
    """Bound, stored size and ratio: of a tensor, or of all."""
    bound = "-" if of.bound_bytes is None else percent_text(of.bound_bytes, of.nbytes)
    return [bound, bytes_text(of.after_bytes), percent_text(of.after_bytes, of.before_bytes)]


def _range(experts: TensorFigures) -> str:
    """The smallest and the largest ratio of an expert; a dash for a tensor of no experts."""
    from neuzip.eval.measures.expert_figures import ExpertFigures

    if not isinstance(experts, ExpertFigures):
        return "-"
    least, largest = (percent_text(ratio, 1) for ratio in (experts.least_ratio, experts.largest_ratio))
    return least if least == largest else f"{least.removesuffix(' %')} to {largest}"


def can_show(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
