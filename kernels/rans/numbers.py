"""The coder's constants, each with its reason. SPEC.md gives the same numbers."""

from __future__ import annotations

LANES = 32
"""States that share one sequence of words: a warp of a GPU, two vectors of a CPU."""

RUN = 8
"""Neighbouring weights that one lane decodes before the next run: 16 bytes of bf16, one store."""

RUNS = 64
"""Runs of a lane in a full block. 512 weights share a lane's 32 bits of state: 0.03 bits each."""

BLOCK = LANES * RUN * RUNS
"""Weights in a full block."""

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
"""Frequencies add up to SCALE: 4,096 table entries of 32 bits stay in a first-level cache."""

LOWER = 1 << 16
"""Least state between steps. Words have 16 bits, so one word is always enough to restore it."""

RAW_STEPS = 2
"""The last steps of a lane, whose symbols are the encoder's initial state: 2 x 8 bits below LOWER."""

HEADER_WORDS = 1 + 2 * LANES
"""A block begins with the number of its escapes and the low and high halves of 32 states."""

# A state is divided by a frequency f < 2^12 through a 64-bit product: before coding, state < f << 20, so
# state * ceil(2^44 / f) < 2^64, and the rounding of the reciprocal is too small to reach the next integer.
RECIPROCAL_BITS = 44

RARE_BITS = 16
"""A symbol below 2^-16 of all is an escape. The least frequency, 1 of 4,096, costs every other symbol
3.5e-4 bits; an escape costs about 40 bits. They break even at 2^-17, and a smaller table is the simpler."""

ESCAPE_BITS = 40
"""About what an escape takes: two words in the list, and the symbol in its place."""

LOW_BITS = (0, 1, 2, 4, 8)
"""Bits of a code on a grid that may be raw: whole codes of a byte hold them, so that no code is cut."""

LEFT_BITS = 7.5
"""Bits that a lane's state holds in the end beyond those it began with, on average: they take no words."""

assert LOWER % SCALE == 0
assert LOWER << 16 == SCALE << 20
