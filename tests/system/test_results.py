"""Every result in benchmarks/results is a record of a measurement: commit, hardware, versions and rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import record
from record import Environment, GpuCard, Measurement

MEASURED = sorted({path.stem for path in record.RESULTS.glob("*.json")} - {"reading"})
"""All but what people read: no machine and no versions belong to that, and it has commits of its own."""

COMMIT = re.compile(r"[0-9a-f]{7,40}")

HERE = Environment("chip", 2, 8.0, "Linux 6", "3.11.7", {"torch": "2.13.0"}, "54e7d27")


def commits(value: Any) -> Iterator[str]:
    """Every commit that is named anywhere in a result; runs made one by one may have several."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "commit":
                yield from inner.split(", ")
            else:
                yield from commits(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commits(inner)


def test_there_are_results():
    assert len(MEASURED) > 25


@pytest.mark.parametrize("name", MEASURED)
def test_a_result_names_commit_hardware_and_versions(name: str):
    """A commit is a whole id: what was measured with uncommitted changes nobody can measure again."""
    measurements = record.read(name)
    assert measurements
    for section, measurement in measurements.items():
        environment = measurement.environment
        assert all(map(COMMIT.fullmatch, environment.commit.split(", "))), (section, environment.commit)
        assert environment.processor and environment.cores > 0 and environment.memory_gib > 0
        assert environment.python and set(environment.packages.values()) - {"not installed"}
        if environment.gpu is not None:
            assert environment.gpu.name and environment.gpu.driver
    document = json.loads((record.RESULTS / f"{name}.json").read_text())
    assert all(COMMIT.fullmatch(commit) for commit in commits(document))


@pytest.mark.parametrize("name", MEASURED)
def test_a_result_is_read_and_written_as_it_is(name: str):
    """All files have the layout that the one writer writes."""
    document = json.loads((record.RESULTS / f"{name}.json").read_text())
    assert document.pop("what")
    sections = document.get("sections", {"": document})
    assert {key: one.plain() for key, one in record.read(name).items()} == sections
    assert document.keys() == {"sections"} or "sections" not in document


@pytest.mark.parametrize(
    "commit", ["", "unknown", "54e7d27 with uncommitted changes", "54e7d27-dirty", "main"]
)
def test_what_is_no_commit(commit: str):
    assert not COMMIT.fullmatch(commit)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The record with a folder of its own."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return record


def test_what_is_saved_is_read(results: ModuleType):
    gpu = Environment(**{**vars(HERE), "gpu": GpuCard("a card", 80.0, "580.1", "13.0"), "gpus": 2})
    measurement = Measurement(gpu, [{"case": "a", "us": 1.5}], {"rounds": 3})
    results.save("one", "times", measurement)
    assert results.read("one") == {"": measurement}
    results.save("facts", "no rows", Measurement(HERE, facts={"seconds": {"median": 1.0}}))
    assert results.read("facts")[""].facts == {"seconds": {"median": 1.0}}


def test_a_section_takes_its_place_and_leaves_the_others(results: ModuleType):
    old, new = Measurement(HERE, [{"us": 1}]), Measurement(HERE, [{"us": 2}])
    results.save_sections("two", "times", {"a": old, "b": old})
    results.save_sections("two", "times", {"b": new})
    assert results.read("two") == {"a": old, "b": new}


@pytest.mark.parametrize("change", [{"comit": "54e7d27"}, {"gpu": {"name": "a card"}}])
def test_an_environment_with_a_wrong_key_is_not_read(change: dict[str, Any]):
    with pytest.raises(TypeError):
        Environment.read(HERE.plain() | change)


def test_the_environment_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    words = ["/a/benchmarks/speed.py", "/data/a model", "b=/data/c/", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("NEUZIP_COMMIT", "54e7d27")
    here = Environment.here("pytest", "no-such-package", needs_commit=True)
    assert here.command == "python benchmarks/speed.py 'a model' b=c --rounds 3"
    assert here.packages == {"pytest": pytest.__version__, "no-such-package": "not installed"}
    assert here.commit == "54e7d27" and here.cores > 0 and here.gpu is None


def test_a_benchmark_that_needs_a_commit_stops_at_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NEUZIP_COMMIT", raising=False)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert Environment.here().commit == record.UNKNOWN
    with pytest.raises(SystemExit, match="NEUZIP_COMMIT"):
        Environment.here(needs_commit=True)


def test_runs_of_several_commits_have_cards_and_sources_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(name: str) -> str:
        (tmp_path / name).write_text(f"{len(made)}")
        git("add", "-A")
        git("commit", "-m", name)
        return git("rev-parse", "--short", "HEAD")

    made: list[str] = []
    git("init")
    for name in ("source", "page", "source"):
        made.append(commit(name))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    card = GpuCard("a card", 80.0, "580.1", "13.0")
    runs = [{"environment": replace(HERE, commit=one, gpu=card, command="one run").plain()} for one in made]
    newer = replace(card, driver="590.1")  # another day's driver is no other card
    runs[1]["environment"] = replace(HERE, commit=made[1], gpu=newer).plain()
    found = Environment.of_runs(runs[:2], ["source"])
    assert found == replace(HERE, commit=f"{made[0]}, {made[1]}", gpu=card)
    with pytest.raises(SystemExit, match=f"{made[0]} and {made[2]} have other files of source"):
        Environment.of_runs(runs, ["source"])
    other = {"environment": replace(HERE, gpu=replace(card, name="another")).plain()}
    with pytest.raises(SystemExit, match="other cards or packages"):
        Environment.of_runs([runs[0], other], ["source"])


def test_a_spread_is_the_median_and_two_percentiles():
    assert record.spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0], "us") == {"us": 3.5, "p20_us": 2.0, "p80_us": 5.0}
    assert record.spread([7.0], "ms") == {"ms": 7.0, "p20_ms": 7.0, "p80_ms": 7.0}
