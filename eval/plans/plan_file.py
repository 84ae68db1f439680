"""The plan of a search as a file beside the compressed checkpoint, which a later run can use again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from neuzip.compress.entry_checks import refuse_unless_made
from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.scheme import DROPPED_LAYERS, Rule, read_plan


def plan_path(dst: Path) -> Path:
    """Path of the plan of a compressed checkpoint, beside it."""
    return dst.with_name(f"{dst.name}.plan.toml")


def plan_bytes(rules: Sequence[Rule], comments: Sequence[str], dropped: Sequence[int] = ()) -> bytes:
    """Rules as a TOML file that `--plan` reads, with the layers that are dropped."""
    lines = [f"# {_one_line(comment)}" for comment in comments]
    if dropped:
        lines += ["", f"{DROPPED_LAYERS} = {list(dropped)}"]
    for rule in rules:
        lines += ["", "[[rule]]", *(f"{key} = {_toml(value)}" for key, value in rule.to_json().items())]
    return ("\n".join(lines) + "\n").encode()


def _toml(value: str | int) -> str:
    """A string or a number in TOML, which escapes one character more than JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def refuse_other_files(dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite if something at `dst` is not of a search for a plan."""
    if overwrite or not plan_path(dst).exists():
        refuse_existing(dst, overwrite, file=dst.is_file())
    else:
        refuse_unless_made(dst, overwrite)


def is_search_of(dst: Path, key: str) -> bool:
    """Whether the plan beside `dst` is of the search with this key."""
    path = plan_path(dst)
    return path.is_file() and key in path.read_text(encoding="utf-8", errors="replace")


def earlier_plan(dst: Path, key: str, overwrite: bool) -> tuple[tuple[Rule, ...], tuple[int, ...]] | None:
    """Rules and dropped layers of an interrupted search with the same key, None if there was none.

    Raises WouldOverwrite if the plan or `dst` is of something else.
    """
    path = plan_path(dst)
    if not overwrite and is_search_of(dst, key):
        rules, dropped = read_plan(path)
        return tuple(rules), dropped
    refuse_existing(dst, overwrite, file=dst.is_file())
    refuse_existing(path, overwrite, file=True)
    return None
