"""SRC of the commands that run a model."""

from __future__ import annotations

from pathlib import Path

from neuzip.cli.output import Output
from neuzip.cli.source import resolved


def resolved_model(out: Output, src: str) -> Path:
    """`resolved`, and what is no checkpoint is refused at once, before torch is imported.

    Raises NeuzipError.
    """
    from neuzip.formats.checkpoint import find_checkpoint

    path = resolved(out, src)
    find_checkpoint(path)
    return path
