"""How many sentences of README and docs a reader had to read twice: before they were rewritten, and after.

python benchmarks/reading.py             # a table, page by page, from results/reading.json
python benchmarks/reading.py --check     # exit 1 if the share after is 5 % or more, or a page is missing
python benchmarks/reading.py --sentences PAGE    # the sentences of a page, numbered, for a reader to mark

Code blocks, headings, cells of tables and generated marks are no sentences. A reader knows the field and not
this project. `before` has counts alone. So has `rewritten`: the new pages as their writers left them, whose
marks were mended. `after` is the reading by two others, who had seen none of it. It has the number of the
sentences of every page, and the marked ones, word by word, so that anyone can check the judgement:

    "after": {"commit": "...", "readers": 2, "pages": {"README.md": {"sentences": 90, "marked": ["..."]}}}

A page that was added and read later has a `commit` and a `reader` of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "reading.json"
LIMIT = 0.05
"""The share of marked sentences that a group of pages stays under."""

HELP = "neuzip --help"
"""Stands for the descriptions of options on all help pages."""

LEAST_WORDS = 3
"""A shorter piece of text is no sentence."""

GENERATED = re.compile(r"<!-- (?:figures|reference): .*?<!-- end of (?:figures|reference) -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[A-Z`*\[\"(]|neuzip\b|transformers\b)")


def main() -> int:
    """Print sentences, or the table; with --check say what is wrong."""
    if "--sentences" in sys.argv:
        page = Path(sys.argv[sys.argv.index("--sentences") + 1])
        for number, sentence in enumerate(sentences(page.read_text(encoding="utf-8")), 1):
            print(f"{number}. {sentence}")
        return 0
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        found = list(problems(document, ROOT))
        print(*found, sep="\n", end="\n" if found else "")
        return int(bool(found))
    print("\n".join(lines(document)))
    return 0


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown page in order, each on one line and without the targets of its links."""
    for unread in (GENERATED, FENCED, COMMENT):
        text = unread.sub("\n", text)
    found = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"\]\([^)]*\)", "]", paragraph)
        found += [part.strip() for part in END.split(plain) if len(part.split()) >= LEAST_WORDS]
    return found


def paragraphs(text: str) -> Iterator[str]:
    """Running text: paragraphs and items of lists, without headings, tables, pictures and indented code."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        begins = ITEM.match(line)
        if begins or not line.strip() or line.startswith(("#", "|", "    ", "!", "[!", "---")):
            if lines:
                yield " ".join(lines)
            lines = [line[begins.end() :].strip()] if begins else []
        else:
            lines.append(line.strip())


def group_of(page: str) -> str:
    """README and docs are told apart, and other pages apart from both."""
    if page in ("README.md", HELP):
        return page.removesuffix(".md")
    return "docs" if page.startswith("docs/") or page == "formats/SPEC.md" else "other pages"


def pages(root: Path) -> list[str]:
    """The pages that are read, from the root of the repository."""
    found = [path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md"))]
    return ["README.md", *found, "formats/SPEC.md", "CONTRIBUTING.md", "CHANGELOG.md"]


def problems(document: dict[str, Any], root: Path) -> Iterator[str]:
    """What is wrong with the reading after the rewriting: nothing before there was one."""
    if document["after"] is None:
        return
    read = document["after"]["pages"]
    gone = [page for page in read if page != HELP and not (root / page).exists()]
    yield from (f"{page}: was read, and does not exist" for page in gone)
    yield from (f"{page}: was not read" for page in pages(root) if page not in read)
    for group, (number, marked) in totals(after_counts(document)).items():
        if marked >= LIMIT * number:
            yield f"{group}: {marked} of {number} sentences had to be read twice, {marked / number:.1%}"


def after_counts(document: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Sentences and marked ones of each page when it was read after the rewriting."""
    after = document["after"] or {"pages": {}}
    return {page: (found["sentences"], len(found["marked"])) for page, found in after["pages"].items()}


def earlier_counts(document: dict[str, Any], name: str) -> dict[str, tuple[int, int]]:
    """Sentences and marked ones of each page in an earlier reading, "before" or "rewritten"."""
    read = document.get(name, {"pages": {}})["pages"]
    return {page: (found["sentences"], found["marked"]) for page, found in read.items()}


def totals(counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Sums over the pages of each group."""
    found: dict[str, tuple[int, int]] = {}
    for page, (number, marked) in counts.items():
        before = found.get(group_of(page), (0, 0))
        found[group_of(page)] = (before[0] + number, before[1] + marked)
    return found


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The table: pages of each reading, and the sums of each group."""
    earlier = {name: earlier_counts(document, name) for name in ("before", "rewritten")}
    for name, counts in (earlier | {"after": after_counts(document)}).items():
        if not counts:
            yield f"{name}: not read yet"
            continue
        reading = document[name]
        yield f"{name}: commit {reading['commit']}, readers: {reading['readers']}"
        yield f"{'page':36} sentences  marked  share"
        for page, (number, marked) in {**counts, **totals(counts)}.items():
            yield f"{page:36} {number:9,} {marked:7,} {marked / number:6.1%}"
        yield ""


if __name__ == "__main__":
    sys.exit(main())
