"""The demo checkpoint: a small trained Llama that travels with the package, and the text that measures it.

`recipe.py` trains it on most of the topics that Python's own `help()` shows; README.md here says how well.
The text is not shipped: every CPython has it, with small differences from version to version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from neuzip.errors import NeuzipError

CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"

# Of the ten classes this one has prose, reference text and code, about 8 % of the characters, and the least
# text in common with the other topics.
_CLASSES = 10
_HELD_OUT_CLASS = 1


def is_held_out(topic: str) -> bool:
    """Whether training never sees the topic. Only its name decides, so every Python gives the same answer."""
    return int(hashlib.sha256(topic.encode()).hexdigest(), 16) % _CLASSES == _HELD_OUT_CLASS


def split_topics() -> tuple[list[str], list[str]]:
    """Return the documents for training and the held-out documents, each in the order of the topics' names.

    Topics quote one another at length ("for" is a section of "compound"), so each paragraph is kept once, and
    the held-out side has the first claim: no held-out paragraph is left in the documents for training.
    """
    topics = _topics()
    seen: set[str] = set()
    held_out = _first_occurrences((topics[name] for name in sorted(topics) if is_held_out(name)), seen)
    train = _first_occurrences((topics[name] for name in sorted(topics) if not is_held_out(name)), seen)
    return train, held_out


def _topics() -> Mapping[str, str]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise NeuzipError(
            "this Python has no pydoc_data.topics, the text that the demo checkpoint is measured on",
            "some minimal Linux packages leave it out: install the distribution's full Python "
            "or use one from python.org, uv or conda",
        ) from error
    return topics


def _first_occurrences(documents: Iterable[str], seen: set[str]) -> list[str]:
    """Drop the paragraphs that are in `seen`, add the others to it, and leave out documents without any."""
    kept_documents = []
    for document in documents:
        lines = []
        for paragraph in document.split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                lines.append(paragraph.strip("\n"))
        if lines:
            kept_documents.append("\n\n".join(lines))
    return kept_documents
