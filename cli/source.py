"""SRC as commands take it: a path, or a Hub id that is downloaded first."""

from __future__ import annotations

from pathlib import Path

from neuzip.cli.output import Output


def resolved(out: Output, src: str) -> Path:
    """The path of a checkpoint. Ctrl-C ends a download at once; what has arrived stays in the cache.

    Raises NeuzipError.
    """
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.formats.hub import resolve_source

    with leaving_at_once():
        return resolve_source(src, note=out.status, progress=out.watched)


def refuse_before_download(src: str, dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite where compressing a Hub id to `dst` will be refused: it takes no weights to know.

    For a path nothing is done: its own mistakes are told first.
    """
    from neuzip.compress.pipeline import refuse_unless_made
    from neuzip.formats.hub import hub_id

    if hub_id(src) is not None:
        refuse_unless_made(dst, overwrite)
