"""Files of the Hub in a folder of our own: each has its name when it has arrived whole.

The traffic is huggingface_hub's. It keeps records of what it has downloaded below `RECORDS`, and goes on with
the files that are not there; one that was cut off by a kill it begins anew.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neuzip.errors import FULL, NeuzipError
from neuzip.formats.hub.connection import Note, bars, explaining, patiently
from neuzip.formats.hub.listing import Listing

RECORDS = ".cache/huggingface"

FILES_AT_ONCE = 4
"""A kill loses what has arrived of so many files."""

LEFT_BY_A_KILL = re.compile(r"\.[0-9a-f]{8}\.incomplete\Z")


def fetch(listing: Listing, folder: Path, *, note: Note, progress: bool = False) -> None:
    """Download what `folder` has not yet of a listing. Raises NeuzipError.

    Nothing is checked but sizes. What interrupted runs left half-written is removed first.
    """
    from huggingface_hub import snapshot_download

    remove_unfinished(folder)
    with explaining(listing.src, listing.repo_id, note=note), bars(progress), saving(folder):
        patiently(
            lambda: snapshot_download(
                listing.repo_id,
                revision=listing.commit,
                local_dir=folder,
                allow_patterns=[glob.escape(file.path) for file in listing.files],
                max_workers=FILES_AT_ONCE,
            ),
            note,
        )


def remove_unfinished(folder: Path) -> None:
    """Delete what killed downloads left below `folder` and no later one can go on with."""
    for path in (folder / RECORDS).rglob("*.incomplete"):
        if LEFT_BY_A_KILL.search(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a download that cannot be written into a NeuzipError."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise
        full = error.errno in FULL
        problem = "no space left on the disk" if full else f"cannot be written: {error.strerror}"
        raise NeuzipError(
            f"{path}: {problem}",
            f"{'free some space and ' if full else ''}repeat the command: "
            "files that arrived whole are kept, and it goes on where it stopped",
        ) from error
