"""The identity of a run: by it a later run knows whether a folder was begun, or made, by the same command.

It is stored as `neuzip/plan.json` in the workspace and in the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from neuzip.formats.checkpoint import OWN_FOLDER, Checkpoint
from neuzip.formats.manifest import VERSION

from .rules import Rule

RUN_ID_PATH = f"{OWN_FOLDER}/plan.json"
"""Where a workspace, and later the result, has the identity of its run."""


def run_identity(
    rules: Sequence[Rule],
    checkpoint: Checkpoint,
    file_bytes: Callable[[str], int],
    activations: str | None = None,
    base_sizes: Mapping[str, int] | None = None,
    prepared: str | None = None,
) -> bytes:
    """The identity of a run: its rules and options, and the sizes of the files that they were used on.

    `file_bytes` gives the size of a file of `checkpoint`, the source. `base_sizes` are those of the restored
    weight files of the base, if a delta is made. `prepared` is the identity of codes that were prepared.
    """
    document: dict[str, object] = {
        "version": VERSION,
        "rules": [rule.to_json() for rule in rules],
        "source": {f: file_bytes(f) for f in (*checkpoint.weights, *checkpoint.others)},
    }
    document |= {} if activations is None else {"activations": activations}
    document |= {} if base_sizes is None else {"against": dict(base_sizes)}
    document |= {} if prepared is None else {"prepared": prepared}
    return (json.dumps(document, indent=2) + "\n").encode()


def is_of_run(folder: Path, identity: bytes) -> bool:
    """Whether a folder was begun, or made, by a run with this identity."""
    path = folder / RUN_ID_PATH
    return path.is_file() and path.read_bytes() == identity
