"""What `neuzip ternarize` converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.text import seconds_text
from neuzip.errors import shell

if TYPE_CHECKING:
    from torch import device as Device


@dataclass(frozen=True)
class TernaryConversion:
    """What was converted.

    tensors         names of the tensors that are ternary now
    weights         their weights
    zeros           share of these weights that are 0
    matrix_weights  weights of all matrices of the layers
    dtype           dtype of the model, as torch names it
    """

    tensors: Sequence[str]
    weights: int
    zeros: float
    matrix_weights: int
    dtype: str


def show_conversion(
    out: Output,
    conversion: TernaryConversion,
    path: Path,
    dst: Path,
    place: Device,
    seconds: float,
    ternary_group: str,
) -> None:
    """Say what was converted, and how to go on."""
    weights = conversion.weights
    if conversion.matrix_weights > weights:
        out.warning(
            f"{1 - weights / conversion.matrix_weights:.0%} of the layers' weights are not converted: only"
            " linear modules become ternary, not merged experts"
        )
    out.text(
        f"{len(conversion.tensors)} tensors are ternary; {conversion.zeros:.0%} of their {weights:,} weights"
        " are 0"
    )
    out.text(f"{dst} in {seconds_text(seconds)} on {place}")
    measure = shell("neuzip", "eval", dst, "--original", path, "--text", "TEXT")
    out.status(f"to measure the loss: {measure}")
    group = ("--ternary-group", ternary_group) if ternary_group.isdecimal() else ()  # others are found
    out.status(f"to compress it: {shell('neuzip', 'compress', dst, f'{dst}.nz', '--ternary', *group)}")
