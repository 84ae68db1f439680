"""The block of docs/papers.md: an overview of all papers, then each table and figure."""

from __future__ import annotations

from collections import Counter

from pages.layout import anchor, render
from pages.papers.bitnet import bitnet
from pages.papers.cut_cross_entropy import cut_cross_entropy
from pages.papers.items import STATUSES, PaperSection, source
from pages.papers.mix_ln import mix_ln
from pages.papers.neuzip import neuzip
from pages.papers.sage_attention import sage_attention


def sections() -> list[PaperSection]:
    """The five papers, in the order of README.md."""
    return [neuzip(), bitnet(), sage_attention(), cut_cross_entropy(), mix_ln()]


def papers() -> str:
    """All of the page that is made of results."""
    found = sections()
    counts = [(section, Counter(item.status for item in section.items)) for section in found]
    return render("papers.page", found, counts, STATUSES, source, anchor)
