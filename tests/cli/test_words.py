"""What the command line says has no private words: help pages, and the string constants of cli/."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from words import PRIVATE, private_words

from neuzip.cli.show.target import METHODS

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "cli").rglob("*.py"))
PAGES = sorted((ROOT / "tests" / "golden" / "help").glob("*.txt"))


def constants(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The string constants of a module that are no docstrings, with their lines."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_help_has_no_private_words(page: Path):
    assert private_words(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_have_no_private_words(source: Path):
    found = [
        (line, words)
        for line, text in constants(ast.parse(source.read_text(encoding="utf-8")))
        if (words := private_words(text))
    ]
    assert found == []


def test_private_words_are_found():
    assert private_words("It goes on with a text, in 3 bits a weight; k = 3.") == [
        "goes on with: continue, generate; resume", "bits a weight: per", "k = 3: N mantissa bits"
    ]  # fmt: skip
    assert len(PRIVATE) > 30 and private_words("`k=3` and 3 bits per weight") == []


def test_the_time_of_a_target_by_weights_is_the_measured_one():
    measured = json.loads((ROOT / "benchmarks" / "results" / "target_cost.json").read_text())
    seconds = measured["per_gb"]["target_by_weights"]
    assert f"about {seconds:.0f} CPU seconds per GB" in METHODS["weights"]
