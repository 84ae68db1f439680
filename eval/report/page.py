"""A report as one page of HTML that loads nothing, as Markdown, or as JSON: the same figures in all three."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.compress.overwrite_guard import refuse_existing, refuse_folder
from neuzip.compress.workspace import write_file
from neuzip.distribution import require
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.measures.estimates import Estimate, exponential
from neuzip.eval.measures.histograms import visible
from neuzip.eval.report.distribution import BINS, LOWEST, Distribution
from neuzip.eval.report.evaluation import EvaluationReport
from neuzip.eval.report.sweep_results import pareto
from neuzip.eval.report.text import (
    bytes_text,
    change_text,
    figure_text,
    number_text,
    percent_text,
    power_text,
    row_text,
    share_text,
)

if TYPE_CHECKING:
    import jinja2

_SPECIAL = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])|^[#+-]")
"""What Markdown would take for more than itself; an underscore within a word it does not."""

NEEDS = {".html": ("jinja2", "matplotlib"), ".md": ("jinja2",), ".json": ()}
"""The modules that each kind of report needs."""

KINDS = tuple(NEEDS)


def check_target(path: Path, overwrite: bool) -> None:
    """Raise NeuzipError unless a report can be written to `path`: asked before the long work begins."""
    if path.suffix not in KINDS:
        raise UsageError(
            f"`report={str(path)!r}`: {path.suffix or 'a name without a suffix'} is no kind of report",
            f"choose a name that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}",
        )
    require(f"{path}: a report", *NEEDS[path.suffix])
    refuse_folder(path)
    refuse_existing(path, overwrite, file=True)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be written: {os.strerror(error.errno or errno.EIO)}") from error


def write(report: EvaluationReport, path: Path) -> None:
    """Write the report, of the kind that the suffix of `path` names."""
    write_file(path, render(report, path.suffix))


def render(report: EvaluationReport, kind: str) -> bytes:
    """The report as `.html`, `.md` or `.json`."""
    if kind == ".json":
        return (json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n").encode()
    return (_html(report) if kind == ".html" else _markdown(report)).encode()


def headlines(report: EvaluationReport) -> list[tuple[str, str, str]]:
    """The main figures: name, figure, and a remark."""
    lines = []
    if report.stored_bytes is not None:
        whole = report.original_bytes
        of = "" if whole is None else f"{share_text(report.stored_bytes, whole)} of {bytes_text(whole)}"
        lines.append(("weight files", bytes_text(report.stored_bytes), of))
    first = next((row for row in report.perplexity if row.after is not None), None)
    if first is not None:
        lines.append((first.name, figure_text(first.after), change_text(first)))
    for row in report.divergence[:1] + tuple(r for r in report.divergence[1:] if r.unit == "%")[:1]:
        lines.append((row.name, row_text(row, row.after), ""))
    return lines


def verdict(report: EvaluationReport) -> str:
    """A sentence that sums up the figures."""
    if report.unchanged:
        weights = "Every tensor is identical to the original, byte for byte"
        return weights + (", and so is every measured number." if report.identical else ".")
    text = "Every measured number is identical." if report.identical else loss_verdict(report)
    if report.missing:
        count = len(report.missing)
        lacking = (
            f"{count:,} tensor{' of the original is' if count == 1 else 's of the original are'} missing."
        )
        text = f"{lacking} {text}".rstrip()
    elif report.exact:
        text = (
            "The tensors are identical to the original, but the measured numbers differ. Either the "
            f"configuration differs or the way they were computed. {text}"
        ).rstrip()
    return text


def loss_verdict(report: EvaluationReport) -> str:
    """The effect on perplexity, and then how sure it is; nothing without a paired difference of losses."""
    change = report.nll_difference
    if change is None:
        return ""
    ratio = exponential(change)
    effect = percent_text(Estimate(100 * (ratio.value - 1), ratio.times(100).standard_error))
    if not change.standard_error or not math.isfinite(change.standard_error):
        short = " The text is too short for a standard error." if change.standard_error is None else ""
        return f"Perplexity changes by {effect}.{short}"
    errors = abs(change.value) / change.standard_error
    if errors < 2:
        return (
            f"Perplexity changes by {effect}. That is {errors:.1f} standard errors: this text does not tell "
            "the two models apart."
        )
    return f"Perplexity changes by {effect}. That is {errors:.1f} standard errors of the paired difference."


def _environment(*, html: bool) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {
        "figure": figure_text, "number": number_text, "bytes": bytes_text, "share": share_text,
        "cell": row_text, "change": change_text, "visible": visible, "code": _code, "plain": _escaped,
    }  # fmt: skip
    return environment


def _fill(name: str, report: EvaluationReport, *, html: bool, **more: object) -> str:
    source = files("neuzip.eval.report").joinpath(name).read_text(encoding="utf-8")
    return (
        _environment(html=html)
        .from_string(source)
        .render(
            report=report,
            headlines=headlines(report),
            verdict=verdict(report),
            front=pareto(report.sweep),
            yardsticks=[p.scheme for p in report.sweep if p.kind == "yardstick"],
            **more,
        )
    )


def _html(report: EvaluationReport) -> str:
    from markupsafe import Markup

    from neuzip.eval.report import pictures as report_pictures

    drawn = {name: Markup(svg) for name, svg in report_pictures.pictures(report).items()}
    return _fill("report.html.j2", report, html=True, pictures=drawn)


def _markdown(report: EvaluationReport) -> str:
    from neuzip.eval.report.histogram_pictures import sketch

    drawn = [] if report.inspection is None else [sketch(counts) for counts in report.inspection.counts]
    return _fill("report.md.j2", report, html=False, sketches=drawn, decades=decades(report.distribution))


def decades(spread: Distribution | None) -> list[tuple[str, int]]:
    """Tokens by the power of ten of their divergence, without the empty ends."""
    if spread is None:
        return []
    sums = [sum(spread.counts[at : at + BINS]) for at in range(0, len(spread.counts), BINS)]
    occupied = [at for at, count in enumerate(sums) if count]
    return (
        [
            (f"{power_text(LOWEST + at)} to {power_text(LOWEST + at + 1)}", sums[at])
            for at in range(occupied[0], occupied[-1] + 1)
        ]
        if occupied
        else []
    )


def _code(text: str) -> str:
    """Text as Markdown code, whatever it holds."""
    text = visible(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|")


def _escaped(text: str) -> str:
    r"""Text that Markdown shows as it is, in a table too.

    >>> _escaped("a_b|c _d_ <i>*e*</i>")
    'a_b\\|c \\_d\\_ \\<i\\>\\*e\\*\\</i\\>'
    """
    return _SPECIAL.sub(r"\\\g<0>", visible(text))
