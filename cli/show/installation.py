"""What `neuzip doctor` found: a line for each finding, and what to do below it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.text import count_text

if TYPE_CHECKING:
    from neuzip.installation import InstallationReport

MARKS = {"ok": "ok", "note": "-", "problem": "FAIL"}
"""What stands in front of a finding."""


def quiet_lines(report: InstallationReport) -> list[str]:
    """The problems."""
    return [f"{problem.name}: {problem.text}" for problem in report.problems]


def show_installation(out: Output, report: InstallationReport) -> None:
    """The findings by topic, then how many problems there are."""
    width = max(len(finding.name) for finding in report.findings)
    mark_width = max(map(len, MARKS.values()))
    for topic, findings in groupby(report.findings, key=lambda finding: finding.topic):
        out.text(topic)
        for finding in findings:
            label = f"  {MARKS[finding.status]:<{mark_width}}  {finding.name:<{width}}"
            out.text(f"{label}  {finding.text}")
            if finding.hint is not None:
                out.text(f"{'':<{len(label)}}  {finding.hint}")
        out.text()
    if report.healthy:
        out.text("no problem")
    else:
        out.text(f"{count_text(len(report.problems), 'problem')}: see the lines marked {MARKS['problem']}")
