"""A trained model as a plain checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.compress.workspace import copy_file
from neuzip.formats.checkpoint import PICKLES, find_checkpoint
from neuzip.runtime.load import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_plain(
    model: PreTrainedModel, folder: Path, like: str | os.PathLike[str] | None, without: str | None = None
) -> None:
    """Write a model into a folder, with all that the checkpoint `like` has beside weights.

    Indices and pickles are left out, and files whose names end in `without`. Raises NeuzipError.
    """
    with quiet_transformers():
        model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors makes files that nobody else may read
        shutil.copymode(folder / "config.json", weights)
    if like is None:
        return
    left_out = (".index.json", *PICKLES) if without is None else (".index.json", without, *PICKLES)
    checkpoint = find_checkpoint(like)
    for file in checkpoint.others:
        if not (folder / file).exists() and not file.endswith(left_out):
            copy_file(checkpoint.root / file, folder / file)
