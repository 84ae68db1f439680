"""Exponents whose words are known: what decoders and encoders are checked with.

The reference makes the words, in plain Python, so that a check needs no other loop to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from . import reference
from .model import Table
from .numbers import LANES, RUN


@dataclass(frozen=True)
class CodedExponents:
    """A block of exponents below 16, so that every format has them, and its words."""

    table: Table
    exponents: npt.NDArray[np.uint8]
    words: npt.NDArray[np.uint16]


@cache
def coded_exponents(group: int, runs: int = 3) -> CodedExponents:
    """`runs` runs of each lane: frequent and rare symbols in all mixtures, one to 16 of them in a step.

    So any number of lanes takes a word at a time.
    """
    frequencies = np.zeros(256, np.uint16)
    usable = np.arange(16) if group == 1 else np.array([a | b << 4 for b in range(4) for a in range(4)])
    frequencies[usable] = [1, 1, 2, 3, 5, 8, 14, 24, 42, 72, 123, 211, 361, 618, 1058, 1553]
    table = Table(group, np.arange(16 if group == 1 else 4, dtype=np.uint16), frequencies)
    steps = runs * RUN // group
    at = np.arange(steps * LANES)
    rare = at * at // 7 % (1 + at // LANES % 16)  # the later the step, the more symbols
    symbols = usable[15 - rare].reshape(steps, LANES).tolist()
    exponents = np.array(reference.exponents_of(symbols, table), np.uint8)
    return CodedExponents(table, exponents, np.array(reference.encode_symbols(symbols, [], table), np.uint16))
