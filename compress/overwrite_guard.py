"""What `--overwrite` may replace, and what a destination may be called and where it may lie.

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

from neuzip.errors import NeuzipError, WouldOverwrite
from neuzip.formats.checkpoint import MANIFEST_PATH, find_checkpoint

from .workspace import old_name, partial_name, refuse_link

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


def refusal_to_replace(folder: Path, known: Collection[str] = ()) -> str | None:
    """Why a folder must not be replaced, as words that follow its name in a message; None if it may be.

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


def refuse_existing(dst: Path, overwrite: bool, *, file: bool = False, known: Collection[str] = ()) -> None:
    """Raise WouldOverwrite if there is something at `dst`, be it a link, but an empty folder.

    With `overwrite` a link may be replaced, and what it leads to stays; a folder only where it holds a
    checkpoint and nothing else but `known` files; and a file only by a `file`.
    """
    is_folder = dst.is_dir() and not dst.is_symlink()
    if not os.path.lexists(dst) or (is_folder and not any(dst.iterdir())):
        return
    if not overwrite:
        other = "name" if file else "`destination`"
        raise WouldOverwrite(f"{dst}: exists already", f"choose another {other}, or give `overwrite=True`")
    if is_folder and (reason := refusal_to_replace(dst, known)) is not None:
        raise WouldOverwrite(
            f"{dst}: {reason}: such a folder is not replaced",
            "choose another `destination`, or remove what is there yourself",
        )
    if not is_folder and not dst.is_symlink() and not file:
        raise WouldOverwrite(
            f"{dst}: is a file, and a folder is to be written there",
            "choose another `destination`, or remove the file yourself",
        )


def refuse_folder(dst: Path) -> None:
    """Raise NeuzipError if a file is to be written where a folder is."""
    if dst.is_dir():
        raise NeuzipError(
            f"{dst}: is a folder", "end `destination` with the name of the file that is to be made"
        )


def require_free(src: str | os.PathLike[str], dst: Path, overwrite: bool) -> None:
    """Raise NeuzipError unless a checkpoint made of `src` can be written to `dst`.

    It is asked before the long work begins. Files beside the weights of `src` are expected in an older one.
    """
    checkpoint = find_checkpoint(src)
    require_name(dst)
    refuse_nesting(checkpoint.path, dst)
    refuse_existing(dst, overwrite, known=checkpoint.others)


def require_name(dst: Path) -> None:
    """Raise NeuzipError for a DST that nothing new can be called."""
    if dst.name in ("", ".."):
        raise NeuzipError(
            f"{dst}: has no name of its own", "end `destination` with the name of what is to be made"
        )
    try:
        os.lstat(partial_name(dst))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise NeuzipError(f"{dst}: cannot be written: {error}", "choose another `destination`") from error
    refuse_link(partial_name(dst))


def refuse_nesting(src: Path, dst: Path) -> None:
    """Raise NeuzipError if one of two paths contains the other.

    A run must not read what it writes, nor replace or remove its source.
    """
    own = [] if dst.name in ("", "..") else [partial_name(dst), old_name(dst)]
    for path in (dst, *own):
        try:
            a, b = src.resolve(), path.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no name for a file
            raise NeuzipError(f"{dst}: cannot be written: {error}", "choose another `destination`") from error
        if a == b or a in b.parents or b in a.parents:
            how = "is the same place as" if a == b else "lies within" if a in b.parents else "holds"
            raise NeuzipError(f"{path}: {how} {src}", f"choose a `destination` outside {src}")
