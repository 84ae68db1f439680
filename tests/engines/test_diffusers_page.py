"""docs/how-to/diffusers.md: its blocks run in the order of the page, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "diffusers.md"
BLOCK = re.compile(r"^```(console|python) engine\n((?:.*\n)*?)```$", re.MULTILINE)
NEUZIP = [sys.executable, "-P", "-m", "neuzip.cli"]


def without_figures(text: str) -> list[str]:
    """Lines without what differs from machine to machine: rules, times and speeds."""
    text = re.sub(r" in [\d.]+ \w+ \(.*\)", "", text)
    return [re.sub(r"─+", "─", " ".join(line.split())) for line in text.splitlines() if line.strip()]


def test_the_page_of_diffusers(tmp_path: Path) -> None:
    """Python blocks before a command run in one process, those after it in another, as a reader would."""
    session: list[str] = []
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            session.append(text)
            continue
        subprocess.run(
            [sys.executable, "-P", "-c", "\n".join(session)], cwd=tmp_path, check=True, timeout=600
        )
        session = ["import torch"]
        command, shown = text.removeprefix("$ neuzip ").split("\n", 1)
        run = subprocess.run(
            NEUZIP + command.split(), cwd=tmp_path, check=True, timeout=600, capture_output=True, text=True
        )
        assert without_figures(run.stdout) == without_figures(shown)
    assert len(session) > 3
    subprocess.run([sys.executable, "-P", "-c", "\n".join(session)], cwd=tmp_path, check=True, timeout=600)
