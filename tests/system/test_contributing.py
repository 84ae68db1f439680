"""The pages for engineers name files, modules and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "contributing").glob("*.md"))]
ROOMS = "neuzip|cli|compress|formats|kernels|runtime|eval|train|tests|benchmarks|docs"
NAMED = re.compile(rf"(?<![\w/.])((?:{ROOMS})/[\w./*-]*\w/?)")
PLACEHOLDER = re.compile(r"NAME|OPERATION|ENGINE|NN|\*")


def named_in(text: str) -> set[str]:
    """The paths from the root that a page names, without those that stand for a file to be written."""
    return {path for path in NAMED.findall(text) if not PLACEHOLDER.search(path)}


def test_paths_are_found_in_a_page() -> None:
    text = "`formats/SPEC.md` and compress/schemes/NAME.py, `runtime/hf/`; see http://a.b/cli/x.py"
    assert named_in(text) == {"formats/SPEC.md", "runtime/hf/"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_exist(page: Path) -> None:
    missing = sorted(
        path for path in named_in(page.read_text(encoding="utf-8")) if not (ROOT / path).exists()
    )
    assert not missing, f"{page.name}: {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_tests_exist(page: Path) -> None:
    functions = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        functions |= set(re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    assert named <= functions, f"{page.name}: {', '.join(sorted(named - functions))}"
