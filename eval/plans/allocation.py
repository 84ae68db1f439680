"""Which of several options each item gets, so that a sum stays within a budget and another is smallest.

An option is a pair (weight, cost): bytes and divergence of a tensor in some scheme, or the other way round.
Both add up over the items. This is the multiple-choice knapsack problem, solved by marginal analysis:

    every item begins with its lightest option, and moves along the lower convex hull of its options
    the move that saves most cost for its weight comes first, over all items
    moves that do not fit are passed over; what is left of the budget goes to the best that still fit

The moves up to the first that does not fit are the optimum of the linear relaxation but for a part of that
move. So the result is above the optimum by less than what this one move saves (Sinha and Zoltners, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from neuzip.errors import NeuzipError


class Option(NamedTuple):
    """One choice: its share of the budget, and its cost."""

    weight: float
    cost: float


@dataclass(frozen=True)
class Allocation:
    """The number of the option that each item gets, and the sums.

    `bound` is a cost below which no choice within the budget can be.
    """

    chosen: tuple[int, ...]
    weight: float
    cost: float
    bound: float


class OverBudget(NeuzipError):
    """Even the lightest options weigh more than the budget: `least` is what they weigh."""

    def __init__(self, least: float) -> None:
        super().__init__(f"no choice weighs less than {least:g}")
        self.least = least


@dataclass(frozen=True, order=True)
class _Move:
    """A step from one point of an item's hull to the next; sorted by saved cost per weight, largest first."""

    slope: float
    item: int
    source: int
    target: int


def allocate(items: Sequence[Sequence[Option]], budget: float) -> Allocation:
    """Choose an option for each item: a sum of weights of at most `budget`, at a small sum of costs.

    The same input gives the same choice. Raises OverBudget.

    >>> allocate([[Option(4, 0), Option(1, 3)], [Option(4, 0), Option(1, 2)]], budget=5).chosen
    (0, 1)
    """
    chosen = [lightest(options) for options in items]
    left = budget - _total(items, chosen).weight
    if left < 0:
        raise OverBudget(budget - left)
    saved_by_a_part = 0.0
    is_first_misfit = True
    for move in sorted(m for number, options in enumerate(items) for m in _moves(number, options)):
        if chosen[move.item] != move.source:
            continue  # a move of this item before it did not fit
        more = items[move.item][move.target].weight - items[move.item][move.source].weight
        if more <= left:
            chosen[move.item] = move.target
            left -= more
        elif is_first_misfit:
            is_first_misfit = False
            relaxed = _total(items, chosen).cost
            saved_by_a_part = -move.slope * left
    bound = _total(items, chosen).cost if is_first_misfit else relaxed - saved_by_a_part
    _use_what_is_left(items, chosen, budget)
    total = _total(items, chosen)
    return Allocation(tuple(chosen), total.weight, total.cost, min(bound, total.cost))


def lightest(options: Sequence[Option]) -> int:
    """The number of the option with the smallest weight, of equals the cheapest, of those the first."""
    return min(range(len(options)), key=lambda i: (options[i], i))


def pareto_front(points: Sequence[Option]) -> list[int]:
    """Numbers of the points to which none is smaller in one coordinate and no larger in the other.

    From the lightest on; of equal points the first.

    >>> pareto_front([Option(3, 1), Option(2, 2), Option(3, 3), Option(1, 5)])
    [3, 1, 0]
    """
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        if not front or points[i].cost < points[front[-1]].cost:
            front.append(i)
    return front


def _moves(item: int, options: Sequence[Option]) -> list[_Move]:
    """The edges of the lower convex hull of an item's options, from the lightest on."""
    hull: list[int] = []
    for i in pareto_front(options):
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) >= _slope(options, hull[-2], i):
            hull.pop()
        hull.append(i)
    return [_Move(_slope(options, a, b), item, a, b) for a, b in pairwise(hull)]


def _slope(options: Sequence[Option], a: int, b: int) -> float:
    return (options[b].cost - options[a].cost) / (options[b].weight - options[a].weight)


def _use_what_is_left(items: Sequence[Sequence[Option]], chosen: list[int], budget: float) -> None:
    """Change single choices for cheaper ones that still fit, the one that saves most first."""
    while True:
        left = budget - _total(items, chosen).weight
        best = (0.0, 0, 0)
        for number, options in enumerate(items):
            now = options[chosen[number]]
            for i, option in enumerate(options):
                if option.weight - now.weight <= left and option.cost - now.cost < best[0]:
                    best = (option.cost - now.cost, number, i)
        if not best[0]:
            return
        chosen[best[1]] = best[2]


def _total(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Option:
    taken = [options[i] for options, i in zip(items, chosen, strict=True)]
    return Option(math.fsum(o.weight for o in taken), math.fsum(o.cost for o in taken))
