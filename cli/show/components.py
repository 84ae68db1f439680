"""What the components of a pipeline became: folders of a checkpoint that have weights of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from neuzip.cli.output import Output
from neuzip.cli.show.schemes import scheme_text
from neuzip.cli.text import bytes_text, percent_text

StoredTensor = tuple[str, str, int, "int | None"]
"""Weight file, scheme, bytes before, and bytes after or None."""


@dataclass(frozen=True)
class Component:
    """The tensors of one folder: how many there are of each scheme, and their bytes, without headers."""

    name: str
    schemes: Mapping[str, int]
    original_bytes: int
    stored_bytes: int | None


def components(tensors: Iterable[StoredTensor]) -> list[Component]:
    """The folders of a pipeline, in the order of their first tensors; none of a checkpoint of one folder.

    >>> [c.name for c in components([("unet/a", "raw", 8, 8), ("vae/b", "raw", 8, 8)])]
    ['unet', 'vae']
    """
    folders: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        folders.setdefault(tensor[0].rpartition("/")[0] or ".", []).append(tensor)
    if len(folders) < 2:
        return []
    return [
        Component(
            name,
            dict(Counter(scheme for _, scheme, _, _ in group)),
            sum(before for _, _, before, _ in group),
            _sum(after for _, _, _, after in group),
        )
        for name, group in folders.items()
    ]


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum, or None if a value is unknown."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def show_components(out: Output, rows: Iterable[Component]) -> None:
    """Show a row for each component, if there are several."""
    table = [
        [
            row.name,
            ", ".join(f"{scheme_text(scheme)} ({count:,})" for scheme, count in row.schemes.items()),
            bytes_text(row.original_bytes),
            "" if row.stored_bytes is None else bytes_text(row.stored_bytes),
            "" if row.stored_bytes is None else percent_text(row.stored_bytes, row.original_bytes),
        ]
        for row in rows
    ]
    if table:
        out.table(
            ["component", "schemes (tensors)", "before", "after", "ratio"],
            table,
            right=["before", "after", "ratio"],
        )
