"""What a repository of the Hub holds at a commit, and whether a copy of a file is right."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError, UsageError, VerificationError
from neuzip.formats.checkpoint import CHUNK, MANIFEST_PATH, PICKLES
from neuzip.formats.hub.connection import Note, explaining, odd_answer, patiently
from neuzip.formats.hub.ids import HUB_ID, did_you_mean
from neuzip.formats.hub.notes import pass_over
from neuzip.formats.records import is_safe_path

DUPLICATES = (
    "*pytorch_model*.bin", "*pytorch_model*.bin.index.json", "*adapter_model.bin", "*consolidated*.pth",
    "*.ckpt", "*tf_model*.h5", "*flax_model*.msgpack", "*rust_model.ot", "*.onnx", "*.onnx_data",
    "*openvino_model*.bin", "*openvino_model*.xml", "*.tflite", "*.gguf", "*.mlmodel", "*.mlpackage/*",
)  # fmt: skip
"""Names that libraries give to a model's weights in other formats than safetensors."""

HASHING_THREADS = 4


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, its size in bytes, and what tells whether a copy is right.

    That is the SHA-256 of its content where the Hub keeps it outside of git, and else git's id of it.
    """

    path: str
    nbytes: int
    sha256: str | None
    blob_id: str | None

    def matches(self, content: Path | bytes) -> bool:
        """Whether something has the content of this file."""
        if isinstance(content, bytes):
            nbytes, pieces = len(content), iter([content])
        elif content.is_file():
            nbytes, pieces = content.stat().st_size, _pieces(content)
        else:
            return False
        return nbytes == self.nbytes and self.matches_pieces(pieces)

    def matches_pieces(self, pieces: Iterable[bytes | memoryview]) -> bool:
        """Whether pieces, one after the other, are the content of this file."""
        if self.sha256 is not None:
            return _digest(hashlib.sha256(), pieces) == self.sha256
        return _digest(hashlib.sha1(b"blob %d\0" % self.nbytes), pieces) == self.blob_id


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            yield piece


def _digest(running: hashlib._Hash, pieces: Iterable[bytes | memoryview]) -> str:
    for piece in pieces:
        running.update(piece)
    return running.hexdigest()


@dataclass(frozen=True)
class Listing:
    """What a repository holds at a commit; `left_out` are weights in other formats, which are not wanted."""

    src: str
    repo_id: str
    commit: str
    private: bool
    files: tuple[HubFile, ...]
    left_out: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        """Size of the wanted files in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def is_compressed(self) -> bool:
        """Whether neuzip compressed it."""
        return any(file.path == MANIFEST_PATH for file in self.files)

    def tell_left_out(self, note: Note) -> None:
        """Say what is not downloaded, if anything."""
        if self.left_out:
            size = sum(file.nbytes for file in self.left_out)
            names = ", ".join(file.path for file in self.left_out)
            note(f"{self.src}: left out {size:,} bytes of weights in other formats: {names}")


def find_repository(src: str, *, note: Note = pass_over) -> Listing:
    """List a checkpoint of the Hub by its id, `owner/name` or `owner/name@revision`. Raises NeuzipError."""
    match = HUB_ID.fullmatch(src)
    if match is None:
        raise UsageError(
            f"`repo_id`: {src!r} has not the form owner/name or owner/name@revision", did_you_mean(src)
        )
    with explaining(src, match["repo"], note=note):
        return list_repository(src, match["repo"], match["revision"], note)


def list_repository(src: str, repo_id: str, revision: str | None, note: Note) -> Listing:
    """List a checkpoint of the Hub. Raises NeuzipError if it has no safetensors, or names that go astray."""
    commit, private, files = list_files(src, repo_id, revision, note)
    names = [file.path for file in files]
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.endswith(PICKLES) for name in names):
            raise NeuzipError(
                f"{src}: the repository has no .safetensors files, only pickles, which can run code",
                "load the model with transformers where you trust it: save_pretrained writes safetensors",
            )
        raise NeuzipError(f"{src}: the repository has no .safetensors files", "is this the right one?")
    left_out = () if MANIFEST_PATH in names else tuple(f for f in files if _is_duplicate(f.path))
    return Listing(src, repo_id, commit, private, tuple(f for f in files if f not in left_out), left_out)


def _is_duplicate(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DUPLICATES)


def list_files(
    src: str, repo_id: str, revision: str | None, note: Note
) -> tuple[str, bool, tuple[HubFile, ...]]:
    """The commit that a revision is now, whether the repository is private, and its files.

    Raises FormatError for a name that is no path inside the folder, NeuzipError for values that the Hub would
    not send, and what huggingface_hub raises.
    """
    from huggingface_hub import HfApi

    info = patiently(
        lambda: HfApi().model_info(repo_id, revision=revision, files_metadata=True), note, connected=False
    )
    files = []
    for file in info.siblings or []:
        if not is_safe_path(file.rfilename):
            raise FormatError(src, f"{file.rfilename!r} is not a path inside the folder")
        sha256 = file.lfs.sha256 if file.lfs is not None else None
        if not (_is(int, file.size) and _is(str, sha256) and _is(str, file.blob_id)):
            raise odd_answer(src)
        files.append(HubFile(file.rfilename, file.size or 0, sha256, file.blob_id))
    if info.sha is None:
        raise NeuzipError(f"{src}: the Hub does not say which commit this is", "try again later")
    if re.fullmatch(r"[0-9a-f]{40,64}", str(info.sha)) is None:
        raise odd_answer(src)
    return info.sha, bool(info.private), tuple(files)


def _is(kind: type, value: object) -> bool:
    """Whether a value of an answer has a type, or is not there."""
    return value is None or isinstance(value, kind)


def not_as_on_the_hub(listing: Listing, damaged: Sequence[str]) -> VerificationError:
    """What to say of files that arrived with other bytes, and were removed."""
    return VerificationError(
        f"{listing.src}: {len(damaged)} of {len(listing.files)} files did not arrive as they are on the Hub: "
        f"{', '.join(damaged)}",
        "repeat the command: it downloads them once more, and only them",
    )
