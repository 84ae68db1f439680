"""The conventions by which perplexity is told, by name; `conventions` says what they are.

Apart from those, so that a name that is none is refused before torch is imported.
"""

from __future__ import annotations

from typing import Literal

Name = Literal["bos", "token", "strided", "llama.cpp", "lm-eval"]
NAMES: tuple[Name, ...] = ("token", "strided", "llama.cpp", "lm-eval")

BOS: Name = "bos"
"""The additional convention for a tokenizer that puts BOS in front of a text."""


def special_text(special_tokens: str) -> str:
    """The words behind a rule for windows about special tokens before them; empty if there are none.

    >>> special_text("none"), special_text("BOS in front of each")
    ('', ', BOS in front of each')
    """
    return "" if special_tokens == "none" else f", {special_tokens}"
