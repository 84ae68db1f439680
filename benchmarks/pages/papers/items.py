"""A table or figure of a paper, what neuzip measured of it, and the status that follows from both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pages.layout import Document, load, machines_of

STATUSES = {
    "reproduced in small": "All rows and columns were measured, on smaller models or other data. Every "
    "conclusion that "
    "we test holds.",
    "in part, trend agrees": "Some rows or columns were measured. Every conclusion that we test holds.",
    "in part": "Some rows or columns were measured. They test no conclusion of the paper.",
    "trend differs": "All rows and columns were measured, and a conclusion of the paper does not hold here.",
    "in part, trend differs": "Some rows or columns were measured, and a conclusion of the paper does not "
    "hold here.",
    "not run": "neuzip has no result. The row says what would be needed.",
    "cannot run here": "Weights, data or hardware of the paper are not available to us.",
    "nothing to measure": "A drawing, a definition or a list of settings.",
}
"""What each status means; `PaperItem.status` chooses, and nobody types one in."""


@dataclass(frozen=True)
class Claim:
    """A conclusion of a paper, and whether our results say the same."""

    text: str
    holds: bool


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of a paper.

    name      as the paper numbers it
    shows     what it shows, in a few words
    paper     what the paper reports: facts in our words, or a table with ours
    ours      what we measured, Markdown made of results; empty without a result
    results   names of the files in benchmarks/results that `ours` and `claims` were made of
    claims    conclusions of the paper, tested on these results
    missing   rows, columns or models of the paper that our results lack; empty if none are
    note      what differs and why, or what a run would need
    obstacle  what is not available to us; with a result it says why a part is missing
    drawn     whether there is nothing to measure
    on        the models or values that were measured, with the size of small ones
    sections  those of the first result that were used; empty for all
    """

    name: str
    shows: str
    paper: str
    ours: str = ""
    results: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    missing: str = ""
    note: str = ""
    obstacle: str = ""
    drawn: bool = False
    on: str = ""
    sections: Sequence[str] = ()

    def __post_init__(self) -> None:
        """A result needs a text and a file, and so does a claim. Raises ValueError."""
        if bool(self.ours) != bool(self.results) or (self.claims and not self.results):
            raise ValueError(f"{self.name}: a measured row has `ours` and `results`, any other has neither")
        if bool(self.on) != bool(self.results):
            raise ValueError(f"{self.name}: a measured row, and no other, says in `on` what was measured")
        if self.drawn and self.results:
            raise ValueError(f"{self.name}: there is nothing to measure, and there are results")

    @property
    def status(self) -> str:
        """A key of STATUSES: no better than results, claims and what is missing allow."""
        if self.drawn:
            return "nothing to measure"
        if not self.results:
            return "cannot run here" if self.obstacle else "not run"
        part = "in part, " if self.missing else ""
        if not all(claim.holds for claim in self.claims):
            return f"{part}trend differs"
        if not self.claims:
            return "in part"
        return f"{part}trend agrees" if self.missing else "reproduced in small"


@dataclass(frozen=True)
class PaperSection:
    """One paper on the page: its name, its number on arXiv, and its tables and figures in order."""

    name: str
    arxiv: str
    items: Sequence[PaperItem]


SMALL = "--size small --placements pre,mix --seeds 0 --steps 120 --batch 2 --held-tokens 16384"
"""Options of the smallest models of mix_ln.py."""

COMMANDS = {
    "attention": "python benchmarks/attention.py",
    "attention_accuracy-synthetic": "python benchmarks/attention_accuracy.py synthetic",
    "attention_accuracy-wikilm-26m": "python benchmarks/attention_accuracy.py wikilm-26m wikilm-26m "
    "wiki.test.raw --windows 16",
    "gpu_codec": "python benchmarks/gpu_codec.py",
    "layers-wikilm-26m": "python benchmarks/layers.py wikilm-26m wikilm-26m wiki.test.raw --max-tokens 8192",
    "linear_cross_entropy": "python benchmarks/linear_cross_entropy.py --trained wikilm-26m=FILE "
    "smollm2-135m=FILE",
    "mix_ln": "python benchmarks/mix_ln.py RUNS",
    "mix_ln-once": "python benchmarks/mix_ln.py ONCE --steps 480",
    "mix_ln-small": f"python benchmarks/mix_ln.py SMALL {SMALL}",
    "mix_ln-small-scaled": f"python benchmarks/mix_ln.py SCALED {SMALL} --embed-scale 50",
    "recovery": "python benchmarks/recovery.py b158 a48 --minutes 5 --minutes-a48 2",
    "train_memory": "python benchmarks/train_memory.py",
}
"""Commands of results that were measured before results recorded theirs."""


def source(name: str, *sections: str) -> str:
    """Where a result lies, the command that measured it, the machine and the commit."""
    document = load(name)
    parts = [document["sections"][section] for section in sections] if sections else list(
        document.get("sections", {"": document}).values()
    )  # fmt: skip
    recorded = {part["environment"].get("command") for part in parts} - {None}
    commands = sorted(recorded) if recorded else [COMMANDS[name]]
    where = "; ".join(dict.fromkeys(place for part in parts for place in map(shortened, machines_of(part))))
    return f"[{name}.json](benchmarks/results/{name}.json), `{'`, `'.join(commands)}`, {where}"


def shortened(machine: str) -> str:
    """A machine and a commit without versions, which the result file has."""
    first, _, rest = machine.partition(",")
    commits = rest.rpartition(", commit ")[2]
    return f"{first.strip()}, commit{'s' if ', ' in commits else ''} {commits}"


def at(document: Document, **wanted: object) -> Document:
    """The only row of a result that has these values."""
    (row,) = (r for r in document["results"] if all(r.get(key) == value for key, value in wanted.items()))
    found: Document = row
    return found


def falling(values: Sequence[float]) -> bool:
    """Whether each value is below the one before."""
    return all(after < before for before, after in itertools.pairwise(values))
