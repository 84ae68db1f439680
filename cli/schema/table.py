"""Descriptions of keys, read from tables of text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One key of an object: its type, its unit ("" if it has none), and what it means."""

    type: str
    unit: str
    meaning: str


Keys = Mapping[str, Key]

_LINE = re.compile(r"(?P<name>\w+) +: (?P<type>[\w() ]+?)(?: \[(?P<unit>[^]]+)\])? +- (?P<meaning>.+)")


def keys_of(table: str) -> dict[str, Key]:
    """Keys from lines `name : type [unit] - meaning`; a line that begins with "|" goes on with the meaning.

    >>> keys_of("seconds : number [s] - wall time\\n| of the run")
    {'seconds': Key(type='number', unit='s', meaning='wall time of the run')}
    """
    keys: dict[str, Key] = {}
    for line in re.sub(r"\n *\| *", " ", table).strip().splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match["name"] in keys:
            raise ValueError(f"no line of a table of keys: {line!r}")
        keys[match["name"]] = Key(match["type"], match["unit"] or "", match["meaning"])
    return keys
