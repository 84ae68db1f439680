"""What a model card tells of an evaluation: the figures of a JSON report that `neuzip eval --report` wrote.

A figure is told with its convention, its text, the versions and the command, or not at all.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import Checkpoint
from neuzip.formats.container import Container
from neuzip.formats.safetensors_file import parse_json

SCHEMA = 1
MAX_BYTES = 1 << 28

DIVERGENCES = ("mean KLD", "99.9 % KLD", "top-1 agreement", "perplexity ratio")
"""The figures of a comparison that a card tells, by their names in a report."""

_HOW_TO = "make one: neuzip eval DIR --original ORIGINAL --text TEXT --report FILE.json"

Kind = tuple[str, tuple[int, ...], int]
"""Dtype, shape and stored bytes of a tensor."""


@dataclass(frozen=True)
class Figure:
    """A row of a table: value and standard error as text, of the original too where it was measured."""

    name: str
    before: str
    after: str
    how: str


@dataclass(frozen=True)
class CardEvaluation:
    """What was measured, with what; and what tells whether it was this checkpoint.

    `setting` is the text and what it was computed in, as names and values.
    """

    command: str
    base: str | None
    versions: dict[str, str]
    setting: dict[str, str]
    identical: bool
    perplexity: tuple[Figure, ...]
    divergence: tuple[Figure, ...]
    blocks: str
    stored_bytes: int
    tensors: Counter[Kind]

    def require_of(self, checkpoint: Checkpoint, report: Path) -> None:
        """Raise NeuzipError unless the tensors that were evaluated are stored as those of `checkpoint`."""
        nbytes = 0
        tensors: Counter[Kind] = Counter()
        for path in checkpoint.weight_paths():
            nbytes += path.stat().st_size
            with Container(path) as container:
                tensors.update(
                    (info.dtype, info.shape, container.stored_bytes(info.name))
                    for info in container.original.in_file_order
                )
        if (nbytes, tensors) != (self.stored_bytes, self.tensors):
            raise NeuzipError(
                f"{report}: is of another checkpoint than {checkpoint.root}: its tensors are not stored so",
                "evaluate the folder that is pushed: neuzip eval DIR ... --report FILE.json --overwrite",
            )


def read_evaluation(path: Path) -> CardEvaluation:
    """Read what `neuzip eval` wrote by `--report FILE.json`, or printed by `--json`.

    Raises FormatError for anything else.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise FormatError(path, f"has more than {MAX_BYTES:,} bytes, which is no report")
    document = parse_json(text, path)
    if isinstance(document, dict) and document.get("command") == "eval":  # what --json printed
        document = document.get("report")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "perplexity" not in document:
        raise FormatError(path, "is not a report of neuzip eval", hint=_HOW_TO)
    try:
        return _evaluation(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            path, f"is not a report of this version of neuzip eval: {error!r}", hint=_HOW_TO
        ) from error


def _evaluation(document: dict[str, Any]) -> CardEvaluation:
    """Raises KeyError, TypeError, ValueError or AttributeError."""
    tensors: Counter[Kind] = Counter(
        (str(t["dtype"]), tuple(map(int, t["shape"])), int(t["stored_bytes"])) for t in document["tensors"]
    )
    divergence = [_figure(row) for row in document["divergence"] if row["name"] in DIVERGENCES]
    return CardEvaluation(
        command=str(document["command"]),
        base=None if document["base"] is None else str(document["base"]),
        versions={str(k): str(v) for k, v in document["versions"].items()},
        setting={str(k): str(v) for k, v in document["setting"].items()},
        identical=document["identical"] is True,
        perplexity=tuple(map(_figure, document["perplexity"])),
        divergence=tuple(divergence),
        blocks=str(document["blocks"]),
        stored_bytes=int(document["stored_bytes"]),
        tensors=tensors,
    )


def _figure(row: dict[str, Any]) -> Figure:
    unit = f" {row['unit']}" if row["unit"] else ""
    before, after = (_estimate_text(row[key], unit) for key in ("before", "after"))
    return Figure(str(row["name"]), before, after, str(row["note"]))


def _estimate_text(estimate: dict[str, Any] | None, unit: str) -> str:
    """A figure and its standard error, to two digits of that and to four of the figure.

    >>> _estimate_text({"value": 27.797, "standard_error": 1.646}, "")
    '27.80 ± 1.65'
    >>> _estimate_text({"value": 0.20184, "standard_error": None}, " nats")
    '0.2018 nats'
    """
    if estimate is None or estimate["value"] is None:
        return "-"
    value, error = float(estimate["value"]), estimate["standard_error"]
    if not error:
        return f"{value:.4g}{unit}"
    leading = [math.floor(math.log10(abs(x))) for x in (float(error), value) if x]
    digits = max(0, 1 - leading[0], *(3 - first for first in leading[1:]))
    return f"{value:,.{digits}f} ± {float(error):,.{digits}f}{unit}"
