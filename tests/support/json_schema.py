"""Whether a document of `--json` is what `neuzip.cli.schema` says: every key there, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from neuzip.cli.schema import COMMANDS, ENVELOPE, FAILED, OBJECTS
from neuzip.cli.schema.table import Keys

SEEN: set[tuple[str, str]] = set()
"""Object and key of all that was printed so far and is not null."""

PLAIN: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "object": (dict, str),
}


def problems(document: dict[str, Any]) -> list[str]:
    """What is not as described, each with its place."""
    command = document.get("command")
    if "error" in document:
        return list(_object(document, {**ENVELOPE, **FAILED}, "failure", ""))
    if command not in COMMANDS:
        return [f"no such command: {command!r}"]
    return list(_object(document, {**ENVELOPE, **COMMANDS[command]}, command, ""))


def _object(value: Any, keys: Keys, name: str, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place}: {value!r} is no object"
        return
    for key in value.keys() - keys.keys():
        yield f"{place}.{key}: is not described"
    for key, described in keys.items():
        if key not in value:
            yield f"{place}.{key}: is missing"
            continue
        if value[key] is not None:
            SEEN.add((name, key))
        yield from _value(value[key], described.type, f"{place}.{key}")


def _value(value: Any, kind: str, place: str) -> Iterator[str]:
    if bracket := re.fullmatch(r"\((.*)\)", kind):
        kind = bracket[1]
    bare, nullable = kind.removesuffix(" or null"), kind.endswith(" or null")
    if value is None:
        if not nullable:
            yield f"{place}: is null, and {kind}"
    elif bare.startswith("list of "):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        for one in value:
            yield from _value(one, bare.removeprefix("list of "), f"{place}[]")
    elif bare.startswith("map of "):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no map"
            return
        for one in value.values():
            yield from _value(one, bare.removeprefix("map of "), f"{place}.*")
    elif bare in OBJECTS:
        yield from _object(value, OBJECTS[bare], bare, place)
    else:
        kinds = tuple(t for name in bare.split(" or ") for t in PLAIN[name])
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            yield f"{place}: {value!r} is no {bare}"
