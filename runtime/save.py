"""`save_pretrained` for models whose weights are compressed in memory: a compressed folder again.

The engine lays the checkpoint out, as for any model, and splits it among files. It does so on tensors without
values (transformers undoes its renaming and merging on `LazyTensor`s). Each file's values are decoded when it
is written, to a plain checkpoint beside the destination, which is then compressed as by `neuzip compress` and
moved into place.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import BoundArguments
from pathlib import Path
from typing import Any

from neuzip.compress import compress
from neuzip.compress.storing import storing
from neuzip.compress.workspace import writing
from neuzip.errors import NeuzipError
from neuzip.formats.checkpoint import OWN_FOLDER, find_checkpoint, index_files


def save_container(save: Callable[[Path], None], directory: str | os.PathLike[str]) -> None:
    """Let `save` write a plain checkpoint to a folder, and move what it compresses to into `directory`.

    Files of `directory` that are no part of the checkpoint stay. Raises NeuzipError.
    """
    target = Path(os.path.abspath(directory))
    if target.is_file():
        raise NeuzipError(f"{directory}: is a file", "give the name of a folder")
    with _scratch(target) as scratch:
        with storing(target):
            save(scratch / "plain")
        compress(scratch / "plain", scratch / "compressed")
        shutil.rmtree(scratch / "plain")
        with writing(target):
            if not target.exists():
                os.replace(scratch / "compressed", target)
            else:
                _move(scratch / "compressed", target, scratch / "old")


def require_folder(residency: str, settings: Mapping[str, Any]) -> None:
    """Raise NeuzipError for arguments of `save_pretrained` that save a model to anything but one folder."""
    if settings.get("push_to_hub") or settings.get("distributed_checkpoint"):
        raise NeuzipError(
            f"a model of the residency {residency!r} is saved to a folder only",
            "save it there; `neuzip push` brings a compressed folder to the Hub",
        )


def save_call(save: Callable[..., Any], call: BoundArguments) -> None:
    """A call of an engine's `save_pretrained`, as `save_container` does it; only the main process saves."""
    if not call.arguments.get("is_main_process", True):
        return

    def save_plain(folder: Path) -> None:
        call.arguments["save_directory"] = folder
        save(*call.args, **call.kwargs)

    save_container(save_plain, call.arguments["save_directory"])


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder on the file system of `target`, for as long as it is needed."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.neuzip-", dir=target.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors\Z")


def _move(new: Path, target: Path, old: Path) -> None:
    """Move a folder's files into another, weights first, and what an earlier checkpoint left there away.

    Every file is replaced in one step.
    """
    checkpoint = find_checkpoint(new)
    for name in checkpoint.weights:
        os.replace(new / name, target / name)
    stale = [p for p in target.glob("*.safetensors") if _SHARD.search(p.name)]
    stale += target.glob("*.safetensors.index*.json")
    current = {*checkpoint.weights, *index_files(checkpoint)}
    for path in stale:
        if path.name not in current:
            path.unlink()
    if (target / OWN_FOLDER).exists():
        os.replace(target / OWN_FOLDER, old)
    os.replace(new / OWN_FOLDER, target / OWN_FOLDER)
    for name in checkpoint.others:
        if not name.startswith(OWN_FOLDER + "/"):
            os.replace(new / name, target / name)
