"""Files that are somebody's own and lie beside a model by accident: keys, passwords, histories, logs of runs.

One rule for all commands, by names alone: nothing is opened. `compress` carries such files, as it has to give
back every file, and lists them; `push` refuses them until it is told that they may be seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import Checkpoint

SHOWN = 20
"""Names of a kind that a message lists; --json lists all."""


@dataclass(frozen=True)
class PrivateKind:
    """Names of private files: globs for the last part of a path, and for the folders above it.

    Letters may be small or capital in a path; here they are small.
    """

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...] = ()

    def matches(self, path: str) -> bool:
        """Whether a path with forward slashes is of this kind."""
        *folders, file = path.lower().split("/")
        return any(fnmatchcase(file, glob) for glob in self.files) or any(
            fnmatchcase(folder, glob) for folder in folders for glob in self.folders
        )


PRIVATE_KINDS = (
    PrivateKind(
        "keys",
        ("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "id_rsa*", "id_dsa*",
         "id_ecdsa*", "id_ed25519*"),
        (".ssh", ".gnupg"),
    ),
    PrivateKind(
        "passwords and tokens",
        (".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc",
         ".pgpass", ".my.cnf", ".htpasswd", ".s3cfg", ".boto", ".dockercfg", ".vault-token", "credentials",
         "credentials.json", "credentials.y*ml", "*_credentials.json", "client_secret*.json",
         "service[-_]account*.json", "secrets.json", "secrets.toml", "secrets.y*ml", "kaggle.json", "token",
         ".token", "token.txt", ".hf_token", "hf_token", "hf_token.txt", "stored_tokens"),
        (".aws", ".azure", ".gcloud", "gcloud", ".kube", ".docker", ".huggingface", ".kaggle"),
    ),
    PrivateKind(
        "histories and drafts",
        (".*_history", ".*-history", ".viminfo", ".lesshst", ".*.sw[op]"),
        (".ipynb_checkpoints",),
    ),
    PrivateKind(
        "logs of runs",
        ("*.log", "nohup.out", "slurm-*.out", "events.out.tfevents.*"),
        ("wandb", "mlruns", "lightning_logs", "swanlog", ".neptune", ".aim"),
    ),
)  # fmt: skip
"""What counts as private, kind by kind; docs/how-to/hub.md has the same table."""

PUBLIC = ("*.example", "*.sample", "*.template", "*.pub", "*.py")
"""Names that are not private whatever else they match, unless a folder is: samples, public keys, code."""


def private_kind(path: str) -> str | None:
    """The kind of a private file by its path, with forward slashes; None for every other file.

    >>> private_kind("deploy/.env"), private_kind(".aws/config"), private_kind("tokenizer.json")
    ('passwords and tokens', 'passwords and tokens', None)
    """
    folder, _, file = path.rpartition("/")
    if any(fnmatchcase(file.lower(), glob) for glob in PUBLIC):
        path = f"{folder}/"
    return next((kind.name for kind in PRIVATE_KINDS if kind.matches(path)), None)


def private_files(checkpoint: Checkpoint) -> dict[str, str]:
    """The private files of a checkpoint: paths, in sorted order, and the kind of each.

    A link counts by its own path and, where it leads out of the folder, by that of its target: of the
    folders above that only the nearest counts.
    """
    kinds = {file: private_kind(file) or _kind_of_target(checkpoint.root, file) for file in checkpoint.others}
    return {file: kind for file, kind in kinds.items() if kind is not None}


def _kind_of_target(root: Path, file: str) -> str | None:
    path = Path(os.path.realpath(root / file))
    if path.is_relative_to(os.path.realpath(root)):
        return None
    return private_kind(f"{path.parent.name}/{path.name}")


def listed(files: Mapping[str, str]) -> list[str]:
    """A line for each kind of private files: the kind, how many there are, and their names."""
    lines = []
    for kind in PRIVATE_KINDS:
        names = [file for file, its in files.items() if its == kind.name]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{kind.name}: {', '.join(names[:SHOWN])}{more}")
    return lines


def refuse_private(files: Mapping[str, str], target: str, allowed: bool) -> None:
    """Raise NeuzipError for private files that would go to a repository, `target`, unless it is `allowed`."""
    if files and not allowed:
        raise NeuzipError(
            f"{target}: {len(files)} {'file looks' if len(files) == 1 else 'files look'} private and would be"
            f" uploaded: {'; '.join(listed(files))}",
            "remove them from the folder, or give `allow_private_files=True` if they may be seen",
        )
