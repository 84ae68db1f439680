"""From a checkpoint on this disk to the Hub: each container is uploaded when it is ready."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import Checkpoint, find_checkpoint
from neuzip.formats.hub.connection import Note
from neuzip.formats.hub.draft import Draft
from neuzip.formats.hub.listing import HubFile
from neuzip.formats.hub.notes import pass_over
from neuzip.formats.hub.private_files import private_files, refuse_private
from neuzip.formats.hub.push import Pushed
from neuzip.formats.hub.push_plan import plan_push

from .checkpoint_job import DEFAULT_RULES, compress
from .entry_checks import refuse_unless_made, require_plain
from .reports import CompressionReport
from .rules import Rule
from .sources.folder import FolderSource


def compress_and_push(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    draft: Draft,
    private: bool = False,
    overwrite: bool = False,
    allow_private_files: bool = False,
    note: Note = pass_over,
    **options: Any,
) -> tuple[CompressionReport, Pushed]:
    """Compress a folder as `compress`, which gets the `options`, and upload each container when it is ready.

    The repository is made `private` if it is new. With `overwrite` both results may replace older ones.
    Files that look private are refused unless `allow_private_files`. `note` is told what is uploaded. Raises
    NeuzipError.
    """
    if Path(src).is_file():
        raise NeuzipError(f"{src}: is a file, and repositories hold folders", "give its folder")
    with FolderSource(src) as source:
        require_plain(source, Path(dst))
        refuse_private(private_files(source.checkpoint), str(draft.target), allow_private_files)
        note(files_to_upload(source.checkpoint, draft))
    refuse_unless_made(Path(dst), overwrite)
    draft.begin(private=private, overwrite=overwrite)
    sent: dict[str, HubFile] = {}
    report = compress(
        src,
        dst,
        rules,
        overwrite=overwrite,
        on_file=lambda f, p: sent.update({f: draft.add(f, p)}),
        **options,
    )
    target = draft.target
    plan = plan_push(dst, target.repo_id, revision=target.revision)
    there = draft.files()
    for file in set(find_checkpoint(dst).weights) - set(sent):
        path = Path(dst) / file
        sent[file] = there[file] if file in there and there[file].matches(path) else draft.add(file, path)
    return report, draft.publish(plan, sent, overwrite=overwrite)


def files_to_upload(checkpoint: Checkpoint, draft: Draft) -> str:
    """A sentence that names the files of a checkpoint that an upload has."""
    return f"these files go to {draft.target}: {', '.join((*checkpoint.weights, *checkpoint.others))}"
