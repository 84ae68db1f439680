"""benchmarks/reading.py counts sentences, and the share that is marked has a limit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = """# A heading is none

One sentence here. neuzip is a name. Another with `code.x` and a [link](to/a.md). Is this one?
It goes on in
the next line!

* An item of a list.
* A second item: it has
  two lines.

| a cell | is none. It is not. |
|---|---|

```console
$ neither is this. Or this.
```

<!-- figures: x -->
Generated text is none. Really.
<!-- end of figures -->

    indented code is none.
"""


@pytest.fixture(scope="module")
def reading(root: Path) -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("reading", root / "benchmarks" / "reading.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sentences_are_running_text(reading: ModuleType) -> None:
    assert reading.sentences(PAGE) == [
        "One sentence here.",
        "neuzip is a name.",
        "Another with `code.x` and a [link].",
        "Is this one?",
        "It goes on in the next line!",
        "An item of a list.",
        "A second item: it has two lines.",
    ]


def test_what_was_read_is_under_the_limit(reading: ModuleType, root: Path) -> None:
    """Empty until the pages have been read after they were rewritten; from then on every page is in it."""
    document = json.loads((root / "benchmarks" / "results" / "reading.json").read_text())
    assert list(reading.problems(document, root)) == []
    assert reading.totals(reading.earlier_counts(document, "before"))["README"] == (94, 28)


def read(marked: list[str], *pages: str) -> dict[str, Any]:
    after = {page: {"sentences": 100, "marked": marked if page == "README.md" else []} for page in pages}
    return {"after": {"commit": "abc", "readers": 1, "pages": after}}


def test_too_many_marks_and_missing_pages_are_told(reading: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    names = ("README.md", "docs/a.md", "formats/SPEC.md", "CONTRIBUTING.md", "CHANGELOG.md")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("A page.")
    assert list(reading.problems(read(["a sentence"] * 4, *names), tmp_path)) == []
    assert list(reading.problems(read(["a sentence"] * 5, *names), tmp_path)) == [
        "README: 5 of 100 sentences had to be read twice, 5.0%"
    ]
    assert list(reading.problems(read([], *names, "neuzip --help"), tmp_path)) == []
    assert list(reading.problems(read([], *names[1:], "docs/gone.md"), tmp_path)) == [
        "docs/gone.md: was read, and does not exist",
        "README.md: was not read",
    ]


def test_a_table_has_both_readings(reading: ModuleType) -> None:
    before = {"commit": "54e7d27", "readers": 1, "pages": {"README.md": {"sentences": 94, "marked": 28}}}
    lines = list(reading.lines({"before": before, "after": None}))
    assert "README.md                                   94      28  29.8%" in lines
    assert lines[-2:] == ["rewritten: not read yet", "after: not read yet"]
    lines = list(reading.lines({"before": before} | read(["a sentence"], "README.md")))
    assert "README                                     100       1   1.0%" in lines
