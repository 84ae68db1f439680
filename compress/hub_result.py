"""Whether a result that is there is what a stream from the Hub would make, found out without a download.

A lossless result tells: its files are restored in memory, and have to have the digests that the Hub names.
Any other is known only by the state that its run has left, which names the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from neuzip.errors import FormatError, VerificationError
from neuzip.formats.checkpoint import read_stored_files
from neuzip.formats.hub.stream import RemoteCheckpoint

from .device import Device
from .folder_checks import check_rewritten
from .progress import OnBytes
from .sources.folder import FolderSource
from .tensor_checks import check_tensors
from .workers import Workers


def is_made_of(
    remote: RemoteCheckpoint,
    dst: Path,
    device: Device,
    workers: Workers,
    on_bytes: OnBytes,
    *,
    has_state: bool,
) -> bool:
    """Whether the folder `dst` is intact, and what a run of the same options makes of `remote`.

    `has_state` says that the state of such a run, of the same commit, is there. Without it only a lossless
    result is known.
    """
    try:
        return _restores_to(remote, dst, device, workers, on_bytes, has_state)
    except (FormatError, VerificationError):
        return False


def _restores_to(
    remote: RemoteCheckpoint, dst: Path, device: Device, workers: Workers, on_bytes: OnBytes, has_state: bool
) -> bool:
    stored = read_stored_files(dst)
    with FolderSource(dst, device) as result:
        if result.checkpoint.weights != remote.weights:
            return False
        check_rewritten(result)
        for file in remote.weights:
            tensors = list(result.tensors(file))
            if has_state and not all(t.record is None or t.record.lossless for t in tensors):
                for _ in check_tensors(result, tensors, workers, on_bytes=on_bytes):
                    pass
            elif not remote.files[file].matches_pieces(_restored(result, file, on_bytes)):
                return False
            for tensor in tensors:
                result.check_streams(tensor)
    return all(
        file in stored and remote.files[file].matches(dst / stored[file].place(file))
        for file in remote.others
    )


def _restored(result: FolderSource, file: str, on_bytes: OnBytes) -> Iterator[bytes | memoryview]:
    """A file as it was before compression, in pieces."""
    yield result.header(file).raw
    for tensor in result.tensors(file):
        read = result.reader(tensor)
        for start, stop in tensor.pieces():
            yield read(start, stop).data
            on_bytes(stop - start)
