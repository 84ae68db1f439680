"""The conventions by which perplexity is told, by name; `conventions` says what they are.

Apart from those, so that a name that is none is refused before torch is imported.
"""

from __future__ import annotations

from typing import Literal

Name = Literal["token", "strided", "llama.cpp", "lm-eval"]
NAMES: tuple[Name, ...] = ("token", "strided", "llama.cpp", "lm-eval")
