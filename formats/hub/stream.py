"""A checkpoint of the Hub, file by file: what it consists of, parts of a file, and files that prove whole.

Everything is read from the one commit that was current at the beginning.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError, UsageError, VerificationError
from neuzip.formats.checkpoint import SKIPPED_FOLDERS, Checkpoint
from neuzip.formats.hub.connection import Note, explaining, patiently
from neuzip.formats.hub.ids import HUB_ID, did_you_mean
from neuzip.formats.hub.listing import HubFile, list_repository
from neuzip.formats.hub.pull import saving
from neuzip.formats.safetensors_file import MAX_HEADER, Header, other_format, parse_header

HEADER_GUESS = 1 << 17
"""Bytes of a weight file that are asked for first: most headers lie within them."""

HEADERS_AT_ONCE = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A plain checkpoint on the Hub at one commit, by the files that compress would download.

    `note` is told of waits.
    """

    src: str
    repo_id: str
    commit: str
    files: dict[str, HubFile]
    note: Note

    @property
    def weights(self) -> tuple[str, ...]:
        """The .safetensors files, in sorted order."""
        return tuple(sorted(f for f in self.files if f.endswith(".safetensors")))

    @property
    def others(self) -> tuple[str, ...]:
        """All other files, in sorted order."""
        return tuple(sorted(f for f in self.files if not f.endswith(".safetensors")))

    def at(self, folder: Path) -> Checkpoint:
        """The checkpoint that it is when everything is in `folder`."""
        return _Downloaded(Path(self.src), folder, self.weights, self.others)


class _Downloaded(Checkpoint):
    """A folder that goes by its Hub id, as messages and reports should say."""

    @property
    def is_file(self) -> bool:
        """Whether it is a single .safetensors file."""
        return False


def find_remote(src: str, note: Note) -> RemoteCheckpoint:
    """What a Hub id, `owner/name` or `owner/name@revision`, stands for.

    Raises UsageError for what is no Hub id, NeuzipError for what is no plain checkpoint.
    """
    match = HUB_ID.fullmatch(src)
    if match is None or os.path.lexists(src):
        raise UsageError(
            f"`stream` takes a Hub id, and {src!r} is a path",
            did_you_mean(src) or "leave out `stream` for what is on this disk",
        )
    with explaining(src, match["repo"]):
        listing = list_repository(src, match["repo"], match["revision"], note)
    if listing.is_compressed:
        raise NeuzipError(f"{src}: is compressed already", "to restore it: neuzip decompress SRC DST")
    listing.tell_left_out(note)
    files = {file.path: file for file in listing.files if _is_part(file.path)}
    return RemoteCheckpoint(src, listing.repo_id, listing.commit, files, note)


def _is_part(name: str) -> bool:
    """Whether a file of a folder belongs to its checkpoint, as find_checkpoint has it."""
    return ".git" not in name.split("/") and not name.startswith(tuple(f"{f}/" for f in SKIPPED_FOLDERS))


def read_headers(remote: RemoteCheckpoint) -> dict[str, Header]:
    """The headers of all weight files, by requests for their beginnings. Raises NeuzipError."""
    with ThreadPoolExecutor(HEADERS_AT_ONCE, thread_name_prefix="neuzip-headers") as pool:
        return dict(zip(remote.weights, pool.map(lambda f: _header(remote, f), remote.weights), strict=True))


def _header(remote: RemoteCheckpoint, file: str) -> Header:
    size, name = remote.files[file].nbytes, f"{remote.src}: {file}"
    if size < 8:
        raise FormatError(name, f"{size} bytes are too few for a safetensors file")
    start = read_range(remote, file, 0, min(size, HEADER_GUESS))
    if (error := other_format(name, start)) is not None:
        raise error
    stop = 8 + int.from_bytes(start[:8], "little")
    if stop > min(size, 8 + MAX_HEADER):
        raise FormatError(
            name, f"not a safetensors file: its header would have {stop - 8} bytes", field="header length"
        )
    if stop > len(start):
        start += read_range(remote, file, len(start), stop)
    return parse_header(start[:stop], name, size - stop)


def read_range(remote: RemoteCheckpoint, file: str, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file, which stay in memory. Raises NeuzipError."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}

    def ask() -> bytes:
        answer = get_session().get(
            hf_hub_url(remote.repo_id, file, revision=remote.commit),
            headers={**build_hf_headers(), **headers},
            timeout=HF_HUB_DOWNLOAD_TIMEOUT,
        )
        hf_raise_for_status(answer)
        return bytes(answer.content)

    with explaining(f"{remote.src}: {file}", remote.repo_id):
        content = patiently(ask, remote.note)
    if len(content) != stop - start:
        raise NeuzipError(
            f"{remote.src}: {file}: the Hub sent {len(content):,} bytes instead of {stop - start:,}",
            "repeat the command; without `stream` it asks for whole files",
        )
    return content


def download(remote: RemoteCheckpoint, file: str, folder: Path) -> None:
    """Bring a file to its place below `folder`; one that is there already is only compared with its digest.

    Raises VerificationError for one that has not the digest that the Hub names, and removes it.
    """
    from huggingface_hub import hf_hub_download

    # hf_xet would keep up to 10 GB of what it downloads; it reads this when it is first used.
    os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
    path, expected = folder / file, remote.files[file]
    if not (path.is_file() and path.stat().st_size == expected.nbytes):
        with explaining(f"{remote.src}: {file}", remote.repo_id), saving(path):
            patiently(
                lambda: hf_hub_download(remote.repo_id, file, revision=remote.commit, local_dir=folder),
                remote.note,
            )
    if not expected.matches(path):
        path.unlink(missing_ok=True)
        raise VerificationError(
            f"{remote.src}: {file}: what came has not the digest that the Hub names", "repeat the command"
        )
