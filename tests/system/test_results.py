"""Every result in benchmarks/results says where it comes from: a commit, the hardware, the versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MEASURED = sorted(set(RESULTS.glob("*.json")) - {RESULTS / "reading.json"})
"""All but what people read: no machine and no versions belong to that, and it has commits of its own."""

COMMIT = re.compile(r"[0-9a-f]{7,40}")


def environments(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each part of a result was measured on: of a document with sections every section has its own."""
    parts = document.get("sections", {"": document})
    for name, part in parts.items():
        yield name, part.get("environment", {})


def commits(value: Any) -> Iterator[str]:
    """Every commit that is named anywhere in a result."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "commit":
                yield inner
            else:
                yield from commits(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commits(inner)


def test_there_are_results():
    assert len(MEASURED) > 25


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_result_names_commit_hardware_and_versions(path: Path):
    """A commit is a whole id: what was measured with uncommitted changes nobody can measure again."""
    document = json.loads(path.read_text())
    parts = list(environments(document))
    assert parts
    for name, environment in parts:
        assert COMMIT.fullmatch(environment.get("commit", "")), (name, environment.get("commit"))
        assert environment["processor"] and environment["cores"] > 0 and environment["memory_gib"] > 0
        assert environment["python"] and set(environment["packages"].values()) - {"not installed"}
        if "gpu" in environment:
            assert environment["gpu"]["name"] and environment["gpu"]["driver"]
    assert all(COMMIT.fullmatch(commit) for commit in commits(document))


@pytest.mark.parametrize(
    "commit", ["", "unknown", "54e7d27 with uncommitted changes", "54e7d27-dirty", "main"]
)
def test_what_is_no_commit(commit: str):
    assert not COMMIT.fullmatch(commit)
