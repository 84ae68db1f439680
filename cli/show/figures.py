"""Measured figures as text, with their standard errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuzip.eval.measures.estimates import Estimate
    from neuzip.eval.measures.perplexity import ModelDifference


def estimate_text(estimate: Estimate | None) -> str:
    """A figure with its standard error, both to the same digit.

    >>> from neuzip.eval.measures.estimates import Estimate
    >>> [estimate_text(Estimate(value, error)) for value, error in ((984471.78, 428334.34), (9999.0, 1.0))]
    ['984,472 ± 428,334', '9,999.00 ± 1.00']
    """
    if estimate is None:
        return "-"
    error = estimate.standard_error
    if estimate.value >= 1e6:
        return f"{estimate.value:.3g}" + ("" if error is None else f" ± {error:.2g}")
    digits = 0 if estimate.value >= 1e4 else 2 if estimate.value >= 10 else 4
    return f"{estimate.value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def rough_speed_text(speed: float) -> str:
    """A speed that was measured once, to the two digits that a repetition may confirm.

    >>> [rough_speed_text(speed) for speed in (1393.6, 87.31, 0.42)]
    ['about 1,400', 'about 87', 'about 0.42']
    """
    return f"about {float(f'{speed:.2g}'):,.{0 if speed >= 10 else 2}f}"


def signed_text(estimate: Estimate) -> str:
    """A difference with its standard error, to five digits."""
    error = estimate.standard_error
    return f"{estimate.value:+.5f}" + ("" if error is None else f" ± {error:.5f}")


def precise_text(estimate: Estimate) -> str:
    """A figure to two digits of its standard error."""
    error = estimate.standard_error
    if not error or not math.isfinite(error):
        return f"{estimate.value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{estimate.value:.{digits}f} ± {error:.{digits}f}"


def share_text(estimate: Estimate) -> str:
    """A share with its standard error, in percent."""
    error = estimate.standard_error
    return f"{100 * estimate.value:.3f} %" + ("" if error is None else f" ± {100 * error:.3f} %")


def difference_text(difference: ModelDifference) -> str:
    """How far two models are apart under a convention, in nats a token."""
    return "0, to the last bit" if difference.identical else signed_text(difference.nll)


def change_text(ratio: Estimate) -> str:
    """A ratio of two perplexities with its standard error, as a change in percent."""
    error = ratio.standard_error
    return f"{100 * (ratio.value - 1):+.3f} %" + ("" if error is None else f" ± {100 * error:.3f} %")
