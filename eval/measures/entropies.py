"""Shannon's entropy of what was counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Histogram = npt.NDArray[np.int64]


def entropy(histogram: Histogram) -> float:
    """Shannon entropy of a histogram in bits a symbol; 0 for an empty one.

    >>> entropy(np.array([2, 1, 1])), entropy(np.array([7, 0]))
    (1.5, 0.0)
    """
    present = histogram[histogram > 0]
    shares = present / present.sum()
    return 0.0 - float((shares * np.log2(shares)).sum())
