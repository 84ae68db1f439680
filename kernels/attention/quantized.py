"""Keys and values as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 128
"""Keys that are worked on at a time, and that are filled up to."""

GROUPS = 4
"""Scales of a block of keys: key j has number (j // 2) % 4."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """Quantised keys and values of B batches (or packed sequences) with Hkv heads of D numbers.

    k        int8 [B, Hkv, N, D], N being the keys filled up with zeros to a multiple of 128
    k_scale  fp32 [B, Hkv, N / 128, 4]
    k_mean   fp32 [B, Hkv, D], taken off before quantising
    v        float8_e4m3fn [B, Hkv, D, N]; within each 16 tokens in the order that `stored_token` says
    v_scale  fp32 [B, Hkv, D]
    v_mean   fp32 [B, Hkv, D], taken off before quantising, or None

    Of a pack the sequences share k [Hkv, N, D], k_scale [Hkv, N / 128, 4] and v [Hkv, D, N]: the blocks of
    sequence s begin with number starts[s] // 128 + s, and means and scales of channels are [S, Hkv, D].
    Blocks that no sequence has are not written.
    """

    k: Tensor
    k_scale: Tensor
    k_mean: Tensor
    v: Tensor
    v_scale: Tensor
    v_mean: Tensor | None

    @property
    def width(self) -> int:
        """D, numbers of a head."""
        return self.k.shape[-1]

    @property
    def capacity(self) -> int:
        """N, tokens that a head has memory for."""
        return self.k.shape[-2]


def stored_token(position: int) -> int:
    """Which of 16 tokens lies at a position of `Quantized.v`.

    A thread's products of q and k, columns 2q, 2q + 1, 2q + 8 and 2q + 9 of 16 for its number q, are four
    numbers side by side in the operand that is multiplied with v.
    """
    return position % 2 + position // 4 * 2 + position // 2 % 2 * 8
