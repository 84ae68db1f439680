"""benchmarks/tune_experts.py with the clock and CUDA graphs replaced: what it calls, and what it prints."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pytest
import torch

from neuzip.kernels import tuning
from neuzip.kernels.experts import steps
from neuzip.kernels.tuning import launch_for

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tune_experts
from launch_choice import Measured, Timing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEASURED = Measured("a card", "0123abc", datetime.date(2026, 1, 2))
SMALL = tune_experts.ExpertsShape("small", 2, 16, 32, 1)


@pytest.mark.parametrize("name", tune_experts.STEPS)
def test_candidates_have_the_parameters_of_the_table(name: str) -> None:
    table = tuning.read(tuning.source("experts", torch.device("cpu")).path)
    parameters = {frozenset(candidate) for candidate in tune_experts.STEPS[name].candidates}
    for entry in table[name]:
        if name == "tile":
            assert {frozenset([rows]) for rows in entry["use"]} <= parameters
        else:
            assert parameters == {frozenset(entry["use"])}


def test_every_candidate_is_launched_and_the_best_one_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_experts, "DEVICE", DEVICE.type)
    monkeypatch.setattr(
        tune_experts,
        "captured",
        lambda calls: [calls[0]()] and launch_for("experts.sum", DEVICE, tokens=2)["block"],
    )
    monkeypatch.setattr(
        tune_experts, "in_turns", lambda runs, *_: [[abs(block - 256) + 1.0] for block in runs]
    )
    timings = tune_experts.tune("sum", [SMALL], [2], 0.0)
    out = tmp_path / "sm90" / "experts.toml"
    out.parent.mkdir()
    out.write_text(tune_experts.text_of("sum", timings, MEASURED), encoding="utf-8")
    assert [entry["use"]["block"] for entry in tuning.read(out)["sum"]] == [256]


@pytest.mark.parametrize("name", ["route", "gate", "tile", "decoded"])
def test_cases_of_every_step_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_experts, "DEVICE", DEVICE.type)
    case = tune_experts.STEPS[name].calls(SMALL, 2)
    assert case is not None
    value, _, calls = case
    assert value == {"route": 2, "gate": 0, "tile": 1, "decoded": 1}[name]
    assert len(calls) == tune_experts.ROUTINGS
    calls[0]()
    monkeypatch.setattr(steps, "multiplies_on_hopper", lambda *_: True)
    if name == "decoded":
        assert tune_experts.STEPS[name].calls(SMALL, 2) is None


def test_bounds_of_tiles_ascend() -> None:
    def times(best: int) -> tuple[float, ...]:
        return tuple(1.0 + abs(number - best) for number in range(len(tune_experts.TILES)))

    timings = [
        Timing(mean, times(best), {"hopper": True}) for mean, best in ((1, 0), (4, 0), (20, 1), (90, 4))
    ]
    timings += [Timing(mean, times(2), {"hopper": False}) for mean in (1, 9)]
    assert tune_experts.tile_entries(timings) == [
        {"use": {"rows_16": 4, "rows_32": 20, "rows_256": 0}, "when": {"hopper": True}},
        {"use": {"rows_64": 0}},
    ]
