"""benchmarks/reference.py: docs/reference has every command, name, key and variable, and no other."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import neuzip
from neuzip.cli.commands import VERBS
from neuzip.train.configuration import TrainingConfiguration


@pytest.fixture(scope="module")
def reference(root: Path) -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("reference", root / "benchmarks" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(root: Path, name: str) -> str:
    return (root / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_are_up_to_date(reference: ModuleType) -> None:
    differing = [path.name for path in reference.differing()]
    assert differing == [], "run python benchmarks/reference.py"


def test_a_page_that_differs_is_found(
    reference: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(root, "config")
    (tmp_path / "config.md").write_text(text.replace("peak learning rate", "learning rate"))
    (tmp_path / "glossary.md").write_text(page(root, "glossary"))
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    assert reference.differing() == {tmp_path / "config.md": text}


def test_every_command_has_a_section_and_no_other(root: Path) -> None:
    assert sorted(re.findall(r"^### ([\w-]+)$", page(root, "commands"), re.MULTILINE)) == sorted(VERBS)


def test_every_public_name_has_a_section(root: Path) -> None:
    functions, results = page(root, "python").split("\n## Results\n")
    sections = re.findall(r"^### (\w+)$", functions, re.MULTILINE)
    assert sorted(sections) == sorted(set(neuzip.__all__) - {"__version__"})
    returned = re.findall(r"-> (\w+(?:Report|Result|tion|Difference))$", functions, re.MULTILINE)
    assert returned and set(re.findall(r"^### (\w+)$", results, re.MULTILINE)) >= set(returned)


def test_every_key_of_train_is_there_with_its_default(root: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| [^|]*\|$", page(root, "config"), re.MULTILINE)
    told = dict(rows)
    for field in dataclasses.fields(TrainingConfiguration):
        default = "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        assert told[field.name] == ("none" if field.default is None else default), field.name


def test_every_word_has_a_thing(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that the code has no more, or has anew, stops the script, and so does a key of train."""
    monkeypatch.setitem(reference.OWN, "NEUZIP_COLOUR", "never")
    with pytest.raises(SystemExit, match=r"words too many for \{'NEUZIP_COLOUR'\}"):
        reference.BLOCKS["own-variables"]()
    monkeypatch.delitem(reference.OWN, "NEUZIP_COLOUR")
    monkeypatch.delitem(reference.TRAIN_KEYS, "lr")
    with pytest.raises(SystemExit, match=r"no words for \{'lr'\}"):
        reference.train_keys()


def test_variables_are_found_however_the_code_reads_them(reference: ModuleType, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "import os\n"
        "NAMES = ('A', 'B')\n"
        "LATER: str = 'C'\n"
        "for name in NAMES:\n    os.environ.get(name.lower())\n"
        "os.environ[LATER] = '1'\n"
        "os.environ.setdefault('D', '')\n"
        "here = 'E' in os.environ and {'F', 'G'} <= os.environ.keys()\n"
        "found = {n: os.environ.get(n) for n in ['H']}\n"
        "os.getenv('I', '')\n"
        "{'x': 1}.get('not one')\n"
    )
    assert sorted(reference.variables(code)) == list("ABCDEFGHI")
    code.write_text("import os\nos.environ.get(input())\n")
    with pytest.raises(SystemExit, match=r"line 2: which variable is input\(\)\?"):
        list(reference.variables(code))


def test_signatures_are_written_as_code(reference: ModuleType) -> None:
    def plain(src: str, *, device: str | int = "auto", steps: int = 3) -> None: ...

    assert (
        reference.signature("plain", plain)
        == "plain(src: str, *, device: str | int = 'auto', steps: int = 3) -> None"
    )

    def long(first_of_all: str, second_of_all: str, third_of_all: float = 0.01, *others: int) -> bool: ...

    assert reference.signature("long", long).splitlines() == [
        "long(",
        "    first_of_all: str,",
        "    second_of_all: str,",
        "    third_of_all: float = 0.01,",
        "    *others: int,",
        ") -> bool",
    ]
