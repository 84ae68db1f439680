"""docs/papers.md: a status is no better than its results, and every item of the papers has one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pages import layout
from pages.papers import page
from pages.papers.items import STATUSES, Claim, PaperItem, source
from pages.papers.sage_attention import sage_attention

TRUE, FALSE = Claim("a", True), Claim("b", False)

MEASURED = {"ours": "1", "results": ["x"], "on": "a model"}


def item(**values: object) -> PaperItem:
    return PaperItem("Table 1", "shows", "paper", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, "not run"),
        ({"claims": ()}, "not run"),
        ({"obstacle": "weights"}, "cannot run here"),
        ({"drawn": True}, "nothing to measure"),
        (MEASURED, "in part"),
        ({**MEASURED, "missing": "rows"}, "in part"),
        ({**MEASURED, "claims": [TRUE]}, "reproduced in small"),
        ({**MEASURED, "claims": [TRUE], "missing": "rows"}, "in part, trend agrees"),
        ({**MEASURED, "claims": [TRUE, FALSE]}, "trend differs"),
        ({**MEASURED, "claims": [FALSE], "missing": "rows"}, "in part, trend differs"),
        ({**MEASURED, "claims": [TRUE], "missing": "r", "obstacle": "w"}, "in part, trend agrees"),
    ],
)  # fmt: skip
def test_a_status_follows_from_results_and_claims(values: dict[str, object], status: str) -> None:
    assert item(**values).status == status
    assert status in STATUSES


@pytest.mark.parametrize(
    "values",
    [
        {"ours": "1"}, {"results": ["x"]}, {"claims": [TRUE]}, {"drawn": True, **MEASURED}, {"on": "a model"},
        {"ours": "1", "results": ["x"]},
    ],
)  # fmt: skip
def test_no_number_without_a_result_and_a_model(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Table 1"):
        item(**values)


def test_every_table_and_figure_has_one_item(root: Path) -> None:
    sections = page.sections()
    names = {section.name: [one.name for one in section.items] for section in sections}
    assert all(len(set(each)) == len(each) for each in names.values())
    assert {name: len(each) for name, each in names.items()} == {
        "NeuZip": 10, "BitNet a4.8": 13, "SageAttention2": 21, "Cut Cross-Entropy": 8, "Mix-LN": 15,
    }  # fmt: skip
    for section in sections:
        for one in section.items:
            for name in one.results:
                scripts = re.findall(r"benchmarks/\w+\.py", source(name))
                assert scripts and all((root / script).is_file() for script in scripts), name


def test_a_result_that_contradicts_the_paper_changes_the_status(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (root / "benchmarks" / "results").glob("attention*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(layout, "RESULTS", tmp_path)
    for form, status in (
        ("4 bit", "in part, trend agrees"),
        ("4 bit, not smoothed", "in part, trend differs"),
    ):
        path = tmp_path / "attention_accuracy-smollm2-135m.json"
        document = json.loads(path.read_text())
        for row in document["closeness"]:
            if row["form"] == form:
                row["cosine"] = 0.9999
        path.write_text(json.dumps(document))
        assert next(one.status for one in sage_attention().items if one.name == "Table 1") == status
