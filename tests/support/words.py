"""Private words and the standard ones, for everything that a user reads: help, messages, pages.

from words import private_words
assert not private_words(text)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PRIVATE: Mapping[str, str] = {
    r"\bgo(es|ing|ne)? on with\b": "continue, generate; resume",
    r"\bgo(es|ing|ne)? on (where|after|from|there)\b": "resume",
    r"\b(begins?|begun) anew\b": "start again",
    r"\bbears?\b": "tolerate; sensitivity",
    r"\bas (it|they) (lies?|stands?)\b": "directly, without unpacking",
    r"\bnormalisers?\b": "per-block scale",
    r"\blikeliest\b": "most likely; top-1 agreement",
    r"\bmade[- ]up\b": "random, synthetic",
    r"\bof (ours|yours|neuzip's)\b": "our, your, neuzip's",
    r"\bbeside\b": "compared with, in addition to, next to, baseline",
    r"\b(nats|bits|bytes|tokens|scales?|words|texts?|[kMG]B) an? "
    r"(token|weight|row|word|byte|second|number|value|tensor|head|window|step|layer|line)\b": "per",
    r"\ba (line|pass|JSON file) an? (step|tensor|scheme)\b": "one ... per ...",
    r"\b(is|are) to be\b": "must, will, should",
    r"\bsome \d": "about N",
    r"\bno (fewer|more|larger|less|greater|later|earlier) than\b": "at most, at least",
    r"\bk ?= ?\d": "N mantissa bits",
    r"\bin so (few|many) bits\b": "in N bits",
    r"\bin how many bits\b": "attention precision",
    r"\bkeys and values in\b": "quantised KV cache",
    r"\b(is|are) worth\b(?! more)": "layer importance",
    r"\bheld (losslessly )?compressed\b": "stored compressed",
    r"\bsmall forms?\b": "compressed in-memory format",
    r"\bnorms elsewhere\b": "norm placement",
    r"\bwrong use\b": "usage error",
    r"\bbugs? of ours\b": "internal error",
    r"\b(is|are|be) had\b": "is available",
    r"\bin vain\b": "without effect",
    r"\bquantised inputs\b|\binputs of \d bits\b|\bidle inputs\b": "(quantised) activations",
    r"\bwarm(s|ed)? (quantisation )?up in\b": "ramp up over",
    r"\bmissed (least|most|more)\b": "least important",
    r"\bharm(s|ed)?\b": "degrade",
    r"\bformed\b(?= logits)|\blogits were formed\b": "materialised logits",
    r"\bgot over\b": "recovered",
    r"\bfront doors?\b": "public API",
}
"""A word by its pattern, and what to write for it. A page that defines such a word, as the glossary does, may
have it; names of options (`--residency`), keys and code are left out before a text is looked at."""


def private_words(text: str) -> list[str]:
    """The private words of a text outside `code`, each with what to write for it.

    >>> private_words("0.3 nats a token; `k=3`")
    ['nats a token: per']
    """
    prose = re.sub(r"`[^`]*`", "CODE", text)
    return [
        f"{found[0]}: {standard}"
        for pattern, standard in PRIVATE.items()
        for found in re.finditer(pattern, prose, re.IGNORECASE)
    ]
