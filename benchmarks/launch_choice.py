"""Which launch a table has for which range, from times of candidates; and the text of a table.

Nothing here needs a GPU or torch: tests/kernels/test_launch_choice.py tries it on made-up times.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Launch = Mapping[str, Any]
Conditions = Mapping[str, Any]

MOST_SLOWER = 0.02
"""A launch stands for a range if it is less than so much slower than the best one at every value of it."""


@dataclass(frozen=True)
class Timing:
    """Times of all candidates in one case, in any unit; None for a candidate that cannot be launched.

    `value` is the case's value of the variable that ranges are about. `group` holds the other conditions of
    cases that are chosen for together, as a table has them; {} for those that the others leave.
    """

    value: float
    times: tuple[float | None, ...]
    group: Conditions = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An entry of a table: parameters, and the conditions under which they are used."""

    use: Launch
    when: Conditions = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The entry as the reader of tables gives it."""
        return {"use": dict(self.use), **({"when": dict(self.when)} if self.when else {})}


def choose(candidates: Sequence[Launch], timings: Sequence[Timing], variable: str | None) -> list[Entry]:
    """Entries of a table: for each group as few ranges of the variable as possible, in ascending order.

    A range has one launch, which at no measured value of it is slower than the best one by MOST_SLOWER or
    more, in the geometric mean of the cases of that value. Of several such divisions that with the least
    time is taken. A value between two that were measured belongs to the range above it. Groups come in the
    order in which they first appear, the one without conditions last; the last entry has no conditions.
    Without a variable all values are one. Raises ValueError if no candidate could be launched in a case, or
    no entry would hold for a whole range.
    """
    entries: list[Entry] = []
    for group in _groups(timings):
        cases = [timing for timing in timings if timing.group == group]
        costs = _costs(cases, len(candidates), by_value=variable is not None)
        limit = math.log1p(MOST_SLOWER) if variable is not None else math.inf
        ranges = _ranges(list(costs.values()), limit)
        values = list(costs)
        for last, best in ranges:
            bound = {} if last == len(values) - 1 else {variable: {"max": _bound(values[last])}}
            entries.append(Entry(candidates[best], {**group, **bound}))
    entries[-1] = Entry(entries[-1].use)
    return entries


def _bound(value: float) -> float:
    """A value as a condition has it: with two decimals, rounded up so that it still holds for the value."""
    rounded = math.ceil(100 * value - 1e-9) / 100
    return int(rounded) if rounded == int(rounded) else rounded


def _groups(timings: Sequence[Timing]) -> list[Conditions]:
    groups: list[Conditions] = []
    for timing in timings:
        if timing.group not in groups:
            groups.append(timing.group)
    return sorted(groups, key=lambda group: not group)


def _costs(cases: Sequence[Timing], candidates: int, *, by_value: bool) -> dict[float, list[float]]:
    """For each value, ascending, how much slower each candidate is than the best: a mean logarithm."""
    by: dict[float, list[Timing]] = {}
    for case in sorted(cases, key=lambda case: case.value):
        by.setdefault(case.value if by_value else 0.0, []).append(case)
    costs = {}
    for value, alike in by.items():
        means = [_mean_log([case.times[i] for case in alike]) for i in range(candidates)]
        if min(means) == math.inf:
            raise ValueError(f"no candidate could be launched in all cases of the value {value:g}")
        costs[value] = [mean - min(means) for mean in means]
    return costs


def _mean_log(times: Sequence[float | None]) -> float:
    if any(time is None for time in times):
        return math.inf
    return sum(math.log(time) for time in times if time is not None) / len(times)


def _ranges(costs: Sequence[Sequence[float]], limit: float) -> list[tuple[int, int]]:
    """The fewest ranges of neighbours with a candidate below the limit at each: their last, the candidate."""
    best: list[tuple[int, float, list[tuple[int, int]]]] = [(0, 0.0, [])]
    for stop in range(1, len(costs) + 1):
        options = []
        for start in range(stop):
            ranges, cost, before = best[start]
            for candidate in range(len(costs[0])):
                column = [costs[i][candidate] for i in range(start, stop)]
                if max(column) < limit:
                    total = cost + sum(column)
                    options.append((ranges + 1, total, [*before, (stop - 1, candidate)]))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


# The text of a table


@dataclass(frozen=True)
class Measured:
    """Where and when a table was measured."""

    card: str
    commit: str
    date: datetime.date

    def as_dict(self) -> dict[str, Any]:
        """What a table has as `measured`."""
        return {"card": self.card, "commit": self.commit, "date": self.date}


@dataclass(frozen=True)
class KernelTable:
    """Entries of a kernel, as the reader of tables gives them, and a comment above them."""

    entries: Sequence[Mapping[str, Any]]
    comment: str = ""


def table_text(title: str, measured: Measured, kernels: Mapping[str, KernelTable]) -> str:
    """A whole file of launches. Entries with a `measured` of their own keep it."""
    parts = [f"# {title}\nmeasured = {toml_value(measured.as_dict())}\n"]
    for name, kernel in kernels.items():
        comment = "".join(f"# {line}\n" for line in kernel.comment.splitlines())
        for entry in kernel.entries:
            keys = [key for key in ("measured", "cards", "when", "use") if key in entry]
            lines = "".join(f"{key} = {toml_value(entry[key])}\n" for key in keys)
            parts.append(f"{comment}[[{name}]]\n{lines}")
            comment = ""
    return "\n".join(parts)


def toml_value(value: Any) -> str:
    """A number, text, date, list or mapping in TOML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float):
        text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return text if set(text) & set(".einf") else f"{text}.0"
    return str(value)
