"""What a sweep found: a row for each scheme and yardstick, and those that break the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from neuzip.eval.measures.divergence import Comparison, KLDivergence
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.plans.allocation import Option, pareto_front

from .savings import Saving, savings
from .setup import kind_of

SCHEMA = 1


@dataclass(frozen=True)
class SweepRow:
    """The results of one scheme or yardstick: the content of its JSON file.

    `kind` is lossless, rounded, quantized or yardstick. `bytes`, `original_bytes` and `ratio` are of the
    weight files; `bytes` of a yardstick is computed, without headers of files. `perplexity` is token-level,
    `comparison` the paired one with the original. `memory_bytes` is what the parameters take in memory;
    `peak_bytes`, `load_seconds` and `tokens_per_second` are those of `baseline.Run`, without a peak on a CPU,
    where one process has one for all schemes. `decode_bytes_per_second` counts the bytes of decoded weights,
    one tensor after the other, the faster of two times. A yardstick is no form in memory: it has none of
    these. `depends_on` is what the figures would change with.
    """

    scheme: str
    kind: str
    bytes: int
    original_bytes: int
    ratio: float
    weights: int
    bits_per_weight: float
    largest_relative_error: float
    perplexity: Estimate
    comparison: Comparison
    dtype: str
    memory_bytes: int | None
    peak_bytes: int | None
    load_seconds: float | None
    decode_bytes_per_second: float | None
    tokens_per_second: float | None
    depends_on: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The row as plain values: those of the comparison stand beside the sizes."""
        values = asdict(self)
        return {"schema": SCHEMA, **values.pop("comparison"), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SweepRow:
        """The inverse of `to_json`. Raises KeyError or TypeError for values that are no row."""
        values = {"kind": kind_of(values["scheme"]), **values}  # rows of an earlier version have none
        compared = {f.name: values[f.name] for f in fields(Comparison)}
        for name in ("base_nll", "other_nll", "nll_difference", "perplexity_ratio", "top_1", "top_k"):
            compared[name] = Estimate(**compared[name])
        compared["kld"] = KLDivergence(**{**compared["kld"], "mean": Estimate(**compared["kld"]["mean"])})
        own = {f.name: values[f.name] for f in fields(cls) if f.name != "comparison"}
        own["perplexity"] = Estimate(**own["perplexity"])
        return cls(**own, comparison=Comparison(**compared))


@dataclass(frozen=True)
class Failure:
    """A scheme that breaks the model, or cannot be so small: the content of its `.failed` file."""

    scheme: str
    reason: str
    depends_on: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The failure as plain values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        """The inverse of `to_json`. Raises KeyError or TypeError for values that are none."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class Sweep:
    """The rows in the order of the request, and the schemes that `failed`.

    `resumed` schemes were there already. `front` names those to which none is smaller and at least as close
    to the original.
    """

    text: str
    rule: str
    device: str
    rows: tuple[SweepRow, ...]
    resumed: int
    failed: tuple[Failure, ...] = ()

    @property
    def front(self) -> tuple[str, ...]:
        points = [Option(row.bytes, row.comparison.kld.mean.value) for row in self.rows]
        return tuple(self.rows[i].scheme for i in pareto_front(points))

    @property
    def savings(self) -> tuple[Saving, ...]:
        """What quantisation takes at the divergence of each yardstick, in the order of the rows."""
        return savings(
            *(
                [
                    (r.scheme, r.bits_per_weight, r.comparison.kld.mean.value)
                    for r in self.rows
                    if r.kind == kind
                ]
                for kind in ("quantized", "yardstick")
            )
        )
