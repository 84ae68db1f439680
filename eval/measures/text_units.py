"""Words and bytes of a text as lm-evaluation-harness counts them, and its detokeniser of WikiText."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neuzip.eval.measures.estimates import Values

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, eq=False)
class Units:
    """Words and bytes of each token, [n]; if not `exact`, all those of a document are its last token's."""

    words: Values
    bytes: Values
    exact: bool = True


def ends_of(offsets: Sequence[tuple[int, int]], content: str) -> Values:
    """The end of each token in a text, in characters, rising; the last token takes the rest."""
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
    ends[-1:] = len(content)
    return ends


def units_of(content: str, ends: Values) -> Units:
    """The words that begin in each token, and its UTF-8 bytes. What is behind the last token does not count.

    >>> found = units_of("two Bären", np.array([4, 6, 9]))
    >>> found.words.tolist(), found.bytes.tolist()
    ([1, 1, 0], [4, 3, 3])
    """
    read = content[: int(ends[-1])]
    starts = [match.start() for match in re.finditer(r"\S+", read)]
    words = np.bincount(np.searchsorted(ends, starts, side="right"), minlength=len(ends))
    codes = np.frombuffer(read.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])
    return Units(words, np.diff(before[ends], prepend=0))


def units_of_page(page: str, tokens: int, ends: Values | None) -> Units:
    """Units of a prefix, which has none, and of a page behind it, as lm-evaluation-harness counts words."""
    words, size = np.zeros((2, tokens + 1), np.int64)
    if ends is not None:
        units = units_of(page, ends)
        words[1:], size[1:] = units.words, units.bytes
    # An empty word before a blank at the beginning counts, and one behind a blank at the end.
    words[-1] += len(re.split(r"\s+", page)) - words.sum()
    size[-1] += len(page.encode("utf-8")) - size.sum()
    return Units(words, size, exact=ends is not None)


DETOKENISING: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),  # meant otherwise, no doubt, but so it is
    (r" @([-,.])@ ", r"\1"),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
"""Patterns and their replacements, applied in order: the detokeniser of the task `wikitext`."""


def detokenised(page: str) -> str:
    """An article of WikiText with its words and punctuation together again, as lm-evaluation-harness has it.

    >>> detokenised("the 1 @,@ 500 @-@ tonne ship ( 1905 ) , and 's")
    "the 1,500-tonne ship (1905), and's"
    """
    for pattern, replacement in DETOKENISING:
        page = re.sub(pattern, replacement, page)
    return page
