"""Texts to predict: a file, the files of a directory, a dataset of the Hub, or the demo's.

A text is a list of documents and what stands between them where they are read as one. WikiText's raw files
and rows are cut into its articles, as the task `wikitext` of lm-evaluation-harness has them.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from neuzip.errors import NeuzipError
from neuzip.eval.demo import split_topics

HUB = "hf://datasets/"
SPLITS = ("test", "validation", "train")
"""Parts of a dataset: if none is named, the first of these that exists is taken."""

COLUMNS = ("text", "page", "content")
"""Columns of a dataset: if none is named, the first of these that exists is taken."""

HEADING = re.compile(r" = [^=].*[^=] = \s*")
"""The first line of an article of WikiText."""


@dataclass(frozen=True)
class Document:
    """A part of a text that has to do with itself only.

    `page` is what lm-evaluation-harness has of an article of WikiText, if that is not `content`.
    """

    name: str
    content: str
    page: str | None = None


@dataclass(frozen=True)
class Text:
    """A text to predict, with its name in a report. `joint` stands between documents.

    `wikitext` says that it is of WikiText, whose words and punctuation are set apart by spaces.
    """

    name: str
    documents: tuple[Document, ...]
    joint: str = "\n\n"
    wikitext: bool = False

    @property
    def content(self) -> str:
        """All documents as one string."""
        return self.joint.join(document.content for document in self.documents)

    def starts(self) -> list[int]:
        """The start of each document in `content`, in characters."""
        starts, at = [], 0
        for document in self.documents:
            starts.append(at)
            at += len(document.content) + len(self.joint)
        return starts


def read_text(source: str) -> Text:
    """The text that `source` names: a UTF-8 file, a directory of them, a dataset of the Hub, or `demo`.

    A dataset is hf://datasets/OWNER/NAME[/CONFIG][?split=S&column=C], or OWNER/NAME where no such file is.
    Raises NeuzipError.
    """
    if source == "demo":
        documents = [Document(f"topics {i}", topic) for i, topic in enumerate(split_topics()[1])]
        return Text(f"demo (Python {platform.python_version()})", tuple(documents))
    path = Path(source)
    if path.is_dir():
        return _directory(path)
    if source.startswith(HUB) or (_looks_like_a_dataset(source) and not path.exists()):
        return _dataset(source)
    return of_content(source, _read(path))


def of_content(name: str, content: str) -> Text:
    """A text of one document, or of its articles if it is a raw file of WikiText."""
    lines = content.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if HEADING.fullmatch(first) is None:
        return Text(name, (Document(name, content),))
    pages = ["\n".join(page) for page in _pages(lines)]
    return Text(name, tuple(Document(_title(page), page) for page in pages), "\n", wikitext=True)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")  # some editors put a BOM in front
    except OSError as error:
        raise NeuzipError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NeuzipError(
            f"{path}: is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}",
            "convert it first, for example with iconv",
        ) from error


def _directory(folder: Path) -> Text:
    """The files of a folder and of its folders, by name, without hidden ones."""
    names = sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        for name in [path.relative_to(folder).as_posix()]
    )
    if not names:
        raise NeuzipError(f"{folder}: holds no files", "give a directory of UTF-8 texts")
    documents = tuple(Document(name, _read(folder / name)) for name in names)
    if not any(document.content.strip() for document in documents):
        raise NeuzipError(f"{folder}: holds no text, only empty files", "give a directory of UTF-8 texts")
    return Text(str(folder), documents)


# WikiText


def _pages(lines: Sequence[str]) -> Iterator[list[str]]:
    """Lines by article, as the dataset behind lm-evaluation-harness' task cuts them; blank ones may precede.

    A line of the form `= title =` begins one, even where it is a formula.
    """
    page: list[str] = []
    for line in lines:
        shape = line.replace("= = =", "===").replace("= =", "==").strip()
        if shape.startswith("= ") and shape.endswith(" =") and page:
            yield page
            page = []
        page.append(line)
    yield page


def _title(page: str) -> str:
    return page.partition("\n")[0].strip().strip("=").strip()


# Datasets of the Hub


@dataclass(frozen=True)
class _Address:
    """The address of a part of a dataset."""

    path: str
    config: str | None
    split: str | None
    column: str | None


def _looks_like_a_dataset(source: str) -> bool:
    return re.fullmatch(r"[\w-]+/[\w.-]+(\?.*)?", source) is not None and not source.endswith(
        (".txt", ".raw", ".md")
    )


def _address(source: str) -> _Address:
    parts = urlsplit(source.removeprefix(HUB))
    options = parse_qs(parts.query)
    names = parts.path.strip("/").split("/")
    unknown = options.keys() - {"split", "column"}
    if len(names) not in (2, 3) or not all(names) or unknown or any(len(v) != 1 for v in options.values()):
        raise NeuzipError(
            f"{source}: does not name a dataset", f"write {HUB}OWNER/NAME[/CONFIG][?split=test&column=text]"
        )
    config = names[2] if len(names) == 3 else None
    split, column = (options.get(name, [None])[0] for name in ("split", "column"))
    return _Address("/".join(names[:2]), config, split, column)


def _dataset(source: str) -> Text:
    address = _address(source)
    if find_spec("datasets") is None:
        hint = "pip install datasets"
        if not source.startswith(HUB):
            hint += "; or, if a file was meant, look at the path: there is none of that name"
        raise NeuzipError(f"{source}: datasets of the Hub need the package datasets", hint)
    datasets = import_module("datasets")

    def attempt(what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise NeuzipError(f"{source}: datasets cannot {what}: {reason}") from error

    split = address.split
    if split is None:
        known = attempt(
            "list its splits", lambda: datasets.get_dataset_split_names(address.path, address.config)
        )
        split = next((name for name in SPLITS if name in known), None)
        if split is None:
            raise NeuzipError(f"{source}: has the splits {', '.join(known)}", "name one with ?split=...")
    rows = attempt("load it", lambda: datasets.load_dataset(address.path, address.config, split=split))
    column = address.column or next((name for name in COLUMNS if name in rows.column_names), None)
    if column is None or column not in rows.column_names:
        raise NeuzipError(
            f"{source}: has the columns {', '.join(rows.column_names)}", "name one with ?column=..."
        )
    config = f"/{address.config}" if address.config else ""
    return of_rows(f"{HUB}{address.path}{config}?split={split}&column={column}", rows[column])


def of_rows(name: str, rows: Iterable[str]) -> Text:
    """A text of a document a row; or of articles, if the rows are WikiText's lines.

    Those are joined by two line ends, as GPTQ and the guide of transformers do, although each ends with one.
    """
    texts = [str(row) for row in rows]
    first = next((row for row in texts if row.strip()), "")
    if not first:
        raise NeuzipError(f"{name}: holds no text")
    if HEADING.fullmatch(first) is None or first.count("\n") > 1:
        documents = [Document(f"row {i}", row) for i, row in enumerate(texts) if row.strip()]
        return Text(name, tuple(documents))
    # The raw file has a blank where the dataset has an empty row.
    pages = [
        Document(_title(page[0]), "\n\n".join(page), "\n".join(line.rstrip("\n") or " " for line in page))
        for page in _pages(texts)
    ]
    return Text(name, tuple(pages), wikitext=True)
