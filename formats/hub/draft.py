"""An upload file by file that nobody sees before it is complete.

What is uploaded and in no commit is deleted by the Hub after a while (huggingface_hub counts on 20 hours),
and a large checkpoint may take longer. So every file is committed, as soon as it is there, to a branch of its
own: the draft. In the end one commit puts all of them where they belong, sending no weights again, and the
draft goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.errors import NeuzipError, UsageError, VerificationError, WouldOverwrite
from neuzip.formats.hub.connection import Note, bars, explaining, patiently, require_token
from neuzip.formats.hub.ids import HUB_ID, did_you_mean
from neuzip.formats.hub.listing import HubFile, list_files
from neuzip.formats.hub.push import Pushed, is_of_a_checkpoint
from neuzip.formats.hub.push_plan import PushPlan

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"


@dataclass(frozen=True)
class HubTarget:
    """Where a checkpoint is to be pushed: a repository, and a branch of it or None for the main one."""

    repo_id: str
    revision: str | None = None

    @property
    def draft(self) -> str:
        """The branch that gathers the files."""
        return f"neuzip-draft-{self.revision or MAIN}"

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


def parse_target(text: str) -> HubTarget:
    """A target from `owner/name` or `owner/name@branch`. Raises UsageError.

    >>> parse_target("me/model@v1").draft
    'neuzip-draft-v1'
    """
    match = HUB_ID.fullmatch(text)
    if match is None:
        raise UsageError(
            f"`push_to`: {text!r} has not the form owner/name or owner/name@branch", did_you_mean(text)
        )
    return HubTarget(match["repo"], match["revision"])


class Draft:
    """The files of one upload, gathered on a branch of their own. `note` is told of waits.

    Everything raises NeuzipError.
    """

    def __init__(self, target: HubTarget, note: Note) -> None:
        self.target = target
        self._note = note

    def begin(self, *, private: bool, overwrite: bool) -> None:
        """Make the repository and the draft where there are none, and refuse what `publish` would refuse.

        A draft that is there was begun by an earlier run, which may have done more than it lived to tell.
        """
        require_token()
        target = self.target
        with self._explaining():
            api = _api()
            patiently(
                lambda: api.create_repo(target.repo_id, private=private or None, exist_ok=True),
                self._note, connected=False,
            )  # fmt: skip
            _, is_private, _ = list_files(target.repo_id, target.repo_id, None, self._note)
            if private and not is_private:
                raise NeuzipError(
                    f"{target.repo_id}: is there already, and is public",
                    "make it private in its settings, or leave out `private`",
                )
            branches = self._branches(api)
            base = target.revision if self._is_there(branches) else None
            if target.draft not in branches:
                if base == target.revision and not overwrite:
                    self._refuse_older(self._files(base))
                patiently(
                    lambda: api.create_branch(
                        target.repo_id, branch=target.draft, revision=base, exist_ok=True
                    ),
                    self._note,
                )

    def files(self) -> dict[str, HubFile]:
        """What the draft holds, by path; nothing if there is none."""
        with self._explaining():
            return self._files(self.target.draft) if self.target.draft in self._branches(_api()) else {}

    def add(self, name: str, path: Path) -> HubFile:
        """Upload a file, commit it to the draft, and see that it arrived with the bytes that are here."""
        from huggingface_hub import CommitOperationAdd

        with self._explaining():
            commit = patiently(
                lambda: _api().create_commit(
                    self.target.repo_id, [CommitOperationAdd(name, path)], revision=self.target.draft,
                    commit_message=f"{name}, of a checkpoint that is not complete yet",
                ),
                self._note,
            )  # fmt: skip
            arrived = self._files(commit.oid).get(name)
        if arrived is None or not arrived.matches(path):
            raise VerificationError(
                f"{self.target}: {name}: is not there as it was sent",
                "repeat the command; does a .gitignore in the repository exclude it?",
            )
        return arrived

    def publish(
        self, plan: PushPlan, sent: Mapping[str, HubFile], *, message: str | None = None, overwrite: bool
    ) -> Pushed:
        """Make all files of a plan visible in one commit. `sent` are those that the draft holds.

        Where a run that was killed has done so already, nothing is changed but that the draft goes.
        """
        with self._explaining():
            return self._publish(plan, sent, message or "Upload with neuzip", overwrite)

    def _publish(self, plan: PushPlan, sent: Mapping[str, HubFile], message: str, overwrite: bool) -> Pushed:
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        api, target, note = _api(), self.target, self._note
        if not self._is_there(self._branches(api)):
            branch = str(target.revision)
            patiently(lambda: api.create_branch(target.repo_id, branch=branch, exist_ok=True), note)
            overwrite = True  # what is there is what main has
        head, _, files = list_files(str(target), target.repo_id, target.revision, note)
        older = {file.path: file for file in files}
        deleted: tuple[str, ...] = ()
        if not _holds(older, plan, sent):
            if not overwrite:
                self._refuse_older(older)
            wanted = {file.path for file in plan.files}
            deleted = tuple(sorted(path for path in older if is_of_a_checkpoint(path) and path not in wanted))
            operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
                *map(CommitOperationDelete, deleted),
                *(CommitOperationCopy(name, name, src_revision=target.draft) for name in sent),
                *(CommitOperationAdd(f.path, f.content) for f in plan.files if f.path not in sent),
            ]
            head = patiently(
                lambda: api.create_commit(
                    target.repo_id, operations,
                    commit_message=message, revision=target.revision, parent_commit=head,
                ),
                note,
            ).oid  # fmt: skip
            if not _holds(self._files(head), plan, sent):
                raise VerificationError(
                    f"{target}: not all files are there as they were sent", "repeat the command"
                )
        if target.draft in self._branches(api):
            patiently(lambda: api.delete_branch(target.repo_id, branch=target.draft), note)
        return Pushed(plan.url, head, deleted, plan.paths)

    def _refuse_older(self, files: Mapping[str, HubFile]) -> None:
        older = sorted(filter(is_of_a_checkpoint, files))
        if older:
            raise WouldOverwrite(
                f"{self.target}: holds a checkpoint already, with {older[0]}",
                "give `overwrite=True` to replace it (its history keeps the old one), or another branch",
            )

    def _is_there(self, branches: AbstractSet[str]) -> bool:
        """Whether the branch that is to be written is one of those that there are."""
        revision = self.target.revision
        return revision is None or revision.startswith("refs/") or revision in branches

    def _branches(self, api: HfApi) -> set[str]:
        refs = patiently(lambda: api.list_repo_refs(self.target.repo_id), self._note)
        return {branch.name for branch in refs.branches}

    def _files(self, revision: str | None) -> dict[str, HubFile]:
        _, _, files = list_files(str(self.target), self.target.repo_id, revision, self._note)
        return {file.path: file for file in files}

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        with explaining(str(self.target), self.target.repo_id, note=self._note), bars(False):
            yield


def _holds(files: Mapping[str, HubFile], plan: PushPlan, sent: Mapping[str, HubFile]) -> bool:
    """Whether a commit has every file of a plan with its content, and no weights beside them."""
    for file in plan.files:
        there = files.get(file.path)
        if there is None or not (
            there == sent[file.path] if file.path in sent else there.matches(file.content)
        ):
            return False
    return set(filter(is_of_a_checkpoint, files)) <= {file.path for file in plan.files}


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi()
