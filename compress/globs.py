"""Globs on names of tensors: those of fnmatch, and alternatives in braces."""

from __future__ import annotations

import fnmatch
import functools
import re

_PART = re.compile(r"\[!?\]?[^]]*\]|.", re.DOTALL)
"""A character class, or one character."""

_HEAD = "(?s:"
_TAIL = fnmatch.translate("")[len(_HEAD) :]


def matches(name: str, glob: str) -> bool:
    """Whether a name matches a glob: `*`, `?`, `[abc]`, `[!abc]`, and `{a,b}` for a or b.

    Braces may be nested.

    >>> matches("experts.17.up_proj", "experts.{3,17}.*"), matches("experts.7.up_proj", "experts.{3,17}.*")
    (True, False)
    """
    return _compiled(glob).match(name) is not None


@functools.lru_cache(maxsize=1 << 16)
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(f"{_HEAD}{_translated(glob)}{_TAIL}")


def _translated(glob: str) -> str:
    """A glob as a regular expression. Braces without a comma or without a partner stand for themselves."""
    parts = _PART.findall(glob)
    expressions = [*map(_translated_part, parts)]
    open_braces: list[list[int]] = []  # the place of a brace, and those of the commas behind it
    for place, part in enumerate(parts):
        if part == "{":
            open_braces.append([place])
        elif part == "," and open_braces:
            open_braces[-1].append(place)
        elif part == "}" and open_braces:
            first, *commas = open_braces.pop()
            if commas:
                expressions[first], expressions[place] = "(?:", ")"
                for comma in commas:
                    expressions[comma] = "|"
    return "".join(expressions)


def _translated_part(part: str) -> str:
    if part in ("*", "?"):
        return ".*" if part == "*" else "."
    if len(part) > 1:
        return fnmatch.translate(part)[len(_HEAD) : -len(_TAIL)]
    return re.escape(part)
