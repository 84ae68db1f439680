"""The BOS that tokenizers of some models put in front of every text, as those of Llama and Gemma do.

A model that was trained so may predict nothing of use without it: whoever feeds it begins with this token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuzip.runtime.hf.tokenizer import naming_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IN_FRONT_OF_EACH = "BOS in front of each"
"""What is said of windows that begin with it."""


def bos_in_front(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS that a tokenizer puts in front of a text by itself, None if it puts none there."""
    with naming_tokenizer(tokenizer):
        ids, alone = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    if ids == alone:
        return None
    bos = tokenizer.bos_token_id
    return bos if isinstance(bos, int) and ids and ids[0] == bos else None


def behind(front: int | None, rows: Tensor) -> Tensor:
    """Rows of tokens, int64 [n, T], with `front` before each, [n, T + 1]; as they are if it is None."""
    return rows if front is None else torch.cat([torch.full((len(rows), 1), front), rows], dim=1)


def rows_behind(front: int | None, ids: Tensor, width: int) -> Tensor:
    """Tokens, int64 [n], in rows that a model reads, [rows, width], each begun with `front` if there is one.

    What fills no row is left out. `width` is at least 1, with a `front` at least 2.
    """
    own = width if front is None else width - 1
    return behind(front, ids[: len(ids) // own * own].view(-1, own))
