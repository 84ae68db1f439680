"""Numbers of the format of sparse deltas, see formats/SPEC.md."""

from __future__ import annotations

BLOCK_BITS = 12
BLOCK = 1 << BLOCK_BITS
"""Weights of a block. A tensor begins a block, and its last block may be shorter."""

COUNT_BITS = 13
"""Bits of a descriptor for a number of weights of a block."""

PLACE_FACTOR = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
"""Factors of the digest: those of SplitMix64 (Steele, Lea and Flood 2014, with the constants of Stafford)."""
