"""A search along one dimension: the largest budget whose outcome is within a limit, by few costly trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from neuzip.eval.measures.estimates import Estimate

ATTEMPTS = 8
"""Choices that are tried at most."""

CLOSE, AIM = 0.95, 0.98
"""Shares of a limit: a value above CLOSE that holds ends the search, and the next attempt aims at AIM."""

LEAP = 16.0
"""Largest factor by which a budget is changed at once."""

CAUTIOUS = 2.0
"""Largest factor by which a budget grows if the value is within its standard error of 0."""

EXPONENTS = 0.5, 2.0
"""Least and largest exponent with which a value is taken to grow with the budget."""

APART = 1.2
"""Factor between two budgets below which the difference of their values is noise."""

NARROW = 0.01
"""Relative difference of two budgets at which the search ends."""

TINY = 1e-9
"""Share of the limit below which a budget is not tried."""

AMPLE = 1e3
"""Multiple of the weight of a choice above which a larger budget cannot change it."""


class Choice(Protocol):
    """What a budget buys: an allocation, or a step.

    `chosen` tells choices apart. `weight` is the part of the budget that it uses up, and `cost` is what the
    search makes small, such as bytes.
    """

    @property
    def chosen(self) -> tuple[float, ...]: ...

    @property
    def weight(self) -> float: ...

    @property
    def cost(self) -> float: ...


Product = TypeVar("Product")
ChoiceT = TypeVar("ChoiceT", bound=Choice)


@dataclass(frozen=True)
class SearchAttempt(Generic[ChoiceT, Product]):
    """A choice, its measured value in the unit of the limit, and what the trial produced."""

    choice: ChoiceT
    estimate: Estimate
    product: Product

    @property
    def value(self) -> float:
        """The estimate with its standard error added, which has to be within the limit."""
        return upper(self.estimate)


def upper(estimate: Estimate) -> float:
    """An estimate with its standard error added, if it has one."""
    return estimate.value + (estimate.standard_error or 0.0)


def search_budget(
    choose: Callable[[float], ChoiceT],
    trial: Callable[[ChoiceT], tuple[Estimate, Product]],
    limit: float,
    floor: float = 0.0,
    *,
    most: int = ATTEMPTS,
    narrow: float = NARROW,
) -> list[SearchAttempt[ChoiceT, Product]]:
    """Try choices until one whose value is at most `limit` comes close to it. The last attempt holds.

    choose  the best choice within a budget
    trial   the value of a choice, and what the trial produced. The value grows with the budget, in about its
            unit, and is `floor` for a budget of 0; that choice is the last if no other holds
    most    attempts after which no other is made if one of them holds
    narrow  relative difference of two budgets at which the search ends

    A value holds if it is within the limit with its standard error added.
    """
    known: dict[tuple[float, ...], SearchAttempt[ChoiceT, Product]] = {}
    holding: SearchAttempt[ChoiceT, Product] | None = None
    span = limit - floor
    budget, low, high = span, 0.0, math.inf
    before: tuple[float, float] | None = None
    while span > 0 and (high - low) > narrow * low and budget > TINY * span:
        choice = choose(budget)
        attempt = known.get(choice.chosen)
        if attempt is None:
            if len(known) >= (ATTEMPTS if holding is None else most):
                break
            attempt = known[choice.chosen] = SearchAttempt(choice, *trial(choice))
        if attempt.value <= limit:
            low = budget
            if holding is None or choice.cost < holding.choice.cost:
                holding = attempt
            if attempt.value - floor >= CLOSE * span or budget > choice.weight * AMPLE:
                break
        else:
            high = budget
        above = replace(attempt.estimate, value=attempt.estimate.value - floor)
        exponent = _exponent(before, (budget, upper(above)))
        before = budget, upper(above)
        budget = _next_budget(budget, above, span, low, high, exponent)
    attempts = list(known.values())
    if holding is None:
        lossless = choose(0.0)
        holding = SearchAttempt(lossless, *trial(lossless))
    else:
        attempts.remove(holding)
    return [*attempts, holding]


def _exponent(one: tuple[float, float] | None, other: tuple[float, float]) -> float:
    """The exponent with which values grow from one (budget, value) to another; 1 if that is not known.

    >>> _exponent((1.0, 3.0), (2.0, 9.0)), _exponent(None, (2.0, 9.0))
    (1.5849625007211563, 1.0)
    """
    if one is None or not (0 < one[1] < math.inf and 0 < other[1] < math.inf):
        return 1.0
    if max(one[0], other[0]) < APART * min(one[0], other[0]):
        return 1.0
    least, most = EXPONENTS
    return min(max(math.log(one[1] / other[1]) / math.log(one[0] / other[0]), least), most)


def _next_budget(
    budget: float, estimate: Estimate, limit: float, low: float, high: float, exponent: float
) -> float:
    """The next budget: corrected by limit / value, or between `low`, which held, and `high`, which did not.

    A value below its standard error counts as that error, as differences of losses may be negative. A value
    within twice its error of 0 says little about the budget. Values grow with budget^exponent.
    """
    error = estimate.standard_error or 0.0
    value = max(upper(estimate), error)
    step = LEAP if value <= 0 else 1 / LEAP
    if 0 < value < math.inf:
        step = (AIM * limit / value) ** (1 / exponent)
    most = CAUTIOUS if estimate.value < 2 * error else LEAP
    aimed = budget * min(max(step, 1 / LEAP), most)
    if low < aimed < high:
        return aimed
    if math.isinf(high):
        return low * CAUTIOUS
    return math.sqrt(low * high) if low > 0 else high / LEAP
