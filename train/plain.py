"""A trained model as a plain checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.compress.workspace import copy_file, permissions
from neuzip.formats.checkpoint import PICKLES, find_checkpoint
from neuzip.runtime.hf.messages import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
