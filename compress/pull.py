"""A repository of the Hub as a folder: complete and checked when it has its name."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError, VerificationError
from neuzip.formats.hub.connection import Note
from neuzip.formats.hub.listing import HASHING_THREADS, HubFile, Listing, not_as_on_the_hub
from neuzip.formats.hub.pull import RECORDS, fetch
from neuzip.formats.safetensors_file import LONGEST_SIGN, other_format

from .overwrite_guard import refuse_existing, require_name
from .progress import Stage
from .sources.folder import weight_bytes
from .verify import verify
from .workspace import files_in, publish, recover, refuse_strangers, remove, workspace, write_file, writing

MARK = f"{RECORDS}/neuzip-pull"
"""What tells a later run that a workspace is one of a pull, and of which repository."""


@dataclass(frozen=True)
class PullReport:
    """What `pull` wrote. `tensors` is the number of tensors decoded and checked; None for a plain checkpoint.

    If `was_there` is True, an earlier run had written everything, and this run only compared it. For a delta,
    `without_base` is the number of tensors that neuzip could check only in part, without the base.
    """

    src: str
    repo_id: str
    commit: str
    dst: Path
    files: int
    nbytes: int
    tensors: int | None
    seconds: float
    was_there: bool = False
    without_base: int = 0


def pull(
    listing: Listing,
    dst: str | os.PathLike[str],
    *,
    stage: Stage,
    note: Note,
    overwrite: bool = False,
    progress: bool = False,
) -> PullReport:
    """Download the files of a listing to a new folder and check each with the Hub's checksum of it.

    Of a compressed repository all tensors are decoded and checked, too. Files that arrived whole are kept
    when a run fails or is killed, and the next run goes on with them. `note` is told of waits; `progress`
    lets huggingface_hub draw its bars. Raises NeuzipError.
    """
    began = time.monotonic()
    dst = Path(dst)
    require_name(dst)
    recover(dst)
    was_there = dst.is_dir() and not overwrite and _is_pulled(listing, dst, stage)
    tensors, without_base = None, 0
    if not was_there:
        refuse_existing(dst, overwrite, known={file.path for file in listing.files})
        with workspace(dst) as work:
            with writing(work):
                _claim(work, listing, overwrite)
                _require_space(work, listing)
            fetch(listing, work, note=note, progress=progress)
            _refuse_damaged(listing, work, stage)
            _refuse_other_formats(listing, work)
            if listing.is_compressed:
                tensors, without_base = _verified(listing, work, stage)
            with writing(work):
                remove(work / ".cache")
                refuse_strangers(work, {file.path for file in listing.files})
            publish(work, dst)
    return PullReport(
        listing.src, listing.repo_id, listing.commit, dst, len(listing.files), listing.nbytes, tensors,
        time.monotonic() - began, was_there, without_base,
    )  # fmt: skip


def _claim(work: Path, listing: Listing, overwrite: bool) -> None:
    """Begin a pull in `work`, or go on with one: what the repository has no more is removed."""
    mark = work / MARK
    begun = mark.read_text(encoding="utf-8") if mark.is_file() else None
    if begun != listing.repo_id and not (begun is None and _is_almost_pulled(listing, work)):
        if not overwrite:
            whose = "something else" if begun is None else f"a pull of {begun}"
            raise NeuzipError(
                f"{work}: was begun by {whose}",
                "choose another `destination`, or give `overwrite=True` to remove it",
            )
        for entry in work.iterdir():
            remove(entry)
    write_file(mark, listing.repo_id.encode())
    wanted = {file.path for file in listing.files}
    for path in files_in(work):
        name = path.relative_to(work).as_posix()
        if name not in wanted and not name.startswith(f"{RECORDS}/"):
            path.unlink()


def _is_almost_pulled(listing: Listing, work: Path) -> bool:
    """Whether a workspace without a mark is of a pull that was killed in its first or its last moment."""
    if all(entry.name == ".cache" for entry in work.iterdir()):
        return True
    return all(
        path.is_file() and path.stat().st_size == file.nbytes
        for path, file in ((work / file.path, file) for file in listing.files)
    )


def _require_space(work: Path, listing: Listing) -> None:
    """Refuse to begin what the disk cannot take."""
    missing = sum(file.nbytes for file in listing.files if not (work / file.path).is_file())
    free = shutil.disk_usage(work).free
    if missing > free:
        raise NeuzipError(
            f"{work}: the repository takes {missing:,} bytes more, the disk has {free:,} left",
            "free some space, or choose a `destination` on another disk",
        )


def _refuse_damaged(listing: Listing, work: Path, stage: Stage) -> None:
    """Compare every file with its checksum; remove those that are not right, and say so."""
    damaged = _differing(listing, work, stage, keep=True)
    if damaged:
        with writing(work):
            for file in damaged:
                (work / file.path).unlink(missing_ok=True)
        raise not_as_on_the_hub(listing, [file.path for file in damaged])


def _refuse_other_formats(listing: Listing, work: Path) -> None:
    """Raise VerificationError for a weight file that is something else on the Hub, such as an LFS pointer."""
    for file in listing.files:
        if file.path.endswith(".safetensors"):
            with open(work / file.path, "rb") as content:
                error = other_format(file.path, content.read(LONGEST_SIGN))
            if error is not None:
                raise VerificationError(
                    f"{listing.src}: arrived as it is on the Hub, and {error.message}",
                    f"tell its owner, or pull an older revision; {work} can be removed",
                )


def _verified(listing: Listing, work: Path, stage: Stage) -> tuple[int, int]:
    """Decode all tensors; how many there are, and how many of them lack the base of a delta."""
    try:
        with stage("verify", weight_bytes(work, allow_delta=True)) as advance:
            tensors = verify(work, on_bytes=advance).tensors
    except (FormatError, VerificationError) as error:
        raise VerificationError(
            f"{listing.src}: arrived as it is on the Hub, and does not verify: {error.message}",
            error.hint or f"tell its owner, or pull an older revision; {work} can be removed",
        ) from error
    return len(tensors), sum(t.base_missing for t in tensors)


def _is_pulled(listing: Listing, folder: Path, stage: Stage) -> bool:
    """Whether a folder holds the files of a listing and nothing else."""
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in files_in(folder)}
    if sizes != {file.path: file.nbytes for file in listing.files}:
        return False
    return not _differing(listing, folder, stage, keep=False)


def _differing(listing: Listing, folder: Path, stage: Stage, *, keep: bool) -> list[HubFile]:
    """The files whose content is not that of the Hub; with `keep` all others outlive a power cut."""

    def is_right(file: HubFile) -> bool:
        path = folder / file.path
        right = file.matches(path)
        if right and keep:
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        return right

    differing = []
    with (
        stage("check", listing.nbytes) as advance,
        ThreadPoolExecutor(HASHING_THREADS) as pool,
    ):
        for file, right in zip(listing.files, pool.map(is_right, listing.files), strict=True):
            advance(file.nbytes)
            if not right:
                differing.append(file)
    return differing
