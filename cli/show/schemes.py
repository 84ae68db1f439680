"""Schemes as a person reads them: `k=3 block=512` is 3 mantissa bits in blocks of 512."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROUNDED = re.compile(r"\bk=(\d+)(?: block=(\d+))?")

LEGEND = "`k=3` means 3 mantissa bits; `block=512` adds a scale for each block of 512 weights."


def scheme_text(scheme: str) -> str:
    """A scheme in words.

    >>> [scheme_text(one) for one in ("k=1", "k=3 block=512", "lossless")]
    ['1 mantissa bit', '3 mantissa bits in blocks of 512', 'lossless']
    """

    def words(match: re.Match[str]) -> str:
        bits, block = match.groups()
        of = "" if block is None else f" in blocks of {block}"
        return f"{bits} mantissa bit{'' if bits == '1' else 's'}{of}"

    return _ROUNDED.sub(words, scheme)


def legend(schemes: Iterable[str]) -> list[str]:
    """The line that says what the short form of schemes in a table means, if one of them has it."""
    matches = [match for match in map(_ROUNDED.search, schemes) if match is not None]
    if not matches:
        return []
    return [LEGEND if any(match[2] for match in matches) else f"{LEGEND.partition(';')[0]}."]
