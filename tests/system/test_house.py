"""Rules of structure: no circles, files and functions of one idea, names and docstrings that stand alone."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from house import ROOMS, circles, functions_of, sources  # noqa: E402

from neuzip.distribution import ENGINES  # noqa: E402

FILE_LINES = 520
FUNCTION_LINES = 80
KERNEL_LINES = 170
"""Most lines of a function without its docstring: a Triton kernel is one function, and may be longer."""

PARTICIPLES = {"asked", "found", "given", "kept", "made", "noted", "said", "told"}
"""Words that say nothing of the value they name: a variable is a noun."""

STARTS = re.compile(r"(The same|Of|See|As)\b")
"""Starts of docstrings that lean on another docstring."""


def files(room: str) -> list[Path]:
    return sources(ROOT, room)


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def docstrings(file: Path) -> Iterator[tuple[ast.AST, str]]:
    """Docstrings of modules, classes and functions, and the strings below constants and fields."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement, statement.value.value


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(ROOT) == []


@pytest.mark.parametrize("room", ROOMS)
def test_files_have_one_idea(room: str) -> None:
    long = {
        str(f.relative_to(ROOT)): n
        for f in files(room)
        if (n := len(f.read_text(encoding="utf-8").splitlines())) > FILE_LINES
    }
    assert not long, "\n".join(f"{name}: {lines} lines" for name, lines in long.items())


@pytest.mark.parametrize("room", ROOMS)
def test_functions_have_one_idea(room: str) -> None:
    long = {}
    for file in files(room):
        parts = file.relative_to(ROOT).parts
        limit = KERNEL_LINES if {"triton", "gluon"} & {*parts} else FUNCTION_LINES
        long |= {f"{file.relative_to(ROOT)}:{name}": n for name, n in functions_of(file) if n > limit}
    assert not long, "\n".join(f"{name}: {lines} lines" for name, lines in long.items())


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_stand_alone(room: str) -> None:
    leaning = [
        f"{place(f, n)}: {text[:60]}" for f in files(room) for n, text in docstrings(f) if STARTS.match(text)
    ]
    assert not leaning, "\n".join(leaning)


@pytest.mark.parametrize("room", ROOMS)
def test_variables_are_nouns(room: str) -> None:
    nameless = []
    for file in files(room):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
            if name in PARTICIPLES and (isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)):  # type: ignore[attr-defined]
                nameless.append(f"{place(file, node)}: {name}")
    assert not nameless, "\n".join(nameless)


@pytest.mark.slow
def test_a_class_has_a_name_of_its_own() -> None:
    where = defaultdict(list)
    for room in ROOMS:
        for file in files(room):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where[node.name].append(place(file, node))
    twice = [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]
    assert not twice, "\n".join(twice)


def names_of(file: Path) -> Iterator[str]:
    """Modules that a file imports, and names that it imports from modules: `neuzip.train.loop`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ("neuzip", *file.relative_to(ROOT).parts)[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


TESTED_BY = {
    "neuzip.arguments": "neuzip/test_api.py",
    "neuzip.cli.show.components": "cli/test_compress.py",
    "neuzip.cli.show.stream": "compress/test_hub_job.py",
    "neuzip.runtime.hf.lazy_config": "runtime/test_quantizer.py",
    "neuzip.runtime.hf.transformers_4": "runtime/test_quantizer.py",
}
"""Modules that are further from what tests import, with the tests that run them."""


@pytest.mark.slow
def test_every_module_has_its_tests() -> None:
    """A test file has its name or its folder's, or imports it, or has to do so with one that uses it.

    A command has tests that run it: `neuzip("verify", ...)`. An engine's folder, whose modules only the
    engine imports, has tests that start the engine: tests/engines/test_vllm_tokens.py is one of runtime/vllm.
    """
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    named = {path.stem.removeprefix("test_") for path in tests}
    started = {path.stem.split("_")[1] for path in tests if path.parent.name == "engines"}
    imported = {name for path in tests for name in names_of(path)}
    words = set(re.findall(r'"([a-z-]+)"', "".join(path.read_text(encoding="utf-8") for path in tests)))
    uses, tested = {}, set()
    for room in (*ROOMS, "neuzip"):
        for file in files(room):
            parts = file.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts if room == "neuzip" else ("neuzip", *parts))
            uses[module] = set(names_of(file))
            command = parts[:2] == ("cli", "commands") and file.stem.replace("_", "-") in words
            plugin = parts[0] == "runtime" and parts[1] in started & ENGINES.keys()
            if file.stem.startswith("__") or command or plugin or module in imported or named & {*parts[1:]}:
                tested.add(module)
    through = {name for module in tested for name in uses[module]}
    assert not (alone := sorted(uses.keys() - tested - through - TESTED_BY.keys())), alone
    assert not (gone := [test for test in TESTED_BY.values() if not (ROOT / "tests" / test).is_file()]), gone


def test_test_files_have_at_most_1000_lines() -> None:
    tests = (ROOT / "tests").rglob("test_*.py")
    long = [path.name for path in tests if len(path.read_text(encoding="utf-8").splitlines()) > 1000]
    assert not long, long
