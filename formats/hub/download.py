"""Checkpoints by their Hub id, downloaded into the cache of huggingface_hub.

All traffic is huggingface_hub's, with its cache, its access token and its environment variables.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from neuzip.errors import FULL_OR_CLOSED, NeuzipError, UsageError
from neuzip.formats.hub.connection import Note, bars, explaining, patiently, transport_errors
from neuzip.formats.hub.ids import hub_id
from neuzip.formats.hub.listing import (
    DUPLICATES,
    HASHING_THREADS,
    HubFile,
    Listing,
    list_repository,
    not_as_on_the_hub,
)
from neuzip.formats.hub.notes import pass_over


def resolve_source(
    src: str | os.PathLike[str], *, parameter: str = "source", note: Note = pass_over, progress: bool = False
) -> Path:
    """The path of a checkpoint, downloaded first if `src` is a Hub id: `owner/name` or `owner/name@revision`.

    What exists on disk is a path, and so is all that has not the form of a Hub id. Downloads are kept in
    huggingface_hub's cache. They hold every file of the repository, so that all of it can be restored later;
    only the same weights in other formats (`DUPLICATES`) are left out. Of a compressed repository nothing is
    left out. Without a connection, a copy in the cache is taken.

    `note` is told of what was left out, of a copy taken and of waits; `progress` lets huggingface_hub draw
    its bars on a terminal. Raises UsageError for an empty name, which would be the current folder, and for a
    value of `parameter` that is no name; NeuzipError, for a repository without safetensors before anything is
    downloaded.
    """
    if not isinstance(src, str | os.PathLike):
        raise UsageError(
            f"`{parameter}={src!r}`: is neither a path nor a Hub id",
            "give a folder, a .safetensors file or owner/name",
        )
    if src == "":
        raise UsageError(
            "the name of a checkpoint is empty", "give a folder, a .safetensors file or owner/name"
        )
    match = hub_id(src)
    if match is None:
        return Path(src)
    here = "there is no such folder here, and "
    with explaining(str(src), match["repo"], here, note), bars(progress):
        return _download(str(src), match["repo"], match["revision"], note)


def _download(src: str, repo_id: str, revision: str | None, note: Note) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        listing = list_repository(src, repo_id, revision, note)
    except HfHubHTTPError:
        raise
    except transport_errors() as unreachable:
        try:
            cached = snapshot_download(
                repo_id, revision=revision, ignore_patterns=list(DUPLICATES), local_files_only=True
            )
        except LocalEntryNotFoundError:
            raise unreachable from None
        note(f"{src}: the Hub cannot be reached; taken from the cache")
        return Path(cached)
    left_out = [glob.escape(file.path) for file in listing.left_out]
    cached_files = {file for file in listing.files if _is_cached(listing, file)}
    with _filling_cache():
        folder = Path(
            patiently(
                lambda: snapshot_download(repo_id, revision=revision, ignore_patterns=left_out or None), note
            )
        )
    if folder.name != listing.commit:  # a commit was made since the listing
        listing, cached_files = list_repository(src, repo_id, folder.name, note), set()
    _refuse_damaged(listing, [file for file in listing.files if file not in cached_files], folder)
    listing.tell_left_out(note)
    return folder


@contextmanager
def _filling_cache() -> Iterator[None]:
    """Turn what the operating system says of huggingface_hub's cache into an error that names it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        yield
    except OSError as error:
        if error.errno not in FULL_OR_CLOSED:
            raise
        raise NeuzipError(
            f"{HF_HUB_CACHE}: the cache of the Hub cannot be written: {error.strerror}",
            "make room there, or set HF_HUB_CACHE to a folder on another disk and repeat the command",
        ) from error


def _is_cached(listing: Listing, file: HubFile) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(listing.repo_id, file.path, revision=listing.commit), str)


def _refuse_damaged(listing: Listing, files: list[HubFile], folder: Path) -> None:
    """Compare what was downloaded with the Hub's checksums; take what is not right out of the cache.

    huggingface_hub compares sizes only, and would give the same bytes again for ever.
    """
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        right = list(pool.map(lambda file: file.matches(folder / file.path), files))
    damaged = [file.path for file, is_right in zip(files, right, strict=True) if not is_right]
    for name in damaged:
        (folder / name).resolve().unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    if damaged:
        raise not_as_on_the_hub(listing, damaged)
