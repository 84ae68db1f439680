"""neuzip diff: compare two checkpoints tensor by tensor."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.measures.difference import TensorDifference

EXAMPLES = [
    "neuzip diff my-model my-model.nz",
    "neuzip diff my-model fine-tuned --json",
    "neuzip diff a.safetensors b.safetensors --quiet",
    "",
    "Exit code 0 if all tensors are identical, 1 if not.",
]

NUMBERS = ["differ", "max abs", "max rel", "rel L2"]
SPARE = ["max abs", "rel L2", "differ"]
"""Columns that a narrow window does without, the least useful first."""


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder, .safetensors file or Hub id")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint to compare with, plain or compressed")],
    jobs: options.JobsOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor"""
    out = Output(json=json, quiet=quiet)
    from neuzip.eval.measures.difference import compare_checkpoints

    paths = resolved(out, a), resolved(out, b)
    difference = compare_checkpoints(*paths, jobs=jobs, stage=out.progress)
    tensors, different, compared = difference.tensors, difference.different, difference.compared_bytes
    if different:
        rows = [_row(t) for t in different]
        left_out = out.table(["tensor", "what", *NUMBERS], rows, right=NUMBERS, spare=SPARE)
        out.wider(left_out)
        out.text(f"{len(different)} of {len(tensors)} tensors differ")
    else:
        out.text(f"identical: {count_text(len(tensors), 'tensor')}, {bytes_text(compared)}")
    out.result(
        {
            "a": paths[0],
            "b": paths[1],
            "identical": not different,
            "compared_bytes": compared,
            "totals": {"tensors": len(tensors)} | Counter(t.status for t in tensors),
            "tensors": [t.to_json() for t in tensors],
        },
        quiet=[t.label for t in different],
    )
    if different:
        raise typer.Exit(1)


def _row(t: TensorDifference) -> list[str]:
    sides = [side for side in (t.a, t.b) if side is not None]
    what = {
        "different": "values" + (f", {t.not_finite} not finite" if t.not_finite else ""),
        "dtype": f"dtype {' / '.join(side.dtype for side in sides)}",
        "shape": f"shape {' / '.join('x'.join(map(str, side.shape)) or 'scalar' for side in sides)}",
        "only_a": "only in A",
        "only_b": "only in B",
    }[t.status]
    errors = (t.max_absolute, t.max_relative, t.relative_l2)
    share = "-" if t.differing is None else percent_text(t.differing, t.elements)
    if t.differing and share == "0.00 %":
        share = "< 0.01 %"
    return [t.label, what, share, *("-" if error is None else f"{error:.3g}" for error in errors)]
