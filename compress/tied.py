"""Which matrix of a model is its embedding and its output head in one."""

from __future__ import annotations

import os
from typing import Any

from .bitnet import config_of
from .sources.folder import FolderSource

HEADED = ("LM", "ConditionalGeneration")
"""What the names of transformers' classes contain whose models predict tokens."""


def tied_embedding(path: str | os.PathLike[str]) -> str | None:
    """The name of the tensor of a checkpoint that its config.json says both use; None if there is none.

    It is the only matrix with a row for each token of the vocabulary.
    """
    with FolderSource(path) as source:
        tokens = _vocabulary(config_of(source))
        rows = [t.name for t in source.tensors() if len(t.info.shape) == 2 and t.info.shape[0] == tokens]
    return rows[0] if len(rows) == 1 else None


def _vocabulary(config: dict[str, Any]) -> int | None:
    """How many tokens a model with a tied head knows; None for any other model."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))  # as transformers has it
    classes, tokens = config.get("architectures"), text.get("vocab_size")
    headed = isinstance(classes, list) and any(
        isinstance(name, str) and any(word in name for word in HEADED) for name in classes
    )
    return tokens if tied is not False and headed and type(tokens) is int else None
