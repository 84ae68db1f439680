"""A table of the lines that tests run, a line for each package: `python tests/support/coverage_rooms.py`.

`make coverage` runs the tests first. The Gluon kernels and the Triton kernels run on a GPU, on the CPU in an
interpreter; numba's loops run compiled, and coverage does not see into them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("coverage.ini")


def measured() -> dict[str, list[int]]:
    """Statements, statements run, branches and branches taken of each package."""
    coverage = Coverage(config_file=str(CONFIG))
    coverage.load()
    with tempfile.TemporaryDirectory() as folder:
        coverage.json_report(outfile=f"{folder}/coverage.json", ignore_errors=True)
        files = json.loads(Path(folder, "coverage.json").read_text(encoding="utf-8"))["files"]
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for name, report in files.items():
        path = Path(name)
        room = (path.relative_to(ROOT) if path.is_absolute() else path).parts[0]
        summary = report["summary"]
        for at, key in enumerate(("num_statements", "covered_lines", "num_branches", "covered_branches")):
            rooms[room][at] += summary[key]
    return rooms


def table(rooms: dict[str, list[int]]) -> str:
    total = [sum(column) for column in zip(*rooms.values(), strict=True)]
    lines = [f"{'package':<10}{'lines':>8}{'run':>8}{'%':>7}{'branches':>10}{'taken':>8}{'%':>7}"]
    for room, (statements, run, branches, taken) in [*sorted(rooms.items()), ("total", total)]:
        lines.append(
            f"{room:<10}{statements:>8}{run:>8}{100 * run / max(statements, 1):>7.1f}"
            f"{branches:>10}{taken:>8}{100 * taken / max(branches, 1):>7.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    rooms = measured()
    sys.exit("no data: run make coverage") if not rooms else print(table(rooms))
