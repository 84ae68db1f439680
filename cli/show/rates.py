"""What a checkpoint would take and lose at some numbers of bits per weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.text import bytes_text, percent_text

if TYPE_CHECKING:
    from neuzip.eval.measures.histograms import Inspection

COLUMNS = ["bits per weight", "size", "ratio", "step", "error of weights"]

NOTES = (
    "Predicted for matrices on a uniform grid, entropy-coded; all else is lossless.",
    "Step: relative to sigma, the root mean square of a tensor's weights.",
    "Error: relative, in the L2 norm, of the quantised matrices.",
    "Step and error follow from the weights alone, and the model's predictions do",
    "not. `neuzip sweep` measures the KL divergence at many sizes on a text, and",
    "`neuzip compress --max-kld` makes the smallest file within a divergence.",
)


def show_rates(out: Output, inspection: Inspection) -> None:
    """Show a table of rates, the lossless one first; nothing if there are none."""
    if not inspection.rates:
        return
    before, lossless = inspection.before_bytes, inspection.after_bytes
    bits = 8 * lossless / inspection.elements
    rows = [[f"{bits:.2f}", bytes_text(lossless), percent_text(lossless, before), "lossless", "none"]]
    for rate in inspection.rates:
        rows.append([
            f"{rate.bits_per_weight:.2f}", bytes_text(rate.nbytes), percent_text(rate.nbytes, before),
            "out of reach" if rate.step is None else f"{rate.step:.3f}",
            "-" if rate.relative_l2 is None else percent_text(rate.relative_l2, 1),
        ])  # fmt: skip
    out.text()
    out.table(COLUMNS, rows, right=COLUMNS)
    for note in NOTES:
        out.text(note)
