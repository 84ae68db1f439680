"""Running text and tables of README.md and docs/: their commands exist, their words are those of the field.

tests/system/test_docs.py looks at the blocks of code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from words import private_words

from neuzip.cli.commands import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def named_in(text: str) -> list[tuple[str, set[str]]]:
    """The verb and the options of each command of neuzip that stands in `code` in a line."""
    commands = re.findall(r"`neuzip ([a-z][\w-]*)([^`]*)`", FENCED.sub("", text))
    return [(verb, set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))) for verb, rest in commands]


def test_commands_in_running_text_are_found():
    text = (
        "Run `neuzip compress\na b --max-kld 0.01`, or `neuzip env`.\n```console\n$ neuzip no --such\n```\n"
    )
    assert named_in(text) == [("compress", {"--max-kld"}), ("env", set())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_running_text_exist(page: Path):
    for verb, options in named_in(page.read_text(encoding="utf-8")):
        assert verb in VERBS, f"{page.name}: {verb}"
        known = (ROOT / "tests" / "golden" / "help" / f"{verb}.txt").read_text(encoding="utf-8")
        unknown = options - set(re.findall(r"--[a-z][\w-]*", known))
        assert not unknown, f"{page.name}: {verb} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name in ("how-to", "explanation")],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_pages_use_the_words_of_the_field(page: Path):
    found = private_words(FENCED.sub("", page.read_text(encoding="utf-8")))
    assert found == [], f"{page.name}: {found}"
