"""Figures with their standard errors, from what was measured of each token.

Tokens are not independent: those of a document have it in common, those of a window their context. So they
are added up in blocks, and it is blocks that are taken for independent: documents, or windows where there are
few documents or some are much longer than others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""A number for each token, [tokens]."""


FEWEST = 3
"""Blocks, by `effective`, that give a standard error."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, None for fewer than FEWEST blocks."""

    value: float
    standard_error: float | None

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        error = self.standard_error
        return Estimate(self.value * factor, None if error is None else error * factor)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The block of each token: `of` is [tokens], numbers from 0 to `count` - 1.

    Windows of several `documents` end where a document does.
    """

    kind: Literal["document", "window"]
    of: npt.NDArray[np.int64]
    count: int
    documents: int | None = None

    @property
    def text(self) -> str:
        """Words for the blocks that standard errors are over."""
        text = f"{self.count:,} {self.kind}{'' if self.count == 1 else 's'}"
        return text if self.documents is None else f"{text} of {self.documents:,} documents"

    def mean(self, values: Values) -> Estimate:
        """The mean over all tokens, and its standard error over blocks."""
        return self.per(values, np.bincount(self.of, minlength=self.count))

    def count_of(self, units: Values) -> Values:
        """The units of each block, int64 [count], from the units of each token."""
        return np.rint(np.bincount(self.of, units, self.count)).astype(np.int64)

    def per(self, values: Values, units: Values) -> Estimate:
        """The sum over all tokens per unit, of which blocks have `units` [count]; its standard error."""
        sums = np.bincount(self.of, values.astype(np.float64), self.count)
        return mean(sums.tolist(), units.tolist())


def effective(counts: Sequence[int]) -> float:
    """The number of equal blocks whose mean is as certain as that of blocks of these numbers of tokens.

    >>> effective([10, 10, 10]), effective([30, 10])
    (3.0, 1.6)
    """
    return sum(counts) ** 2 / sum(count * count for count in counts)


def mean(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """The mean over all tokens of blocks with these sums, and its standard error over blocks.

    Blocks may have different numbers of tokens: it is the standard error of a ratio of two sums.

    >>> mean([3.0, 6.0, 9.0], [3, 3, 3])
    Estimate(value=2.0, standard_error=0.5773502691896257)
    """
    tokens, n = sum(counts), len(sums)
    value = math.fsum(sums) / tokens
    if effective(counts) < FEWEST:
        return Estimate(value, None)
    squares = math.fsum((s - value * t) ** 2 for s, t in zip(sums, counts, strict=True))
    return Estimate(value, math.sqrt(n / (n - 1) * squares) / tokens)


def over(blocks: str, error: float | None) -> str:
    """Words for the blocks of a standard error, or for the reason why there is none.

    >>> over("45 windows of 5 documents", 0.1), over("2 windows", None)
    ('± over 45 windows of 5 documents', 'no ±: 2 windows count as fewer than 3 equal ones')
    """
    if error is not None:
        return f"± over {blocks}"
    return f"no ±: {blocks} count{'s' if blocks.startswith('1 ') else ''} as fewer than {FEWEST} equal ones"


def without_meaning(estimate: Estimate) -> bool:
    """Whether the standard error is more than half of what was measured, so that it tells nothing.

    >>> without_meaning(Estimate(717_693.0, 925_156.0)), without_meaning(Estimate(27.8, 1.65))
    (True, False)
    """
    error = estimate.standard_error
    return error is not None and not error <= abs(estimate.value) / 2


def errors_text(blocks: str, error: float | None) -> str:
    """`over`, in full.

    >>> errors_text("45 windows of 5 documents", 0.1)
    '± standard error over 45 windows of 5 documents, cut where a document ends'
    """
    cut = ", cut where a document ends" if error is not None and " of " in blocks else ""
    return over(blocks, error).replace("±", "± standard error", 1) + cut


def exponential(nll: Estimate) -> Estimate:
    """exp of `nll`; its standard error by the delta method."""
    try:
        value = math.exp(nll.value)
    except OverflowError:  # a bad model, or a text of very few and very long words
        value = math.inf
    return Estimate(value, None if nll.standard_error is None else value * nll.standard_error)
