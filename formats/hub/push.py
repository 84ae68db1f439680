"""Uploads to the Hugging Face Hub: a compressed folder in one commit, with a card of its own.

All traffic is huggingface_hub's, with its cache, its access token and its environment variables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuzip.errors import NeuzipError, VerificationError, WouldOverwrite
from neuzip.formats.checkpoint import OWN_FOLDER
from neuzip.formats.hub.connection import Note, bars, explaining, patiently, require_token, transport_errors
from neuzip.formats.hub.listing import HubFile, list_files
from neuzip.formats.hub.notes import pass_over
from neuzip.formats.hub.private_files import refuse_private
from neuzip.formats.hub.push_plan import PushPlan

if TYPE_CHECKING:
    from huggingface_hub import HfApi


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
    note: Note = pass_over,
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
