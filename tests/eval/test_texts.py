"""Texts: files, directories, datasets; and where the articles of WikiText begin."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neuzip.errors import NeuzipError
from neuzip.eval.measures import texts
from neuzip.eval.measures.texts import Document, Text, of_content, of_rows, read_text

WIKI = (
    " \n = Du Fu = \n \n Du Fu wrote . \n = = Life = = \n \n He lived @-@ on . \n = Manila = \n A city . \n"
)
ARTICLES = [
    " ",
    " = Du Fu = \n \n Du Fu wrote . \n = = Life = = \n \n He lived @-@ on . ",
    " = Manila = \n A city . \n",
]


def test_a_file_is_one_document(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("zwei Bären\r\n".encode())
    text = read_text(str(path))
    assert text == Text(str(path), (Document(str(path), "zwei Bären\r\n"),))
    assert text.content == "zwei Bären\r\n"


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfB\xc3\xa4r")
    assert read_text(str(tmp_path / "a.txt")).content == "Bär"
    (tmp_path / "wiki.raw").write_bytes(WIKI.encode("utf-8-sig"))
    assert read_text(str(tmp_path / "wiki.raw")).wikitext
    assert [d.content for d in read_text(str(tmp_path)).documents] == ["Bär", WIKI]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfB\xe4r")
    with pytest.raises(NeuzipError, match=r"is not UTF-8: byte 0xe4 at position 4"):
        read_text(str(tmp_path / "a.txt"))


def test_the_demo_has_several():
    text = read_text("demo")
    assert text.name.startswith("demo (Python 3.")
    assert len(text.documents) > 2
    assert text.content == "\n\n".join(d.content for d in text.documents)
    assert len(text.content) > 10_000


def test_articles_of_wikitext():
    text = of_content("wiki", WIKI)
    assert text.wikitext
    assert [d.content for d in text.documents] == ARTICLES
    assert [d.name for d in text.documents] == ["", "Du Fu", "Manila"]
    assert text.content == WIKI
    for start, document in zip(text.starts(), text.documents, strict=True):
        assert WIKI[start:].startswith(document.content)


@pytest.mark.parametrize(
    "content", ["= Du Fu =\nOne .", " = = Life = = \n One .", "x\n = Du Fu = \n", "", "\n\n"]
)
def test_other_files_are_not_cut(content):
    text = of_content("other", content)
    assert (len(text.documents), text.content, text.wikitext) == (1, content, False)


def test_the_test_set_has_the_articles_that_lm_eval_finds(neuzip_data: Path):
    path = neuzip_data / "wikitext-2" / "wiki.test.raw"
    text = read_text(str(path))
    assert sum(1 for d in text.documents if d.content.strip()) == 62
    assert text.content.encode() == path.read_bytes()


def test_a_directory_is_its_files_by_name(tmp_path: Path):
    for name in ("b.txt", "a/z.md", ".hidden/x.txt", "a/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"in {name}")
    text = read_text(str(tmp_path))
    assert [d.name for d in text.documents] == ["a/z.md", "b.txt"]
    assert text.content == "in a/z.md\n\nin b.txt"


def test_texts_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("Bären".encode("latin-1"))
    with pytest.raises(NeuzipError, match=r"a.txt: is not UTF-8: byte 0xe4 at position 1"):
        read_text(str(tmp_path / "a.txt"))
    with pytest.raises(NeuzipError, match=r"a.txt: is not UTF-8"):
        read_text(str(tmp_path))
    with pytest.raises(NeuzipError, match=r"nowhere.txt: cannot be read: No such file"):
        read_text(str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NeuzipError, match=r"empty: holds no files"):
        read_text(str(tmp_path / "empty"))
    for name in ("a", "b"):
        (tmp_path / "empty" / name).write_text("\n")
    with pytest.raises(NeuzipError, match=r"empty: holds no text, only empty files"):
        read_text(str(tmp_path / "empty"))


# Datasets


class Rows(dict[str, list[str]]):
    """What load_dataset gives, as far as it is used."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


@pytest.fixture
def hub(monkeypatch) -> list[tuple[Any, ...]]:
    """A package `datasets` that knows one dataset; what it was asked for."""
    asked: list[tuple[Any, ...]] = []

    def load(path: str, config: str | None, split: str) -> Rows:
        asked.append((path, config, split))
        if path != "org/data":
            raise FileNotFoundError(f"there is no {path}\nat all")
        return Rows(label=["0", "1"], text=["one text", "another"], summary=["1", "2"])

    module = SimpleNamespace(
        load_dataset=load, get_dataset_split_names=lambda path, config: ["train", "validation"]
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(texts, "find_spec", lambda name: object())
    return asked


@pytest.mark.parametrize(
    ("source", "asked", "content"),
    [
        ("hf://datasets/org/data", ("org/data", None, "validation"), "one text\n\nanother"),
        ("org/data", ("org/data", None, "validation"), "one text\n\nanother"),
        ("hf://datasets/org/data/en?split=train", ("org/data", "en", "train"), "one text\n\nanother"),
        ("org/data?split=test[:2]&column=summary", ("org/data", None, "test[:2]"), "1\n\n2"),
    ],
)
def test_a_dataset(source, asked, content, hub):
    text = read_text(source)
    assert hub == [asked]
    assert text.content == content
    assert text.name.startswith("hf://datasets/org/data") and f"split={asked[2]}&column=" in text.name
    assert len(text.documents) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://datasets/org", "does not name a dataset"),
        ("hf://datasets/a/b/c/d", "does not name a dataset"),
        ("hf://datasets/org/data?spilt=test", "does not name a dataset"),
        ("hf://datasets/org/other?split=test", "datasets cannot load it: there is no org/other$"),
        ("org/data?column=body", "has the columns label, text, summary"),
    ],
)
def test_datasets_that_cannot_be_had(source, message, hub):
    with pytest.raises(NeuzipError, match=message):
        read_text(source)


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    with pytest.raises(NeuzipError, match="need the package datasets") as caught:
        read_text("hf://datasets/org/data")
    assert caught.value.hint == "pip install datasets"


def test_a_file_goes_before_a_dataset(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/data").write_text("mine")
    assert read_text("org/data").content == "mine"


def test_rows_of_wikitext_are_its_lines():
    """As the dataset on the Hub has them: no row where a blank line was."""
    raw = WIKI.rstrip("\n")
    rows = [line + "\n" if line.strip() else "" for line in raw.split("\n")]
    text = of_rows("wiki", rows)
    assert text.wikitext
    assert text.content == "\n\n".join(rows)
    assert [d.name for d in text.documents] == ["", "Du Fu", "Manila"]
    assert [d.page for d in text.documents] == [d.content for d in of_content("wiki", raw).documents]


def test_a_dataset_of_nothing():
    with pytest.raises(NeuzipError, match="holds no text"):
        of_rows("empty", ["", " "])
