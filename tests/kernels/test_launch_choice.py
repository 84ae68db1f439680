"""Which launches a table gets, from made-up times; and that the text of a table is read as it was written."""

from __future__ import annotations

import datetime
import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuzip.kernels import tuning

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from launch_choice import (  # noqa: E402
    MOST_SLOWER,
    Entry,
    KernelTable,
    Measured,
    Timing,
    choose,
    table_text,
    toml_value,
)

A, B, C = {"warps": 1}, {"warps": 2}, {"warps": 4}
MEASURED = Measured("a card", "0123abc", datetime.date(2026, 1, 2))


def chosen(entries: list[Entry]) -> list[tuple[dict[str, object], int]]:
    return [(dict(entry.when), entry.use["warps"]) for entry in entries]


def test_ranges_have_their_fastest_launch() -> None:
    timings = [Timing(1, (1, 2, 3)), Timing(2, (1, 2, 3)), Timing(4, (3, 2, 1)), Timing(8, (3, 2, 1))]
    assert chosen(choose([A, B, C], timings, "rows")) == [({"rows": {"max": 2}}, 1), ({}, 4)]


def test_the_order_of_cases_does_not_matter() -> None:
    timings = [Timing(1, (1, 2, 3)), Timing(2, (2, 1, 3)), Timing(4, (3, 2, 1)), Timing(2, (2.1, 1, 3))]
    tables = {str(choose([A, B, C], order, "rows")) for order in itertools.permutations(timings)}
    assert len(tables) == 1


def test_a_range_needs_a_gain_of_two_percent() -> None:
    def entries(gain: float) -> int:
        return len(choose([A, B], [Timing(1, (1, 1 + gain)), Timing(2, (1 + gain, 1))], "rows"))

    assert entries(0.019) == 1 and entries(0.021) == 2


def test_of_equally_few_ranges_those_of_least_time_are_taken() -> None:
    timings = [Timing(1, (1, 1.5)), Timing(2, (1.01, 1)), Timing(3, (1.5, 1))]
    assert chosen(choose([A, B], timings, "rows")) == [({"rows": {"max": 1}}, 1), ({}, 2)]


def test_cases_of_one_value_are_chosen_for_together() -> None:
    timings = [Timing(64, (1, 2)), Timing(64, (4, 1)), Timing(64, (1, 1))]
    assert chosen(choose([A, B], timings, "rows")) == [({}, 2)]


def test_what_cannot_be_launched_is_not_chosen() -> None:
    timings = [Timing(1, (None, 5, 9)), Timing(2, (1, 5, None)), Timing(2, (None, 5, 1))]
    assert chosen(choose([A, B, C], timings, "rows")) == [({}, 2)]
    with pytest.raises(ValueError, match="no candidate could be launched in all cases of the value 2"):
        choose([A], [Timing(1, (1,)), Timing(2, (None,))], "rows")


def test_groups_have_ranges_of_their_own_and_the_one_without_conditions_is_last() -> None:
    few = {"planes": {"max": 7}}
    timings = [
        Timing(1, (1, 2)), Timing(2, (2, 1)), Timing(1, (2, 1), few), Timing(3, (2, 1), few),
        Timing(9, (1, 2), few),
    ]  # fmt: skip
    assert chosen(choose([A, B], timings, "tiles")) == [
        ({**few, "tiles": {"max": 3}}, 2), (few, 1), ({"tiles": {"max": 1}}, 1), ({}, 2)
    ]  # fmt: skip


def test_the_last_entry_has_no_conditions_whatever_was_measured() -> None:
    assert chosen(choose([A, B], [Timing(1, (2, 1), {"planes": {"max": 7}})], "tiles")) == [({}, 2)]


def test_without_a_variable_there_is_one_entry() -> None:
    assert chosen(choose([A, B], [Timing(0, (1, 1.5)), Timing(0, (2, 1.9))], None)) == [({}, 1)]


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.tuples(*[st.floats(1, 3)] * 3)), min_size=1, max_size=12
    )
)  # fmt: skip
def test_no_measured_value_is_slower_than_promised(cases: list[tuple[int, tuple[float, ...]]]) -> None:
    """The launch that the reader of tables takes, for every value, is as good as `choose` says."""
    entries = [entry.as_dict() for entry in choose([A, B, C], [Timing(*case) for case in cases], "rows")]
    for value in {value for value, _ in cases}:
        use = next(entry["use"] for entry in entries if tuning.holds(entry, {"rows": value}, ""))
        means = [
            math.fsum(math.log(times[i]) for other, times in cases if other == value) for i in range(3)
        ]  # fmt: skip
        number = sum(other == value for other, _ in cases)
        excess = (means[[A, B, C].index(use)] - min(means)) / number
        assert excess < math.log1p(MOST_SLOWER) + 1e-12


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = choose([A, B], [Timing(1.5, (1, 2)), Timing(2, (2, 1))], "tiles")
    other = {"measured": {**MEASURED.as_dict(), "card": "another"}, "cards": ["H20"], "use": {"a": 1.6e-6}}
    kernels = {
        "one_row": KernelTable([entry.as_dict() for entry in entries], "Of one row.\nTwo lines."),
        "time": KernelTable([other, {"use": {"flag": True, "a": 3.0, "dtype": "x"}}]),
    }
    path = tmp_path / "op.toml"
    path.write_text(table_text("An operator.", MEASURED, kernels), encoding="utf-8")
    assert tuning.read(path) == {name: [*kernel.entries] for name, kernel in kernels.items()}
    assert path.read_text(encoding="utf-8").splitlines()[:10] == [
        "# An operator.",
        'measured = { card = "a card", commit = "0123abc", date = 2026-01-02 }',
        "",
        "# Of one row.",
        "# Two lines.",
        "[[one_row]]",
        "when = { tiles = { max = 1.5 } }",
        "use = { warps = 1 }",
        "",
        "[[one_row]]",
    ]


def test_tables_of_the_package_are_written_as_they_are_read(tmp_path: Path) -> None:
    for path in tuning.FOLDER.glob("sm*/*.toml"):
        kernels = {name: KernelTable(entries) for name, entries in tuning.read(path).items()}
        copy = tmp_path / path.name
        copy.write_text(table_text(path.stem, MEASURED, kernels), encoding="utf-8")
        assert tuning.read(copy) == tuning.read(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"), (3, "3"), (3.0, "3.0"), (1.6e-6, "1.6e-06"), (0.1 + 0.2, "0.30000000000000004"),
        ('a "b"', '"a \\"b\\""'), ([1, 2], "[1, 2]"), ({"a": {"max": 2.5}}, "{ a = { max = 2.5 } }"),
    ],
)  # fmt: skip
def test_values_in_toml(value: object, text: str) -> None:
    assert toml_value(value) == text
