"""The identity of a run: by it a later run knows whether a folder was begun, or made, by the same command.

It is stored as `neuzip/plan.json` in the workspace and in the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuzip.formats.checkpoint import OWN_FOLDER
from neuzip.formats.manifest import VERSION

from .scheme import Rule

RUN_ID_PATH = f"{OWN_FOLDER}/plan.json"
"""Where a workspace, and later the result, has the identity of its run."""


def run_identity(
    rules: Sequence[Rule],
    sizes: Mapping[str, int],
    activations: str | None = None,
    base_sizes: Mapping[str, int] | None = None,
) -> bytes:
    """The identity of a run: its rules and options, and the sizes in bytes of the files they were used on.

    `sizes` are those of all files of the source, weights first. `base_sizes` are those of the restored weight
    files of the base, if a delta is made.
    """
    document: dict[str, object] = {
        "version": VERSION,
        "rules": [rule.to_json() for rule in rules],
        "source": dict(sizes),
    }
    document |= {} if activations is None else {"activations": activations}
    document |= {} if base_sizes is None else {"against": dict(base_sizes)}
    return (json.dumps(document, indent=2) + "\n").encode()


def is_of_run(folder: Path, identity: bytes) -> bool:
    """Whether a folder was begun, or made, by a run with this identity."""
    path = folder / RUN_ID_PATH
    return path.is_file() and path.read_bytes() == identity
