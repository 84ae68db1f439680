"""The Hugging Face Hub: checkpoints by their id, and compressed folders with a card of their own.

All traffic is huggingface_hub's, with its cache, its access token and its environment variables.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.errors import (
    FULL_OR_CLOSED,
    FormatError,
    NeuzipError,
    UsageError,
    VerificationError,
    WouldOverwrite,
    shell,
)
from neuzip.formats.card.evaluation import read_evaluation
from neuzip.formats.card.model_card import CARD, is_on_hub, model_card
from neuzip.formats.card.text import ENDING
from neuzip.formats.checkpoint import (
    CHUNK,
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    PICKLES,
    base_name,
    find_checkpoint,
    read_stored_files,
    stored_files_to_json,
)
from neuzip.formats.hub.connection import (
    Note,
    bars,
    endpoint,
    explaining,
    odd_answer,
    patiently,
    require_token,
    transport_errors,
)
from neuzip.formats.hub.ids import did_you_mean
from neuzip.formats.hub.private_files import private_files, refuse_private
from neuzip.formats.manifest import is_safe_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HUB_FILES = (CARD, ".gitattributes", ".gitignore")
"""Files that the Hub reads or writes itself. The original's own are kept below neuzip/original."""

DUPLICATES = (
    "*pytorch_model*.bin", "*pytorch_model*.bin.index.json", "*adapter_model.bin", "*consolidated*.pth",
    "*.ckpt", "*tf_model*.h5", "*flax_model*.msgpack", "*rust_model.ot", "*.onnx", "*.onnx_data",
    "*openvino_model*.bin", "*openvino_model*.xml", "*.tflite", "*.gguf", "*.mlmodel", "*.mlpackage/*",
)  # fmt: skip
"""Names that libraries give to a model's weights in other formats than safetensors."""

HASHING_THREADS = 4

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
"""What has the form of a Hub id: owner/name or owner/name@revision."""


def ignore(_: str) -> None:
    """Pass over a remark."""


def log(remark: str) -> None:
    """Pass a remark to Python's logging, where a program and no person at a terminal is to be told."""
    logging.getLogger("neuzip").warning("%s", remark)


def resolve_source(
    src: str | os.PathLike[str], *, parameter: str = "source", note: Note = ignore, progress: bool = False
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


def hub_id(src: str | os.PathLike[str]) -> re.Match[str] | None:
    """The parts of what `resolve_source` would download; None for a path."""
    match = HUB_ID.fullmatch(os.fspath(src))
    return None if Path(src).suffix == ".safetensors" or os.path.lexists(src) else match


def _download(src: str, repo_id: str, revision: str | None, note: Note) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = list_repository(src, repo_id, revision, note)
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
    left_out = [glob.escape(file.path) for file in found.left_out]
    had = {file for file in found.files if _is_cached(found, file)}
    with _filling_cache():
        folder = Path(
            patiently(
                lambda: snapshot_download(repo_id, revision=revision, ignore_patterns=left_out or None), note
            )
        )
    if folder.name != found.commit:  # a commit was made since the listing
        found, had = list_repository(src, repo_id, folder.name, note), set()
    _refuse_damaged(found, [file for file in found.files if file not in had], folder)
    found.tell_left_out(note)
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


def not_as_on_the_hub(listing: Listing, damaged: Sequence[str]) -> VerificationError:
    """What to say of files that arrived with other bytes, and were removed."""
    return VerificationError(
        f"{listing.src}: {len(damaged)} of {len(listing.files)} files did not arrive as they are on the Hub: "
        f"{', '.join(damaged)}",
        "repeat the command: it downloads them once more, and only them",
    )


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


def find_repository(src: str, *, note: Note = ignore) -> Listing:
    """List a checkpoint of the Hub by its id, `owner/name` or `owner/name@revision`. Raises NeuzipError."""
    match = HUB_ID.fullmatch(src)
    if match is None:
        raise UsageError(
            f"`repo_id`: {src!r} has not the form owner/name or owner/name@revision", did_you_mean(src)
        )
    with explaining(src, match["repo"], note=note):
        return list_repository(src, match["repo"], match["revision"], note)


def repository_name(src: str) -> str:
    """The name of a repository by its id: that of `owner/name@revision` is `name`."""
    return src.partition("@")[0].rpartition("/")[2]


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


@dataclass(frozen=True)
class PushedFile:
    """A file of an upload: its path in the repository, its size, and where its bytes are."""

    path: str
    nbytes: int
    content: Path | bytes


@dataclass(frozen=True)
class PushPlan:
    """What `push` will upload, and the model card, which is one of the files.

    `base` is what the base of a delta is called; None for other checkpoints. `private` are the paths of files
    that look private, and the kind of each.
    """

    folder: Path
    repo_id: str
    revision: str | None
    card: str
    files: tuple[PushedFile, ...]
    base: str | None = None
    private: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the model card cannot say."""
        if self.base is None or is_on_hub(self.base):
            return ()
        named = f"{self.folder}: its base is called {self.base!r}, not a Hub id"
        return (f"{named}, so the card cannot link to it",)

    @property
    def paths(self) -> tuple[str, ...]:
        """What the files are called in the repository."""
        return tuple(file.path for file in self.files)

    @property
    def url(self) -> str:
        """The page of the repository, at the revision if there is one."""
        from urllib.parse import quote

        return f"{endpoint()}/{self.repo_id}" + (
            f"/tree/{quote(self.revision, safe='')}" if self.revision is not None else ""
        )


def plan_push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    revision: str | None = None,
    evaluation: Path | None = None,
) -> PushPlan:
    """Decide how a compressed folder becomes a repository. Needs no network. Raises NeuzipError.

    README.md gives way to a model card, and .gitattributes and .gitignore are the Hub's business. Those of
    the original go to neuzip/original, so that what is pulled verifies and restores to the same files.
    `evaluation` is a JSON report of `neuzip eval` on this folder, whose figures go into the card; a delta has
    none.
    """
    match = HUB_ID.fullmatch(repo_id)
    if match is None or match["revision"] is not None:
        raise UsageError(
            f"`repo_id`: {repo_id!r} has not the form owner/name",
            "for another branch than main give `revision`" if match is not None else did_you_mean(repo_id),
        )
    if revision is not None and re.fullmatch(r"[\w./-]+", revision, re.ASCII) is None:
        raise UsageError(
            f"`revision`: {revision!r} cannot be named in an id, owner/name@revision",
            "take letters, digits, '.', '_', '-' and '/'",
        )
    checkpoint = find_checkpoint(folder)
    root = checkpoint.root
    if not checkpoint.is_compressed_folder:
        raise NeuzipError(
            f"{folder}: is not a folder that neuzip compressed",
            f"compress it first: {shell('neuzip', 'compress', folder, 'DST')}",
        )
    base = base_name(checkpoint)
    if base is not None and evaluation is not None:
        raise UsageError(
            f"`evaluation`: {folder} is a delta, and none was evaluated",
            "leave it out; a report of what the delta restores to is of another folder",
        )
    stored = read_stored_files(root, delta=base is not None)
    moved = [name for name in HUB_FILES if name in stored and stored[name].kind == "carried"]

    contents: dict[str, Path | bytes] = {}
    for name in (*checkpoint.weights, *checkpoint.others):
        if ".cache" in name.split("/"):
            raise NeuzipError(f"{root / name}: the Hub takes no files from folders named .cache")
        if name not in HUB_FILES:
            contents[name] = root / name
    contents |= {f"{ORIGINAL_FOLDER}/{name}": root / name for name in moved}
    contents[MANIFEST_PATH] = stored_files_to_json(
        stored | {name: replace(stored[name], kind="rewritten") for name in moved}, base
    )
    source = repo_id if revision is None else f"{repo_id}@{revision}"
    measured = None
    if evaluation is not None:
        measured = read_evaluation(evaluation)
        measured.require_of(checkpoint, evaluation)
    card = model_card(checkpoint, _original_card(root, contents), repo_id, source, measured)
    contents[CARD] = card.encode()
    return PushPlan(
        root, repo_id, revision, card,
        tuple(
            PushedFile(name, len(content) if isinstance(content, bytes) else content.stat().st_size, content)
            for name, content in sorted(contents.items())
        ),
        base,
        private_files(checkpoint),
    )  # fmt: skip


def _original_card(root: Path, contents: dict[str, Path | bytes]) -> str:
    """The original's README.md; one written into the compressed folder counts, a card of ours does not."""
    place = contents.get(f"{ORIGINAL_FOLDER}/{CARD}", root / CARD)
    if isinstance(place, bytes) or not place.is_file():
        return ""
    text = place.read_text(encoding="utf-8", errors="replace")
    return "" if place == root / CARD and ENDING in text else text


@dataclass(frozen=True)
class Pushed:
    """What `push` did: the URL of the page, the id of the commit, and the older files that `push` deleted.

    `files` are the paths of all uploaded files. If `was_there` is True, an earlier run had uploaded
    everything.
    """

    url: str
    commit: str
    deleted: tuple[str, ...]
    files: tuple[str, ...]
    was_there: bool = False


def push(
    plan: PushPlan,
    *,
    private: bool = False,
    message: str | None = None,
    overwrite: bool = False,
    allow_private_files: bool = False,
    note: Note = ignore,
    progress: bool = False,
) -> Pushed:
    """Upload a compressed folder in one commit, and see that every file arrived. Verify it before.

    Until the commit readers see what was there before. The weights are on the Hub's storage by then: a run
    that was killed is repeated, and the Hub does not take a file twice. The repository is made if there is
    none, `private` if so wanted. A checkpoint that is there already is replaced with `overwrite`, and without
    it this is refused; so are files that look private without `allow_private_files`. `note` is told of waits.
    Raises NeuzipError.
    """
    refuse_private(plan.private, plan.repo_id, allow_private_files)
    require_token()
    with explaining(plan.repo_id, plan.repo_id, note=note), bars(progress):
        return _push(plan, private, message or "Upload with neuzip", overwrite, note)


def _push(plan: PushPlan, private: bool, message: str, overwrite: bool, note: Note) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repo_id = HfApi(), plan.repo_id
    patiently(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True), note, connected=False)
    # The Hub has what a branch begins with, so that is what a new one is compared with.
    branch = plan.revision if plan.revision is None or _has_branch(api, plan, note) else None
    main, is_private, files = list_files(repo_id, repo_id, None, note)
    head, _, files = (main, False, files) if branch is None else list_files(repo_id, repo_id, branch, note)
    if private and not is_private:
        raise NeuzipError(
            f"{repo_id}: is there already, and is public",
            "make it private in its settings, or leave out `private`",
        )
    older = [file.path for file in files if is_of_a_checkpoint(file.path)]
    deleted = tuple(sorted(set(older) - {file.path for file in plan.files}))
    if branch == plan.revision and not deleted and _is_there(plan, files):
        return Pushed(plan.url, head, (), plan.paths, was_there=True)
    # A branch at main's commit was made by a run that was killed, or holds nothing that main has not.
    if older and not overwrite and not (plan.revision is not None and head == main):
        raise WouldOverwrite(
            f"{repo_id}: holds a checkpoint already, with {older[0]}",
            "give `overwrite=True` to replace it (its history keeps the old one), or another `revision`",
        )
    added = [CommitOperationAdd(file.path, file.content) for file in plan.files]
    if branch != plan.revision:
        # A branch shows main's checkpoint from the moment that it is made: so it is made late.
        patiently(lambda: api.preupload_lfs_files(repo_id, added, free_memory=False), note)
        patiently(lambda: api.create_branch(repo_id, branch=str(plan.revision), exist_ok=True), note)
    try:
        commit = patiently(
            lambda: api.create_commit(
                repo_id, [*map(CommitOperationDelete, deleted), *added],
                commit_message=message, revision=plan.revision, parent_commit=head,
            ),
            note,
        ).oid  # fmt: skip
    except transport_errors():
        # The answer may be lost and the commit made; a second try is refused then, as the head has changed.
        commit, _, files = list_files(repo_id, repo_id, plan.revision, note)
        if commit == head or not _is_there(plan, files):
            raise
    _, _, files = list_files(repo_id, repo_id, commit, note)
    arrived = {file.path: file.nbytes for file in files}
    lost = [file.path for file in plan.files if arrived.get(file.path) != file.nbytes]
    if lost:
        raise VerificationError(
            f"{repo_id}: {len(lost)} of {len(plan.files)} files are not there as they were sent: "
            f"{', '.join(lost)}",
            "push again with `overwrite=True`",
        )
    return Pushed(plan.url, commit, deleted, plan.paths)


def _has_branch(api: HfApi, plan: PushPlan, note: Note) -> bool:
    """Whether the revision of a push is there already."""
    if plan.revision is None or plan.revision.startswith("refs/"):
        return True
    branches = patiently(lambda: api.list_repo_refs(plan.repo_id).branches, note)
    return any(branch.name == plan.revision for branch in branches)


def _is_there(plan: PushPlan, files: Iterable[HubFile]) -> bool:
    """Whether a repository has all files of a push with the same content."""
    there = {file.path: file for file in files}
    if any(file.path not in there or there[file.path].nbytes != file.nbytes for file in plan.files):
        return False
    return all(there[file.path].matches(file.content) for file in plan.files)


def is_of_a_checkpoint(path: str) -> bool:
    """Whether a file left over from another checkpoint would make a folder unreadable."""
    is_index = ".safetensors.index." in path and path.endswith(".json")
    return path.endswith(".safetensors") or is_index or path.startswith(f"{OWN_FOLDER}/")
