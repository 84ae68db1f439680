"""Checks before a compression reads a tensor: can the source be compressed, may the destination be written.

Whether a result that is there is the one that is wanted takes reading it: the jobs find that out.
"""

from __future__ import annotations

import os
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import OWN_FOLDER
from neuzip.formats.container import Container
from neuzip.formats.hub.ids import hub_id
from neuzip.formats.safetensors_file import Header

from .overwrite_guard import refuse_existing, refuse_folder, refuse_nesting, require_name
from .run_identity import RUN_ID_PATH, is_of_run
from .sources.source import TensorSource
from .workspace import recover


def require_plain(source: TensorSource, dst: Path) -> None:
    """Raise NeuzipError unless `source` is a checkpoint that can be compressed to `dst`."""
    path = source.checkpoint.path
    if source.is_compressed:
        raise NeuzipError(f"{path}: is compressed already", "to restore it: neuzip decompress SRC DST")
    refuse_nesting(path, dst)
    require_name(dst)
    if any(f.split("/")[0] == OWN_FOLDER for f in (*source.checkpoint.weights, *source.checkpoint.others)):
        raise NeuzipError(f"{path}: has something called {OWN_FOLDER!r} of its own", "rename it first")


def require_config(source: TensorSource, activations: str | None) -> None:
    """Raise NeuzipError for `activations` of a checkpoint that has no config.json to hold them."""
    if activations is not None and "config.json" not in source.checkpoint.others:
        raise NeuzipError(f"{source.checkpoint.path}: has no config.json", "leave out `activations`")


def refuse_unless_made(dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite for a `dst` that no run of `compress` has made: before the source is downloaded.

    One that such a run has made may be the result that is wanted: `compress` finds out.
    """
    require_name(dst)
    if not (dst / RUN_ID_PATH).is_file():
        refuse_existing(dst, overwrite)


def refuse_before_download(src: str | os.PathLike[str], dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite where compressing a Hub id to `dst` will be refused: it takes no weights to know.

    For a path nothing is done: its own mistakes are told first.
    """
    if hub_id(src) is not None:
        refuse_unless_made(dst, overwrite)


def refuse_other(source: TensorSource, dst: Path, overwrite: bool, identity: bytes) -> None:
    """Raise WouldOverwrite unless `dst` is free, or what the same command made: before tensors are read."""
    if source.checkpoint.is_file:
        refuse_other_file(source, dst, overwrite)
        return
    recover(dst)
    if overwrite or not is_of_run(dst, identity):
        refuse_existing(dst, overwrite)


def refuse_other_file(source: TensorSource, dst: Path, overwrite: bool) -> None:
    """Raise WouldOverwrite unless `dst` is free, or a container of what the one file of `source` restores to.

    Whether the same options have made it takes coding it again: `compress` finds out.
    """
    refuse_folder(dst)
    (file,) = source.checkpoint.weights
    if overwrite or not _is_container_of(dst, source.header(file)):
        refuse_existing(dst, overwrite, file=True)


def _is_container_of(path: Path, original: Header) -> bool:
    try:
        with Container(path, delta=True) as container:
            return container.original.raw == original.raw
    except FormatError:
        return False
