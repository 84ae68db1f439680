"""The table of pushes and pulls under faults."""

from __future__ import annotations

from pages.layout import Document, render


def faults(document: Document) -> str:
    """What became of pushes and pulls under faults."""
    return render("reliability.faults", document)
