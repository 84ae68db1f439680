"""SRC as commands take it: a path, or a Hub id that is downloaded first."""

from __future__ import annotations

from pathlib import Path

from neuzip.cli.output import Output


def resolved(out: Output, src: str) -> Path:
    """The path of a checkpoint. Ctrl-C ends a download at once; what has arrived stays in the cache.

    Raises NeuzipError.
    """
    from neuzip.cli.interrupt import leaving_at_once
    from neuzip.formats.hub.download import resolve_source

    with leaving_at_once():
        return resolve_source(src, note=out.status, progress=out.watched)


def resolved_model(out: Output, src: str) -> Path:
    """The path of a model; what is no checkpoint is refused at once, before torch is imported.

    Raises NeuzipError.
    """
    from neuzip.formats.checkpoint import find_checkpoint

    path = resolved(out, src)
    find_checkpoint(path)
    return path


def refuse_before_download(src: str, dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite where `compress` would refuse `dst`; imported late, for the help pages."""
    from neuzip.compress import entry_checks

    entry_checks.refuse_before_download(src, dst, overwrite)
