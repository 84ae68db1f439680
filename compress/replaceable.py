"""Which folders `--overwrite` may replace: those that hold a checkpoint, and nothing that is no part of one.

What is replaced is deleted, and a name is mistyped easily. So a folder is looked through first. Weights at
its top make it a checkpoint, and so does what neuzip or diffusers keep there. Every other file in it has to
be named by the manifest of a compressed checkpoint, to be in the new result too, or to be of a kind that
comes with weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from neuzip.formats.checkpoint import MANIFEST_PATH

WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx")
DESCRIPTIONS = (
    "*.json", "*.jsonl", "*.jinja", "*.model", "*.spm", "*.tiktoken", "merges.txt", "vocab.txt", "README*",
    "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", ".gitattributes", "modeling_*.py", "configuration_*.py",
    "tokenization_*.py", "processing_*.py", "*_processing_*.py", "loss.svg", "recovery.svg",
)  # fmt: skip
MARKS = ("*.safetensors", "*.gguf", "model_index.json", MANIFEST_PATH)
"""Any of these makes a folder a checkpoint: weights, a pipeline of diffusers, what neuzip adds."""

DOWNLOADS = ".cache/huggingface"
UNFINISHED = ".neuzip-partial"
MOST = 100_000
"""Files that are looked at: no checkpoint has more."""


def why_not(folder: Path, known: Collection[str] = ()) -> str | None:
    """Why a folder must not be replaced, in words that follow its name; None if it may be.

    `known` are paths in it that the new result holds as well.
    """
    try:
        entries = sorted(entry.name for entry in os.scandir(folder))
        if not entries:
            return None
        if not any(next(folder.glob(mark), None) for mark in MARKS):
            return f"holds {entries[0]!r}, and no checkpoint"
        named = {*known, *_named_by_manifest(folder)}
        for number, name in enumerate(_files(folder)):
            if number == MOST:
                return f"holds more than {MOST:,} files"
            if name not in named and not is_of_a_checkpoint(name):
                return f"holds {name!r}, which is no part of a checkpoint"
    except OSError as error:
        return f"cannot be looked through: {error.strerror}"
    return None


def is_of_a_checkpoint(name: str) -> bool:
    """Whether a file of this relative path may lie in a checkpoint.

    >>> is_of_a_checkpoint("unet/config.json"), is_of_a_checkpoint("thesis.docx")
    (True, False)
    """
    last = name.rpartition("/")[2].removesuffix(UNFINISHED)
    kinds = (*WEIGHTS, *DESCRIPTIONS)
    return name.startswith(f"{DOWNLOADS}/") or any(fnmatchcase(last, kind) for kind in kinds)


def _named_by_manifest(folder: Path) -> set[str]:
    """The files that a compressed checkpoint says it has; none without a manifest that can be read."""
    try:
        files = json.loads((folder / MANIFEST_PATH).read_bytes())["files"]
        return set(files) if isinstance(files, dict) else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of all that is no folder, links among them, which are not followed; in sorted order."""

    def unreadable(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders.sort()
        below = os.path.relpath(place, folder)
        prefix = "" if below == "." else f"{below}/"
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (prefix + name for name in sorted([*files, *links]))
