"""Rules of structure: no circles, files and functions of one idea, names and docstrings that stand alone."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Contents:
    """What the rules look at in a file: texts and names with their lines, and the names that it imports."""

    docstrings: list[tuple[int, str]] = field(default_factory=list)
    variables: list[tuple[int, str]] = field(default_factory=list)
    classes: list[tuple[int, str]] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)


@functools.cache
def contents(file: Path) -> Contents:
    """A file's contents, which are read once for all rules.

    Docstrings are those of modules, classes and functions, and the strings below constants and fields.
    Imports are of modules, and of names from modules: `neuzip.train.loop`.
    """
    found = Contents()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found.docstrings.append((node.lineno, node.value.value))
        elif isinstance(node, ast.arg):
            found.variables.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                found.variables.append((node.lineno, node.id))
        elif isinstance(node, ast.ClassDef):
            found.classes.append((node.lineno, node.name))
        elif isinstance(node, ast.Import):
            found.imports.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ("neuzip", *file.relative_to(ROOT).parts)[: -node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            found.imports.extend([module, *(f"{module}.{alias.name}" for alias in node.names)])
    return found


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


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
        f"{place(file, line)}: {text[:60]}"
        for file in files(room)
        for line, text in contents(file).docstrings
        if STARTS.match(text)
    ]
    assert not leaning, "\n".join(leaning)


@pytest.mark.parametrize("room", ROOMS)
def test_variables_are_nouns(room: str) -> None:
    nameless = [
        f"{place(file, line)}: {name}"
        for file in files(room)
        for line, name in contents(file).variables
        if name in PARTICIPLES
    ]
    assert not nameless, "\n".join(nameless)


@pytest.mark.slow
def test_a_class_has_a_name_of_its_own() -> None:
    where = defaultdict(list)
    for room in ROOMS:
        for file in files(room):
            for line, name in contents(file).classes:
                if not name.startswith("_"):
                    where[name].append(place(file, line))
    twice = [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]
    assert not twice, "\n".join(twice)


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
    imported = {name for path in tests for name in contents(path).imports}
    words = set(re.findall(r'"([a-z-]+)"', "".join(path.read_text(encoding="utf-8") for path in tests)))
    uses, tested = {}, set()
    for room in (*ROOMS, "neuzip"):
        for file in files(room):
            parts = file.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts if room == "neuzip" else ("neuzip", *parts))
            uses[module] = set(contents(file).imports)
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
