"""Globs on names of tensors: those of fnmatch, and alternatives in braces."""

from __future__ import annotations

import fnmatch
import functools
import re

_PART = re.compile(r"\[!?\]?[^]]*\]|\{[^{}]*,[^{}]*\}|.", re.DOTALL)
"""A character class, alternatives, or one character."""

_HEAD = "(?s:"
_TAIL = fnmatch.translate("")[len(_HEAD) :]


def matches(name: str, glob: str) -> bool:
    """Whether a name matches a glob: `*`, `?`, `[abc]`, `[!abc]`, and `{a,b}` for a or b.

    >>> matches("experts.17.up_proj", "experts.{3,17}.*"), matches("experts.7.up_proj", "experts.{3,17}.*")
    (True, False)
    """
    return _compiled(glob).match(name) is not None


@functools.lru_cache(maxsize=1 << 16)
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(f"{_HEAD}{_translated(glob)}{_TAIL}")


def _translated(glob: str) -> str:
    """A glob as a regular expression."""
    return "".join(map(_translated_part, _PART.findall(glob)))


def _translated_part(part: str) -> str:
    if part in ("*", "?"):
        return ".*" if part == "*" else "."
    if len(part) > 1 and part[0] == "[":
        return fnmatch.translate(part)[len(_HEAD) : -len(_TAIL)]
    if len(part) > 1 and part[0] == "{":
        return f"(?:{'|'.join(map(_translated, part[1:-1].split(',')))})"
    return re.escape(part)
