"""A trained model as a plain checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from neuzip.compress.workspace import copy_file, permissions, writing
from neuzip.formats.checkpoint import PICKLES, find_checkpoint
from neuzip.runtime.load import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """`writing`, for what safetensors writes too: it has an error of its own for a disk that is full."""
    try:
        with writing(path):
            yield
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        with writing(path):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def write_plain(
    model: PreTrainedModel, folder: Path, like: str | os.PathLike[str] | None, without: str | None = None
) -> None:
    """Write a model into a folder, with all that the checkpoint `like` has beside weights.

    No file gets more permission bits than its counterpart there. Indices and pickles are left out, and files
    whose names end in `without`. Raises NeuzipError.
    """
    with quiet_transformers():
        model.save_pretrained(folder)
    checkpoint = None if like is None else find_checkpoint(like)
    mode = permissions(folder / "config.json", *([] if checkpoint is None else checkpoint.weight_paths()))
    for weights in folder.glob("*.safetensors"):  # safetensors makes files that nobody else may read
        weights.chmod(mode)
    if checkpoint is None:
        return
    left_out = (".index.json", *PICKLES) if without is None else (".index.json", without, *PICKLES)
    for file in checkpoint.others:
        if (folder / file).exists():
            (folder / file).chmod(permissions(folder / file, checkpoint.root / file))
        if not (folder / file).exists() and not file.endswith(left_out):
            copy_file(checkpoint.root / file, folder / file)
