"""The plan of a search as a file beside the compressed checkpoint, which a later run can use again."""

from __future__ import annotations

from pathlib import Path

from neuzip.compress.entry_checks import refuse_unless_made
from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.rules_file import PlanFile, read_plan


def plan_path(dst: Path) -> Path:
    """Path of the plan of a compressed checkpoint, beside it."""
    return dst.with_name(f"{dst.name}.plan.toml")


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


def earlier_plan(dst: Path, key: str, overwrite: bool) -> PlanFile | None:
    """The plan of an interrupted search with the same key, None if there was none.

    Raises WouldOverwrite if the plan or `dst` is of something else.
    """
    path = plan_path(dst)
    if not overwrite and is_search_of(dst, key):
        return read_plan(path)
    refuse_existing(dst, overwrite, file=dst.is_file())
    refuse_existing(path, overwrite, file=True)
    return None
