"""README.md and docs/ tell the truth: their commands run, their figures and pictures are of the results.

A page is read from top to bottom. In a ```console block a line that begins with `$` is a command; what
follows it is what it must print. A line `...` stands for any lines. Commands run in a folder that has `eval`
and `LICENSE` of the clone, and from `mkdir -p try/PAGE && cd try/PAGE` on in that one. ```pycon blocks are
doctests and ```python blocks are run, each page in one session. A block whose first line names a file
(`# run.toml`) becomes that file if it is ```toml.

After the language a block may say why it is not run: `network`, `gpu` (needs one), `several` (needs several
processes or machines), `long` (takes minutes), `yours` (needs a model or text of the reader's), `engine`
(needs an engine that `make test` does not install: tests/engines runs it). Its commands must exist all the
same, with their options.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib.util
import io
import math
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from words import private_words

from neuzip.cli import run
from neuzip.cli.commands import VERBS
from neuzip.cli.main import build_app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """What a test of a page is called."""
    return page.relative_to(ROOT).with_suffix("").as_posix()


LANGUAGES = ("console", "pycon", "python", "toml", "text", "json")
REASONS = ("network", "gpu", "several", "long", "yours", "engine")
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)

_spec = importlib.util.spec_from_file_location("reading", ROOT / "benchmarks" / "reading.py")
assert _spec is not None and _spec.loader is not None
reading = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reading)

WRITTEN_WITH = (3, 11)
"""The Python whose output the pages show: the built-in text is part of its documentation."""

NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)*")
TIMED = re.compile(
    r"\b[\d,.]+ ?(?:s|ms|min|[MG]B/s|tokens/s)\b|peak (?:memory )?[\d,.]+ [MG]B|\d+\.\d+\.\d+[\w.+]*"
)
"""What differs from run to run and from machine to machine: times, speeds, peaks, versions."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, why it is not run, its lines, and the line of the page it begins on."""

    language: str
    reasons: tuple[str, ...]
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *reasons = match[1].split() or [""]
        found.append(Block(language, tuple(reasons), match[2], text.count("\n", 0, match.start()) + 1))
    return found


def commands(block: Block) -> list[tuple[str, str]]:
    """Pairs of a command and what it prints; a command may go on after a backslash."""
    pairs: list[tuple[str, str]] = []
    open_ended = False
    for line in block.text.splitlines():
        if open_ended:
            pairs[-1] = (pairs[-1][0].removesuffix("\\") + line.removeprefix(">").strip(), "")
        elif line.startswith("$ "):
            pairs.append((line[2:], ""))
        else:
            assert pairs, f"line {block.line}: a console block begins with a command"
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + line + "\n")
        open_ended = (open_ended or line.startswith("$ ")) and line.endswith("\\")
    return pairs


# Running


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the root of a clone looks to the pages."""
    for name in ("eval", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NEUZIP_DEBUG", "NEUZIP_NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def said_by(command: str) -> tuple[int, str]:
    """Exit code and output of a command: `neuzip` in this process, all else by a shell, but for `cd`."""
    if moved := re.fullmatch(r"mkdir -p (\S+) && cd \1", command):
        Path(moved[1]).mkdir(parents=True)
        os.chdir(moved[1])  # `here` goes back
        return 0, ""
    command, _, file = command.partition(" > ")
    words = shlex.split(command)
    if words[0] == "neuzip":
        both = io.StringIO()
        with contextlib.redirect_stdout(both), contextlib.redirect_stderr(both):
            exit_code, said = run(words[1:]), both.getvalue()
    else:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        exit_code, said = done.returncode, done.stdout + done.stderr
    if file:
        Path(file).write_text(said, encoding="utf-8")
    return exit_code, "" if file else said


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("here", "one_thread")
def test_what_a_page_shows_is_what_happens(page: Path):
    session: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.reasons:
            continue
        if block.language == "console":
            for command, shown in commands(block):
                exit_code, said = said_by(command)
                no = command.startswith("neuzip diff ") or "error: " in shown
                assert exit_code == int(no), f"{where}: {command}\n{said}"
                # On a GPU models compute in other formats, and commands say that they ran there.
                assert torch.cuda.is_available() or agrees(shown, said), (
                    f"{where}: {command}\nshown:\n{shown}\nsaid:\n{said}"
                )
        elif block.language == "python":
            exec(compile(block.text, where, "exec"), session)  # a page's own code
        elif block.language == "pycon":
            check_session(block, where, session)
        elif block.language == "toml" and block.text.startswith("# ") and ".toml" in block.text.split()[1]:
            Path(block.text.split()[1]).write_text(block.text, encoding="utf-8")


@pytest.mark.usefixtures("here", "one_thread")
def test_the_first_command_after_the_demo_works_as_it_stands():
    command = "neuzip compress eval/demo/checkpoint my-model.nz"
    for name in ("README.md", "Makefile"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert command in text and "/activate" in text
    assert said_by(command)[0] == 0
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/my-model.*/", "/try/", "/.venv/", "/neuzip-demo/"} <= set(ignored)


def check_session(block: Block, where: str, session: dict[str, Any]) -> None:
    """Run a session of the interpreter and compare what it prints."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(block.text, session, where, where, block.line)
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=options)
    runner.run(test, out=said.write, clear_globs=False)
    session.update(test.globs)
    assert runner.failures == 0, said.getvalue()


# Comparing


def agrees(shown: str, said: str) -> bool:
    """Whether the lines shown are those said, `...` standing for any lines. No lines agree with all."""
    if not shown.strip():
        return True
    found = squeezed(said)
    groups: list[list[str]] = [[]]
    for line in squeezed(shown):
        if line == "...":
            groups.append([])
        else:
            groups[-1].append(line)
    first, *others = groups
    if not others:
        return same_lines(first, found)
    at = len(first)
    if not same_lines(first, found[:at]):
        return False
    for lines in others[:-1]:
        places = range(at, len(found) - len(lines) + 1)
        start = next((i for i in places if same_lines(lines, found[i : i + len(lines)])), None)
        if start is None:
            return False
        at = start + len(lines)
    end = len(found) - len(others[-1])
    return at <= end and same_lines(others[-1], found[end:])


def same_lines(shown: list[str], said: list[str]) -> bool:
    """Whether lines agree one by one."""
    return len(shown) == len(said) and all(map(same_line, shown, said))


def squeezed(text: str) -> list[str]:
    """Lines that are not empty, each with single spaces and short rules."""
    lines = (re.sub(r"─+", "─", " ".join(line.split())) for line in text.splitlines())
    return [line for line in lines if line]


def same_line(shown: str, said: str) -> bool:
    """Whether two lines have the same words, and figures within 1 %, but for times, peaks and versions.

    Another Python has another built-in text: figures are then left alone.
    """
    shown, said = TIMED.sub("#", shown), TIMED.sub("#", said)
    if NUMBER.sub("0", shown) != NUMBER.sub("0", said):
        return False
    if sys.version_info[:2] != WRITTEN_WITH:
        return True
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(said), strict=True)
    return all(math.isclose(figure(a), figure(b), rel_tol=0.01, abs_tol=1e-4) for a, b in pairs)


def figure(text: str) -> float:
    """A number as people write it."""
    return float(text.replace(",", ""))


def test_agreement_is_of_words_and_figures():
    assert agrees("size 1.00 MB\n", "size   1.005 MB\n")
    assert not agrees("size 1.00 MB\n", "size 1.02 MB\n")
    assert not agrees("size 1.00 MB\n", "length 1.00 MB\n")
    assert not agrees("one\ntwo\n", "one\nthree\ntwo\n")
    assert agrees("one\n...\ntwo\n", "one\nthree\ntwo\n")
    assert not agrees("one\n...\ntwo\n", "one\nthree\n")
    assert agrees("made in 1.2 s (3 MB/s)\n", "made in 99 s (0.1 MB/s)\n")
    assert not agrees("56 tensors in 1.2 s\n", "57 tensors in 1.2 s\n")


# What a page may say


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_exists(page: Path):
    for block in blocks(page):
        assert block.language in LANGUAGES, (
            f"{page.name}, line {block.line}: {block.language or 'no language'}"
        )
        assert set(block.reasons) <= set(REASONS), f"{page.name}, line {block.line}: {block.reasons}"
        if block.language != "console":
            continue
        for command, _ in commands(block):
            words = shlex.split(command)
            if "neuzip" not in words or starts_an_engine(words):
                continue
            verb, *arguments = words[words.index("neuzip") + 1 :]
            if verb == "--help":
                continue
            assert verb in VERBS, f"{page.name}, line {block.line}: {verb}"
            known = options_of(verb)
            used = {a.split("=")[0] for a in arguments if a.startswith("--")}
            assert used <= known, f"{page.name}, line {block.line}: {verb} has no {', '.join(used - known)}"


DESTINATIONS = ("dst", "output", "picture", "plot", "page", "keep_state")
"""Parameters of commands that name what is written."""


def starts_an_engine(words: list[str]) -> bool:
    """Whether a command serves a model, so that `neuzip` may be a value: --quantization neuzip."""
    return words[0] == "vllm" or words[:3] == ["python", "-m", "sglang.launch_server"]


@functools.cache
def parsers() -> dict[str, Any]:
    """Commands to parse with, made once. Those that run are others, as they have other names for --help."""
    return typer.main.get_command(build_app()).commands  # type: ignore[attr-defined,no-any-return]


def written_by(command: str) -> list[str]:
    """The files and folders that a command of neuzip, or a copy, writes; engines write none."""
    command, _, file = command.partition(" > ")
    words = shlex.split(command, comments=True)
    found = [file] if file else []
    if words[0] == "cp":
        found.append(words[-1])
    if "neuzip" in words and not starts_an_engine(words) and "--dry-run" not in words:
        verb, *arguments = words[words.index("neuzip") + 1 :]
        if verb in VERBS:
            given = parsers()[verb].make_context(verb, arguments, resilient_parsing=True)
            for name in DESTINATIONS:
                # A default, such as demo's, is a parameter too.
                if given.params.get(name) is not None and str(given.params[name]) in command:
                    found.append(str(given.params[name]))
    return found


def test_what_a_command_writes_is_seen():
    assert written_by("neuzip compress a b --plan p.toml") == ["b"]
    assert written_by("neuzip layers a --drop 3 --output b --plot c.svg") == ["b", "c.svg"]
    assert written_by("neuzip eval a --text t --report r.html --json > e.json") == ["e.json", "r.html"]
    assert written_by("torchrun --no-python neuzip compress a shared.nz") == ["shared.nz"]
    assert written_by("cp -r a b") == ["b"]
    assert written_by("neuzip compress a b --dry-run") == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_two_commands_of_a_page_write_the_same(page: Path):
    """Nobody who tries them in order is told that a destination exists; a refused command writes none."""
    found: dict[str, int] = {}
    for block in blocks(page):
        for command, shown in commands(block) if block.language == "console" else ():
            if moved := re.match(r"mkdir -p (\S+)", command):
                assert moved[1] == f"try/{page.stem}", f"{page.name}, line {block.line}: {moved[1]}"
            for name in () if "error: " in shown else written_by(command):
                assert name not in found, f"{page.name}: lines {found[name]} and {block.line} write {name}"
                found[name] = block.line


def options_of(verb: str) -> set[str]:
    """The options in a command's golden help page."""
    text = (ROOT / "tests" / "golden" / "help" / f"{verb}.txt").read_text(encoding="utf-8")
    return set(re.findall(r"--[a-z][\w-]*", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        to = page.parent / target if target else page
        assert to.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(to), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The names that headings have on the web."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents]
    assert [name for name in names if f"]({name})" not in index] == ["README.md"]


def test_nothing_is_said_twice():
    """A sentence, or a row of a table, of more than 60 characters has one home; other pages link to it."""
    homes = defaultdict(set)
    for page in (ROOT / "README.md", *PAGES):
        for line in said_on(page.read_text(encoding="utf-8")):
            if len(line) > 60:
                homes[line].add(page.relative_to(ROOT).as_posix())
    assert {line: sorted(pages) for line, pages in homes.items() if len(pages) > 1} == {}


def said_on(text: str) -> list[str]:
    """The sentences of a page and the rows of its tables, but for what is generated and for code."""
    written = FENCE.sub("", reading.GENERATED.sub("", text))
    rows = [re.sub(r"\]\([^)]*\)", "]", line) for line in written.splitlines() if line.startswith("|")]
    return [*reading.sentences(text), *rows]


def test_a_sentence_is_found_however_it_is_broken_into_lines():
    first = "# A\n\nThis sentence is long enough to be seen as one that stands on two pages. Next.\n"
    second = "* This sentence is long enough\n  to be seen as one that stands on two pages.\n"
    assert set(said_on(first)) & set(said_on(second)) == {
        "This sentence is long enough to be seen as one that stands on two pages."
    }
    page = "| a [b](c.md) |\n```text\n| d |\n```\n<!-- figures: x -->\n| e |\n<!-- end of figures -->\n"
    assert said_on(page) == ["| a [b] |"]


def test_no_page_has_words_of_our_own():
    """Help and docstrings are looked at too, in the reference. The specification has words of its own."""
    found = {
        page.relative_to(ROOT).as_posix(): words
        for page in (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *PAGES)
        if (words := private_words(FENCE.sub("", page.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize("script", ["figures", "pictures"])
def test_figures_and_pictures_are_those_of_the_results(script: str):
    check = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, f"run python benchmarks/{script}.py: {check.stdout}{check.stderr}"
