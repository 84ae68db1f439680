"""How the figures of a report are written."""

from __future__ import annotations

import math

from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.report.rows import SPEED, ReportRow

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def figure_text(figure: Estimate | None) -> str:
    """A figure to two digits of its standard error, to four digits without one.

    >>> [figure_text(Estimate(*f)) for f in ((105.4071, 0.9432), (2.13e-5, 4e-7), (26.381, 3e-4))]
    ['105.41 ± 0.94', '(2.130 ± 0.040) × 10⁻⁵', '26.38100 ± 0.00030']
    """
    if figure is None:
        return "–"
    value, error = figure.value, figure.standard_error
    if not math.isfinite(value):
        return str(value)
    known = error is not None and math.isfinite(error)
    if value == 0 and not (known and error):
        return "0"
    power = math.floor(math.log10(max(abs(value), error if error is not None and known else 0.0)))
    scale = power if power < -3 or power > 6 else 0
    digits = max(0, 3 - power + scale)
    shown = f"{value / 10.0**scale:,.{digits}f}"
    if error is not None and known:
        error /= 10.0**scale
        digits = min(max(0, 1 - math.floor(math.log10(error))), 9) if error else digits
        shown = f"{value / 10.0**scale:,.{digits}f} ± {error:,.{digits}f}" if error else f"{shown} ± 0"
    if not scale:
        return shown
    return f"({shown}) × {power_text(scale)}" if known else f"{shown} × {power_text(scale)}"


def power_text(power: int) -> str:
    """A power of ten.

    >>> power_text(-12)
    '10⁻¹²'
    """
    return "10" + str(power).translate(_RAISED)


def number_text(value: float | None) -> str:
    """A number without an error, to three digits.

    >>> [number_text(x) for x in (None, 0.0, 0.0316, 999.7, 3.2e-7, math.inf)]
    ['–', '0', '0.0316', '1,000', '3.20 × 10⁻⁷', 'inf']
    """
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    power = math.floor(math.log10(abs(value)))
    return f"{value / 10.0**power:.2f} × {power_text(power)}"


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units.

    >>> [bytes_text(n) for n in (0, 999, 26_214_400, 3.2e12)]
    ['0 B', '999 B', '26.2 MB', '3.20 TB']
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def row_text(row: ReportRow, figure: Estimate | None) -> str:
    """A figure as its row tells it, with its unit."""
    if figure is None or row.unit == "":
        return figure_text(figure)
    if row.unit == "bytes":
        return bytes_text(figure.value)
    if row.unit == "count":
        return f"{figure.value:,.0f}"
    if row.unit == SPEED:
        return f"about {float(f'{figure.value:.2g}'):,g} {row.unit}"
    return f"{figure_text(figure)} {row.unit}"


def change_text(row: ReportRow) -> str:
    """The change of a figure in percent; empty if that has no meaning.

    >>> change_text(ReportRow("ppl", Estimate(101.0, 0.7), Estimate(100.0, 0.7)))
    '+1.000 %'
    """
    if row.before is None or row.after is None or not row.before.value or row.unit in ("nats", SPEED):
        return ""
    if row.before.value == row.after.value:
        return "the same"
    if row.change is not None:
        return percent_text(row.change)
    change = 100 * (row.after.value / row.before.value - 1)
    return f"{change:+.3f} %" if abs(change) < 10 else f"{change:+.1f} %"


def percent_text(change: Estimate) -> str:
    """A change in percent, to two digits of its standard error.

    >>> [percent_text(Estimate(*f)) for f in ((0.39012, 0.14823), (3.4781, None), (12.3, 8.0))]
    ['+0.39 ± 0.15 %', '+3.478 %', '+12.3 ± 8.0 %']
    """
    error = change.standard_error
    if not error or not math.isfinite(error):
        return f"{change.value:+.3f} %"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{change.value:+,.{digits}f} ± {error:,.{digits}f} %"


def share_text(part: float, whole: float) -> str:
    """A share in percent.

    >>> share_text(2, 3), share_text(0, 0)
    ('66.67 %', '–')
    """
    return f"{100 * part / whole:.2f} %" if whole else "–"
