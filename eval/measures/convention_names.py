"""The conventions by which perplexity is told, by name; `conventions` says what they are.

Apart from those, so that a name that is none is refused before torch is imported.
"""

from __future__ import annotations

from typing import Literal

Name = Literal["bos", "token", "strided", "llama.cpp", "lm-eval"]
NAMES: tuple[Name, ...] = ("token", "strided", "llama.cpp", "lm-eval")

BOS: Name = "bos"
"""What there is beside them for a tokenizer that puts BOS in front of a text."""


def special_text(special_tokens: str) -> str:
    """What is said behind a rule for windows of special tokens in front of them: nothing if there are none.

    >>> special_text("none"), special_text("BOS in front of each")
    ('', ', BOS in front of each')
    """
    return "" if special_tokens == "none" else f", {special_tokens}"
