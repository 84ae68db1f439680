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
    mark_width = max(map(len, MARKS.values()))
    for topic, group in groupby(report.findings, key=lambda finding: finding.topic):
        findings = [*group]
        width = max(len(finding.name) for finding in findings)
        out.text(topic)
        for finding in findings:
            mark = f"  {MARKS[finding.status]:<{mark_width}}  "
            out.text(f"{mark}{finding.name:<{width}}  {finding.text}")
            if finding.hint is not None:
                out.text(f"{'':<{len(mark)}}{finding.hint}")
        out.text()
    if report.healthy:
        out.text("no problem")
    else:
        out.text(f"{count_text(len(report.problems), 'problem')}: see the lines marked {MARKS['problem']}")
