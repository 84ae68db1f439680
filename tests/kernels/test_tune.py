"""benchmarks/tune.py with clocks replaced: which candidates run, what is written, and what stops it."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from neuzip.kernels import tuning
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.tuning import launch_for

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compile_first
import packed_linear
import tune
from launch_choice import KernelTable, Measured

KERNELS = {kernel.name: kernel for kernel in tune.KERNELS}
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SHAPE = (64, 256)
MEASURED = Measured("a card", "0123abc", datetime.date(2026, 1, 2))

Times = Callable[[int, int], float]


def table() -> dict[str, KernelTable]:
    return tune.entries_in_use(torch.device("cpu"))


@pytest.mark.parametrize("name", sorted(table().keys() & KERNELS.keys()))
def test_candidates_have_the_parameters_of_the_table(name: str) -> None:
    kernel = KERNELS[name]
    for entry in table()[name].entries:
        assert all(candidate.keys() == entry["use"].keys() for candidate in kernel.candidates)


@pytest.mark.parametrize("name", KERNELS)
def test_no_candidate_is_there_twice(name: str) -> None:
    candidates = [str(candidate) for candidate in KERNELS[name].candidates]
    assert len(candidates) == len(set(candidates)) > 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], ModuleType]:
    """The script on a machine whose calls take as long as a function of rows and programs says."""
    launches: list[tuple[int, int]] = []
    monkeypatch.setattr(packed_linear, "L2", 1)  # two weights are enough where no time counts

    def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], tuple[int, int]]:
        launches.append((len(calls[0]()), launch_for("packed_linear.some_rows", DEVICE, rows=16)["programs"]))
        launch = launches[-1]
        return lambda: launch

    def with_times(times: Times) -> ModuleType:
        def in_turns(runs: Sequence[Callable[[], tuple[int, int]]], *_: object) -> list[list[float]]:
            return [[times(*run())] for run in runs]

        monkeypatch.setattr(tune, "captured", captured)
        monkeypatch.setattr(tune, "in_turns", in_turns)
        return tune

    return with_times


SOME_ROWS = replace(KERNELS["some_rows"], rows=(2, 20), candidates=[{"programs": n} for n in (2, 3, 4)])


def test_each_candidate_is_in_force_when_it_is_timed(
    clock: Callable[[Times], ModuleType], tmp_path: Path
) -> None:
    before = launch_for("packed_linear.some_rows", DEVICE, rows=16)
    out, tables = tmp_path / "sm90" / "packed_linear.toml", table()
    script = clock(lambda rows, programs: abs(programs - (2 if rows == 2 else 4)) + 1.0)
    script.tune([SOME_ROWS], tables, [SHAPE], ["trained-like"], 0.1, MEASURED, out)
    written = tuning.read(out)
    assert written["some_rows"] == [
        {"when": {"rows": {"max": 2}}, "use": {"programs": 2}}, {"use": {"programs": 4}}
    ]  # fmt: skip
    assert launch_for("packed_linear.some_rows", DEVICE, rows=16) == before


def test_kernels_that_are_not_tuned_keep_their_entries(
    clock: Callable[[Times], ModuleType], tmp_path: Path
) -> None:
    out, tables = tmp_path / "packed_linear.toml", table()
    script = clock(lambda rows, programs: 1.0)
    script.tune([SOME_ROWS], tables, [SHAPE], ["gaussian"], 0.1, MEASURED, out)
    own, written = tuning.read(tuning.source("packed_linear", torch.device("cpu")).path), tuning.read(out)
    assert written.keys() == own.keys()
    for name in own.keys() - {"some_rows"}:
        assert [entry["use"] for entry in written[name]] == [entry["use"] for entry in own[name]]
        assert all(entry["measured"]["card"].startswith("NVIDIA") for entry in written[name])


def test_a_candidate_that_cannot_be_launched_is_named_and_left_out(
    clock: Callable[[Times], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, packed: Any) -> torch.Tensor | None:
        if launch_for("packed_linear.some_rows", DEVICE, rows=16)["programs"] == 2:
            raise RuntimeError("out of resources")
        return SOME_ROWS.call(x, weight, packed)

    script = clock(lambda rows, programs: float(programs))
    out = tmp_path / "packed_linear.toml"
    script.tune([replace(SOME_ROWS, call=call)], table(), [SHAPE], ["gaussian"], 0.1, MEASURED, out)
    assert tuning.read(out)["some_rows"] == [{"use": {"programs": 3}}]
    assert "some_rows {'programs': 2}: RuntimeError, left out" in capsys.readouterr().err


def test_a_wrong_product_ends_the_run(clock: Callable[[Times], ModuleType], tmp_path: Path) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, packed: Any) -> torch.Tensor | None:
        product = SOME_ROWS.call(x, weight, packed)
        return None if product is None else product * 1.01

    script = clock(lambda rows, programs: 1.0)
    with pytest.raises(SystemExit, match="not timed"):
        script.timings(replace(SOME_ROWS, call=call), [SHAPE], ["gaussian"], 0.1)


def test_parts_run_side_by_side_and_one_that_fails_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "if sys.argv[1] == 'bad': sys.exit('no such part')\n"
        f"(pathlib.Path({str(tmp_path)!r}) / sys.argv[1]).touch()\n"
    )
    compile_first.run_side_by_side(str(script), [["a"], ["bad"], ["b"]])
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
    said = capsys.readouterr().err
    assert "bad:\nno such part" in said and "1 failed" in said


def test_every_condition_of_the_table_is_one_that_the_script_writes() -> None:
    """A kernel that gets another variable needs other cases, too."""
    for name, kernel in KERNELS.items():
        conditions = {key for entry in table()[name].entries for key in entry.get("when", {})}
        packed = torch_ops.pack(torch.zeros(128, 256, dtype=torch.bfloat16))
        cases = [tune.Case((128, 256), "gaussian", rows) for rows in kernel.rows]
        groups = {key for case in cases for key in kernel.place(case, packed)[0]}
        assert conditions <= groups | {kernel.variable}, name
