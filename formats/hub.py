"""The Hugging Face Hub: checkpoints by their id, and compressed folders with a card of their own.

All traffic is huggingface_hub's, with its cache, its access token and its environment variables. What it
raises becomes a NeuzipError that says what to do and never holds the token.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from neuzip.errors import FormatError, NeuzipError, UsageError, VerificationError, WouldOverwrite

from .checkpoint import (
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    PICKLES,
    find_checkpoint,
    read_stored_files,
    stored_files_to_json,
)
from .manifest import is_safe_path
from .model_card import CARD, ENDING, model_card

HUB_FILES = (CARD, ".gitattributes", ".gitignore")
"""Files that the Hub reads or writes itself. The original's own are kept below neuzip/original."""

DUPLICATES = (
    "*pytorch_model*.bin", "*pytorch_model*.bin.index.json", "*adapter_model.bin", "*consolidated*.pth",
    "*.ckpt", "*tf_model*.h5", "*flax_model*.msgpack", "*rust_model.ot", "*.onnx", "*.onnx_data",
    "*openvino_model*.bin", "*openvino_model*.xml", "*.tflite", "*.gguf", "*.mlmodel", "*.mlpackage/*",
)  # fmt: skip
"""Names that libraries give to a model's weights in other formats than safetensors."""

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"

Note = Callable[[str], None]


def ignore(_: str) -> None:
    """Pass over a remark."""


def resolve_source(src: str | os.PathLike[str], *, note: Note = ignore, progress: bool = False) -> Path:
    """The path of a checkpoint, downloaded first if `src` is a Hub id: `owner/name` or `owner/name@revision`.

    What exists on disk is a path, and so is all that has not the form of a Hub id. Downloads are kept in
    huggingface_hub's cache. They hold every file of the repository, so that all of it can be restored later;
    only the same weights in other formats (`DUPLICATES`) are left out. Of a compressed repository nothing is
    left out. Without a connection, a copy in the cache is taken.

    `note` is told of what was left out and of a copy taken; `progress` lets huggingface_hub draw its bars on
    a terminal. Raises NeuzipError, for a repository without safetensors before anything is downloaded.
    """
    path = Path(src)
    match = _ID.fullmatch(os.fspath(src))
    if match is None or path.suffix == ".safetensors" or os.path.lexists(path):
        return path
    with _hub(str(src), match["repo"], "there is no such folder here, and "), _bars(progress):
        return _download(str(src), match["repo"], match["revision"], note)


def _download(src: str, repo_id: str, revision: str | None, note: Note) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    except HfHubHTTPError:
        raise
    except _transport_errors() as unreachable:
        try:
            cached = snapshot_download(
                repo_id, revision=revision, ignore_patterns=list(DUPLICATES), local_files_only=True
            )
        except LocalEntryNotFoundError:
            raise unreachable from None
        note(f"{src}: the Hub cannot be reached; taken from the cache")
        return Path(cached)

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    for name in sizes:
        if not is_safe_path(name):
            raise FormatError(src, f"{name!r} is not a path inside the folder")
    if not any(name.endswith(".safetensors") for name in sizes):
        if any(name.endswith(PICKLES) for name in sizes):
            raise NeuzipError(
                f"{src}: the repository has no .safetensors files, only pickles, which can run code",
                "load the model with transformers where you trust it: save_pretrained writes safetensors",
            )
        raise NeuzipError(f"{src}: the repository has no .safetensors files", "is this the right one?")
    left_out: list[str] = []
    if MANIFEST_PATH not in sizes:
        left_out = [name for name in sizes if any(fnmatch.fnmatchcase(name, glob) for glob in DUPLICATES)]
    folder = snapshot_download(
        repo_id, revision=revision, ignore_patterns=list(DUPLICATES) if left_out else None
    )
    if left_out:
        size = sum(sizes[name] for name in left_out)
        note(f"{src}: left out {size:,} bytes of weights in other formats: {', '.join(left_out)}")
    return Path(folder)


@dataclass(frozen=True)
class PushedFile:
    """A file of an upload: its path in the repository, its size, and where its bytes are."""

    path: str
    nbytes: int
    content: Path | bytes


@dataclass(frozen=True)
class PushPlan:
    """What `push` will upload, and the model card, which is one of the files."""

    folder: Path
    repo_id: str
    revision: str | None
    card: str
    files: tuple[PushedFile, ...]

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def url(self) -> str:
        """The page of the repository, at the revision if there is one."""
        from urllib.parse import quote

        return f"{_endpoint()}/{self.repo_id}" + (
            f"/tree/{quote(self.revision, safe='')}" if self.revision is not None else ""
        )


def plan_push(folder: str | os.PathLike[str], repo_id: str, *, revision: str | None = None) -> PushPlan:
    """Decide how a compressed folder becomes a repository. Needs no network. Raises NeuzipError.

    README.md gives way to a model card, and .gitattributes and .gitignore are the Hub's business. Those of
    the original go to neuzip/original, so that what is pulled verifies and restores to the same files.
    """
    match = _ID.fullmatch(repo_id)
    if match is None or match["revision"] is not None:
        raise UsageError(
            f"REPO_ID: {repo_id!r} has not the form owner/name",
            "for another branch than main give --revision" if match is not None else "",
        )
    checkpoint = find_checkpoint(folder)
    root = checkpoint.root
    if not checkpoint.is_compressed_folder:
        raise NeuzipError(
            f"{folder}: is not a folder that neuzip compressed",
            f"compress it first: neuzip compress {folder} DST",
        )
    stored = read_stored_files(root)
    moved = [name for name in HUB_FILES if name in stored and stored[name].kind == "carried"]

    contents: dict[str, Path | bytes] = {}
    for name in (*checkpoint.weights, *checkpoint.others):
        if ".cache" in name.split("/"):
            raise NeuzipError(f"{root / name}: the Hub takes no files from folders named .cache")
        if name not in HUB_FILES:
            contents[name] = root / name
    contents |= {f"{ORIGINAL_FOLDER}/{name}": root / name for name in moved}
    contents[MANIFEST_PATH] = stored_files_to_json(
        stored | {name: replace(stored[name], kind="rewritten") for name in moved}
    )
    source = repo_id if revision is None else f"{repo_id}@{revision}"
    card = model_card(checkpoint, _original_card(root, contents), repo_id, source)
    contents[CARD] = card.encode()
    return PushPlan(
        root, repo_id, revision, card,
        tuple(
            PushedFile(name, len(content) if isinstance(content, bytes) else content.stat().st_size, content)
            for name, content in sorted(contents.items())
        ),
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
    """What `push` did: the page, the commit's id, and the older files that it removed."""

    url: str
    commit: str
    deleted: tuple[str, ...]


def push(
    plan: PushPlan,
    *,
    private: bool = False,
    message: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Pushed:
    """Upload a compressed folder in one commit, and see that every file arrived. Verify it before.

    The repository is made if there is none, `private` if so wanted. A checkpoint that is there already is
    replaced with `overwrite`, and without it this is refused. Raises NeuzipError.
    """
    require_token()
    with _hub(plan.repo_id, plan.repo_id), _bars(progress):
        return _push(plan, private, message or "Upload with neuzip", overwrite)


def _push(plan: PushPlan, private: bool, message: str, overwrite: bool) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.hf_api import RepoFile

    api, repo_id, revision = HfApi(), plan.repo_id, plan.revision
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    info = api.model_info(repo_id)
    if private and not info.private:
        raise NeuzipError(
            f"{repo_id}: is there already, and is public",
            "make it private in its settings, or leave out --private",
        )
    if revision is not None:
        if not revision.startswith("refs/") and all(
            branch.name != revision for branch in api.list_repo_refs(repo_id).branches
        ):
            api.create_branch(repo_id, branch=revision)
            overwrite = True  # what is there is what main has
        info = api.model_info(repo_id, revision=revision)
    older = [file.rfilename for file in info.siblings or [] if _is_of_a_checkpoint(file.rfilename)]
    if older and not overwrite:
        raise WouldOverwrite(
            f"{repo_id}: holds a checkpoint already, with {older[0]}",
            "give --overwrite to replace it (its history keeps the old one), or another --revision",
        )
    sent = {file.path: file.nbytes for file in plan.files}
    deleted = tuple(sorted(set(older) - set(sent)))
    commit = api.create_commit(
        repo_id,
        [
            *(CommitOperationDelete(path) for path in deleted),
            *(CommitOperationAdd(file.path, file.content) for file in plan.files),
        ],
        commit_message=message,
        revision=revision,
        parent_commit=info.sha,
    )
    tree = api.list_repo_tree(repo_id, recursive=True, revision=commit.oid)
    arrived = {file.path: file.size for file in tree if isinstance(file, RepoFile)}
    lost = [path for path, nbytes in sent.items() if arrived.get(path) != nbytes]
    if lost:
        raise VerificationError(
            f"{repo_id}: {len(lost)} of {len(sent)} files are not there as they were sent: {', '.join(lost)}",
            "push again with --overwrite",
        )
    return Pushed(plan.url, commit.oid, deleted)


def _is_of_a_checkpoint(path: str) -> bool:
    """Whether a file left over from another checkpoint would make a folder unreadable."""
    is_index = ".safetensors.index." in path and path.endswith(".json")
    return path.endswith(".safetensors") or is_index or path.startswith(f"{OWN_FOLDER}/")


def require_token() -> None:
    """Raise NeuzipError unless there is an access token, which pushing needs."""
    if _token() is None:
        raise NeuzipError("there is no access token for the Hub", _LOG_IN)


def _token() -> str | None:
    """The access token. One that cannot be sent is refused here: the HTTP library would print it."""
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise NeuzipError("the access token for the Hub has characters that no token has", _LOG_IN)
    return token


def _transport_errors() -> tuple[type[BaseException], ...]:
    """What is raised when the Hub cannot be reached.

    The HTTP library is requests, httpx or httpx2, as the version of huggingface_hub has it; its errors are
    among the bases of huggingface_hub's.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__)


@contextmanager
def _hub(subject: str, repo_id: str, here: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises into errors that say what to do. `here` begins those of a wrong id."""
    _token()
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ValueError, RuntimeError, *_transport_errors())):
            raise
        # A failed upload is a RuntimeError with the reason behind it.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        raise _explained(reason, subject, repo_id, here) from error


def _explained(error: BaseException, subject: str, repo_id: str, here: str) -> NeuzipError:
    from huggingface_hub import errors

    page = f"{_endpoint()}/{repo_id}"
    if isinstance(error, errors.RevisionNotFoundError):
        message, hint = "the repository has no such revision", f"its branches and tags: {page}/tree/main"
    elif isinstance(error, errors.GatedRepoError):
        message = "the repository is gated, and this account has no access"
        hint = f"ask for it at {page}; {_LOG_IN}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = f"{here}the Hub has no such repository, or it is private"
        hint = f"check the spelling; {_LOG_IN}"
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        message, hint = _refused(error.response.status_code, _cleaned(error.server_message or ""))
    elif isinstance(error, errors.OfflineModeIsEnabled):
        message = f"{here}HF_HUB_OFFLINE forbids to ask the Hub"
        hint = "unset it, or give a folder" if here else "unset it"
    elif isinstance(error, errors.HFValidationError):
        message, hint = "is no id that the Hub accepts", "an id has the form owner/name"
    elif isinstance(error, ValueError | RuntimeError):
        message, hint = _cleaned(str(error)), ""
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        hint = "HF_HOME names the folder of huggingface_hub's cache"
    else:  # The HTTP library's own words may quote the headers, and with them the token.
        message = f"{here}the Hub at {_endpoint()} cannot be reached ({type(error).__name__})"
        hint = "check the connection, and HF_ENDPOINT if it is set"
    return NeuzipError(f"{subject}: {message}", hint)


def _refused(status: int, reason: str) -> tuple[str, str]:
    """What an HTTP status means, and what to do."""
    if status == 401:
        message, hint = "the Hub does not accept the access token", _LOG_IN
    elif status == 403:
        message = "the Hub forbids this"
        hint = "the access token needs the right to do it; `hf auth whoami` tells whose it is"
    elif status in (409, 412):
        message, hint = "the repository has changed meanwhile", "repeat the command"
    elif status == 429 or status >= 500:
        message, hint = f"the Hub is overloaded or out of order ({status})", "try again later"
    else:
        message, hint = f"the Hub refuses this ({status})", ""
    return f"{message}: {reason}" if reason else message, hint


def _cleaned(text: str) -> str:
    """What somebody else wrote, on one line and without the token."""
    token = _token()
    if token is not None:
        text = text.replace(token, "***")
    return " ".join(text.split())[:500]


def _endpoint() -> str:
    """The Hub's address, without the user and password that it may hold."""
    from huggingface_hub import constants

    return re.sub(r"//[^/]*@", "//", constants.ENDPOINT)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Let huggingface_hub draw progress bars on a terminal; some of its own would go anywhere."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if (shown and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
