"""Tokenizers of checkpoints, and errors that name the file where one fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from neuzip.errors import FormatError, NeuzipError
from neuzip.formats.config_section import read_config
from neuzip.runtime.hf.messages import is_panic, quiet_transformers, reason_of, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""A tokenizer of transformers has at least one of these."""


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder, plain or compressed. Raises NeuzipError."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # version 5.0 would make one up
        raise NeuzipError(
            f"{path}: there is no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...)",
            "copy the tokenizer's files there, or call save_pretrained of the tokenizer",
        )
    if (folder / "config.json").is_file():
        read_config(folder / "config.json")  # which transformers would blame on the tokenizer
    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False
            )
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise refusal(folder, "load its tokenizer", error) from error
    longest: object = tokenizer.model_max_length
    if not isinstance(longest, int | float):  # which transformers finds out at the first text
        raise FormatError(folder, f"{longest!r} is no number of tokens", field="model_max_length")
    return tokenizer


@contextmanager
def naming_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise FormatError that names the file where a tokenizer fails at what it is given.

    tokenizers, a library in Rust, raises plain Exception for errors of its own, and a BaseException where it
    panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        folder = Path(tokenizer.name_or_path)
        path = folder / TOKENIZER_FILES[0]
        raise FormatError(
            path if path.is_file() else folder,
            f"the tokenizer fails: {reason_of(error)}",
            hint="give another text, or the tokenizer that the model was trained with",
        ) from error
