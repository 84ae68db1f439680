"""The state of a stream from the Hub: what its workspace is for, and what has gone to the draft already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.checkpoint import OWN_FOLDER
from neuzip.formats.hub.draft import Draft
from neuzip.formats.hub.listing import HubFile
from neuzip.formats.hub.stream import RemoteCheckpoint

from .rules import Rule
from .workspace import remove, write_file, writing

STATE_PATH = f"{OWN_FOLDER}/stream.json"
"""Where a workspace has its state."""


@dataclass(frozen=True)
class HubState:
    """What a workspace is for: it goes on only with an equal one. `sent` are the files of the draft."""

    repo_id: str
    commit: str
    rules: list[dict[str, Any]]
    activations: str | None
    push_to: str | None
    sent: dict[str, HubFile] = field(default_factory=dict, compare=False)

    def save(self, work: Path) -> None:
        """Write it into a workspace."""
        write_file(work / STATE_PATH, (json.dumps(asdict(self), indent=2) + "\n").encode())


def new_state(
    remote: RemoteCheckpoint, rules: Sequence[Rule], activations: str | None, draft: Draft | None
) -> HubState:
    """The state of a run that has sent nothing yet."""
    as_stored = json.loads(json.dumps([rule.to_json() for rule in rules]))
    push_to = None if draft is None else str(draft.target)
    return HubState(remote.repo_id, remote.commit, as_stored, activations, push_to)


def load_state(folder: Path) -> HubState | None:
    """The state in a workspace, or in a result that a killed run had just published. Raises FormatError."""
    path = folder / STATE_PATH
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        sent = {name: HubFile(**file) for name, file in document.pop("sent").items()}
        return HubState(**document, sent=sent)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(path, "is not what this neuzip writes", hint=f"remove {folder}") from error


def begin_or_resume(work: Path, state: HubState, overwrite: bool) -> HubState:
    """The state of the run that was begun in `work`, if it equals `state`, or else that of a new run.

    Raises NeuzipError for a workspace of another run, unless `overwrite`, which empties it.
    """
    earlier = load_state(work)
    if earlier == state:
        return earlier
    entries = list(work.iterdir())
    if entries and not overwrite:
        if earlier is not None and replace(earlier, commit=state.commit) == state:
            raise NeuzipError(
                f"{work}: was begun with commit {earlier.commit} of {earlier.repo_id}, which has changed"
                " since",
                f"{earlier.repo_id}@{earlier.commit} as `source` goes on with that, `overwrite=True` begins"
                " anew",
            )
        raise NeuzipError(
            f"{work}: was begun with other options or from another source",
            "repeat the command that began it, or give `overwrite=True` to begin anew",
        )
    with writing(work):
        for entry in entries:
            remove(entry)
        state.save(work)
    return state
