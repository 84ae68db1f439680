"""Writes the figures of README.md and docs/ from benchmarks/results: none is copied by hand.

    python benchmarks/figures.py            # rewrite what stands between the marks of each page
    python benchmarks/figures.py --check    # exit 1 if a page differs, and name it

A page has `<!-- figures: NAME -->` and `<!-- end of figures -->` around the block NAME of `all_blocks`.
README.md has the figures that matter most, docs/measurements.md all tables, other pages a few numbers each.
What missed its target says so everywhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pages import kernels, quoted
from pages.layout import ROOT
from pages.measurements import measurements
from pages.papers.page import papers
from pages.summary import short

MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> int:
    """Render all pages, then write or compare."""
    blocks = all_blocks()
    differ = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if (new := rendered(page, text, blocks)) != text:
            differ[page] = new
    if "--check" in sys.argv:
        print(*(page.relative_to(ROOT) for page in differ), sep="\n", end="")
        return int(bool(differ))
    for page, new in differ.items():
        page.write_text(new, encoding="utf-8")
    return 0


def all_blocks() -> dict[str, Callable[[], str]]:
    """What each name of a mark stands for."""
    summary = {name: lambda text=text: text for name, text in short().items()}
    return {**summary, "measurements": measurements, "papers": papers, **quoted.BLOCKS, **kernels.BLOCKS}


def rendered(page: Path, text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """The text of a page with its figures filled in."""
    return MARKED.sub(lambda mark: f"{mark[1]}{linked_from(page, blocks[mark[2]]())}\n{mark[3]}", text)


def linked_from(page: Path, block: str) -> str:
    """A block whose links, which are written as from the root, lead from a page."""
    return re.sub(
        r"\]\(((?:benchmarks|docs)/[^)#]*)",
        lambda link: f"]({os.path.relpath(ROOT / link[1], page.parent)}",
        block,
    )


if __name__ == "__main__":
    sys.exit(main())
