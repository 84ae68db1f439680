"""Rows of benchmarks that run a model in several forms: a figure, its ratio to that of bf16, its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

LOSSLESS = ("dense", "packed", "ans")
"""Forms whose weights are those of the plain checkpoint, bit for bit."""


@dataclass(frozen=True)
class Target:
    """What a ratio must be, and should be: at least, or (`most`) at most."""

    must: float
    stretch: float | None = None
    most: bool = False

    def met(self, ratio: float, by: float | None = None, apart: float = 0.0) -> bool:
        """Whether a ratio is as it must be, of runs that are so far apart where nothing differs."""
        aim = self.must if by is None else by
        return ratio <= aim + apart if self.most else ratio >= aim - apart


DECODE, PEAK = "decode, batch 1", "peak memory, load and tokens"
APART = "decode, batch 1: models apart"
COMPILED = ", compiled"
DFLOAT11, ERROR, SAME = "decode, batch 1, of DFloat11's bound", "error of logits", "logits of the same bits"
SPREAD = "tokens on two GPUs as on one"
GENERATED, GRAPHED = "wikilm-26m, generate: original's tokens", "wikilm-26m, graph: original's tokens"
GENERATED_TIES, GRAPHED_TIES = "wikilm-26m, generate: same or tied", "wikilm-26m, graph: same or tied"
SERVED_AGREE = "served greedy tokens: bf16's or tied"
SERVED_FIRST, SERVED_REQUESTS = "served time to first token", "served requests/s"
TARGETS = {
    (SERVED_AGREE, "packed"): Target(1.0),
    ("served tokens/s, 1 sequence", "packed"): Target(1.15),
    ("served tokens/s, 128 sequences", "packed"): Target(0.97),
    (SERVED_FIRST, "packed"): Target(1.05, most=True),
    (SERVED_REQUESTS + ", scarce room", "packed"): Target(1.3),
    (DECODE, "dense"): Target(1.0),
    **{(what, "packed"): Target(1.15, 1.3) for what in (DECODE, DECODE + COMPILED)},
    (DECODE, "rounded"): Target(1.6, 2.0),
    ("decode, batch 64", "packed"): Target(1.0, 1.1),
    ("decode, batch 128", "packed"): Target(0.97, 1.05),
    ("prefill", "packed"): Target(0.93, 1.0),
    (PEAK, "packed"): Target(0.74, most=True),
    (PEAK, "ans"): Target(0.70, most=True),
    (DFLOAT11, "ans"): Target(2.0),
    (SAME, "dense"): Target(1.0),
    (SAME, "ans"): Target(1.0),
    (ERROR, "packed"): Target(1.05, 1.0, most=True),
    (DECODE, "codes"): Target(1.7, 2.3),
    ("weights in memory", "codes"): Target(0.34, 0.31, most=True),
    (ERROR, "codes"): Target(1.05, most=True),
    **{(SPREAD, form): Target(1.0) for form in LOSSLESS},
    **{(what, form): Target(1.0) for what in (GENERATED, GRAPHED) for form in ("dense", "ans")},
    **{(what, "packed"): Target(1.0) for what in (GENERATED_TIES, GRAPHED_TIES)},
}


@dataclass
class Results:
    """The rows so far, each printed as it comes. `save` writes them down, if they are to be saved."""

    rows: list[Row] = field(default_factory=list)
    save: Callable[[list[Row]], None] = lambda rows: None

    def add(
        self, what: str, by: str, value: float, unit: str, ratio: float | None = None, apart: float = 0.0
    ) -> None:
        """A figure, and its ratio to what its target is about; for `apart` see `Target.met`.

        Brackets at the end of `what` name the model, and are not part of the target's name.
        """
        row: Row = {"what": what, "by": by, "value": value, "unit": unit}
        line = f"{what:42}{by:8}{value:12,.6g} {unit:10}"
        if ratio is not None:
            row["ratio"] = ratio
            line += f"{ratio:7.3f}x"
        target = TARGETS.get((what.partition(" (")[0], by))
        if target is not None and ratio is not None:
            row |= {"must": target.must, "most": target.most, "met": target.met(ratio, apart=apart)}
            line += (
                f"  must {'<=' if target.most else '>='} {target.must}: {'met' if row['met'] else 'MISSED'}"
            )
            if apart:
                row["apart"] = apart
                line += f" (runs of the same are {100 * apart:.2f} % apart)"
            if target.stretch is not None:
                row |= {"stretch": target.stretch, "stretched": target.met(ratio, target.stretch)}
                line += f", stretch {target.stretch}: {'reached' if row['stretched'] else 'not reached'}"
        print(line, flush=True)
        self.rows.append(row)

    def value(self, what: str, by: str) -> float | None:
        """A figure that was added."""
        return next((float(r["value"]) for r in self.rows if (r["what"], r["by"]) == (what, by)), None)

    def against_bf16(self, what: str, by: str, value: float, unit: str) -> None:
        """A figure with its ratio to that of bf16, which comes first."""
        base = self.value(what, "bf16")
        self.add(what, by, value, unit, None if base is None else value / base)
