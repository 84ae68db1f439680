"""What the weights of a checkpoint are made of, tensor by tensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.schemes import legend
from neuzip.cli.text import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.measures.histograms import Inspection, TensorFigures

SPARE = ("sign", "mant", "joint", "stored", "predicted", "dtype", "exp", "shape", "max error", "scheme")
"""Columns that a narrow window does without, the first one first."""


def show_inspection(out: Output, inspection: Inspection) -> None:
    from neuzip.eval.measures.histograms import visible

    stored = "stored" if inspection.compressed else "predicted"
    columns = ["tensor", "dtype", "shape", "scheme", "sign", "exp", "mant", "joint", "bound", stored, "ratio"]
    lines = []
    for t in inspection.tensors:
        e = t.entropies
        entropies = (e.sign, e.exponent, e.mantissa, e.joint) if e is not None else (None,) * 4
        lines.append(
            [t.label, visible(t.dtype), "x".join(map(str, t.shape)) or "scalar", visible(t.short_scheme),
             *("-" if bits is None else f"{bits:.2f}" for bits in entropies), *_sizes(t)]
        )  # fmt: skip
    of = "" if inspection.weight_bytes is None else "weight files: "
    lines.append([f"{of}{count_text(len(lines), 'tensor')}", *[""] * 7, *_sizes(inspection)])
    if inspection.lossy:
        columns.append("max error")
        for line, t in zip(lines, inspection.tensors, strict=False):
            line.append("-" if t.loss is None else percent_text(t.loss.max_relative, 1))
        lines[-1].append("")
    *rows, total = lines
    spare = [name for name in SPARE if name in columns]
    right = set(columns) - {"tensor", "dtype", "shape", "scheme"}
    left_out = out.table(columns, rows, right=right, total=total, spare=spare)
    out.text()
    for note in legend(t.scheme for t in inspection.tensors):
        out.text(note)
    out.text("Entropies in bits per weight; bound and ratio as shares of the original size.")
    out.text("Bound: entropy of the exponents, plus sign and used mantissa bits uncompressed.")
    if inspection.weight_bytes is not None:
        out.text("The last row includes the headers of the files, as `neuzip compress` does.")
    if any(t.scheme.startswith("ternary") for t in inspection.tensors):
        out.text("Bound of ternary tensors: entropy of the codes -1, 0 and 1, without scales.")
    if any(counts.fmt.bits > 16 for counts in inspection.counts):
        out.text("Mantissa entropies of F32 and F64 are upper bounds.")
    out.wider(left_out)


def _sizes(of: TensorFigures | Inspection) -> list[str]:
    """Bound, stored size and ratio: of a tensor, or of all."""
    bound = "-" if of.bound_bytes is None else percent_text(of.bound_bytes, of.nbytes)
    return [bound, bytes_text(of.after_bytes), percent_text(of.after_bytes, of.before_bytes)]


def can_show(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
