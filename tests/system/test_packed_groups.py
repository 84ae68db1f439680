"""Speeds of products with packed weights by groups of rows: least, mean, targets, and missing cases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from packed_groups import GROUPS, LAW_NAMES, ROWS, SHAPES, group_figures, group_of
from pages.running import group_row, speed_table
from weight_laws import LAWS

Row = dict[str, Any]


def results(speedup: float = 2.0, law: str = "gaussian") -> list[Row]:
    """A whole run in which every case is as fast."""
    cases = [(shape, rows, 7) for shape in SHAPES for rows in ROWS] + [(shape, 1, 3) for shape in SHAPES]
    return [
        {"out": shape[0], "in": shape[1], "law": law, "rows": rows, "kept": kept, "speedup": speedup}
        for shape, rows, kept in cases
    ]


def case(rows: list[Row], out: int, number: int) -> Row:
    return next(r for r in rows if (r["out"], r["rows"], r["kept"]) == (out, number, 7))


def test_every_law_of_weights_has_a_name() -> None:
    assert LAW_NAMES.keys() == LAWS.keys()


def test_every_number_of_rows_has_one_group() -> None:
    assert sorted(ROWS) == list(ROWS) and len(set(ROWS)) == len(ROWS) == 13
    assert all(rows in group_of(rows).rows for rows in ROWS)


def test_a_fast_run_meets_everything() -> None:
    figures = group_figures([*results(), *results(law="trained-like")])
    assert [(one.group, one.law) for one in figures] == [(g, law) for law in LAW_NAMES for g in GROUPS]
    assert all(one.least_met and one.mean_met and one.stretched and not one.missing for one in figures)
    assert "missed" not in " ".join(cell for one in figures for cell in group_row(one))


def test_one_slow_case_misses_the_least_and_not_the_mean() -> None:
    rows = results()
    case(rows, 2560, 64)["speedup"] = 0.94
    slow = next(one for one in group_figures(rows) if 64 in one.group.rows)
    assert slow.least == 0.94 and not slow.least_met and slow.mean_met
    assert group_row(slow)[2] == "0.94, **missed** (2560 x 2560, 64 rows)"
    assert sum(not one.least_met for one in group_figures(rows)) == 1


def test_a_mean_below_its_target_is_missed() -> None:
    figures = group_figures(results(1.17))
    few = next(one for one in figures if 8 in one.group.rows)
    assert few.least_met and few.mean == pytest.approx(1.17) and not few.mean_met
    assert group_row(few)[4] == "1.17, **missed**"


def test_with_cases_that_are_missing_no_target_is_met() -> None:
    rows = results()
    rows.remove(case(rows, 4096, 128))
    part = next(one for one in group_figures(rows) if 128 in one.group.rows)
    assert part.missing == 1 and not (part.least_met or part.mean_met or part.stretched)
    assert group_row(part)[4] == "2.00, cases not measured: 1"


def test_rounded_weights_and_other_shapes_do_not_count() -> None:
    rows = results()
    next(r for r in rows if r["kept"] == 3)["speedup"] = 0.1
    rows.append({**rows[0], "out": 8192, "in": 28672, "speedup": 0.1})
    assert all(one.least == 2.0 and not one.missing for one in group_figures(rows))


def test_results_without_laws_are_refused() -> None:
    rows = results()
    del rows[5]["law"]
    with pytest.raises(ValueError, match="measure it again with benchmarks/packed_linear"):
        group_figures(rows)


def test_a_table_has_a_column_for_each_batch_and_says_what_is_slower() -> None:
    rows = results()
    case(rows, 3584, 128)["speedup"] = 0.5
    table = speed_table(rows).splitlines()
    assert table[0].startswith("| out x in | 1 | 2 |")
    assert table[0].endswith("| 4,096 | 1, 3 bits |")
    assert len(table) == 2 + len(SHAPES)
    assert sum("| **0.50** |" in line for line in table) == 1 and "\n".join(table).count("**") == 2
