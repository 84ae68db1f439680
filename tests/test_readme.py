"""The README tells the truth: its figures are those of the results, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from neuzip.cli.commands import VERBS


def test_figures_are_those_of_the_results(root: Path) -> None:
    check = subprocess.run([sys.executable, root / "benchmarks" / "readme.py", "--check"], check=False)
    assert check.returncode == 0, "run python benchmarks/readme.py"


def test_every_command_is_in_the_table_and_no_other(root: Path) -> None:
    table = re.findall(r"^\| `neuzip (\w+)", (root / "README.md").read_text(), re.MULTILINE)
    assert set(table) == set(VERBS)


def test_links_lead_somewhere(root: Path) -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "eval/demo/README.md"):
        text = (root / document).read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (root / document).parent.joinpath(target).exists(), f"{document}: {target}"


def test_the_python_names_exist(root: Path) -> None:
    import neuzip

    for name in re.findall(r"`neuzip\.(\w+)", (root / "README.md").read_text()):
        assert hasattr(neuzip, name), name
