"""What a push uploads: a compressed folder with a card of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuzip.errors import NeuzipError, UsageError, shell
from neuzip.formats.card.evaluation import read_evaluation
from neuzip.formats.card.model_card import CARD, is_on_hub, model_card
from neuzip.formats.card.text import ENDING
from neuzip.formats.checkpoint import (
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    base_name,
    find_checkpoint,
    read_stored_files,
    required_features,
    stored_files_to_json,
)
from neuzip.formats.hub.connection import endpoint
from neuzip.formats.hub.ids import HUB_ID, did_you_mean
from neuzip.formats.hub.private_files import private_files

HUB_FILES = (CARD, ".gitattributes", ".gitignore")
"""Files that the Hub reads or writes itself. The original's own are kept below neuzip/original."""


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
    moved = [name for name in HUB_FILES if name in stored and not stored[name].is_rewritten]

    contents: dict[str, Path | bytes] = {}
    for name in (*checkpoint.weights, *checkpoint.others):
        if ".cache" in name.split("/"):
            raise NeuzipError(f"{root / name}: the Hub takes no files from folders named .cache")
        if name not in HUB_FILES:
            contents[name] = root / name
    contents |= {f"{ORIGINAL_FOLDER}/{name}": root / name for name in moved}
    contents[MANIFEST_PATH] = stored_files_to_json(
        stored | {name: replace(stored[name], kind="rewritten") for name in moved}, base,
        required_features(checkpoint),
    )  # fmt: skip
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
