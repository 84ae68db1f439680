"""Heads in few bits, in plain torch: what they are, how they are written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuzip.kernels.quantizers import pack, quantize_heads, unpack, words
from neuzip.kernels.quantizers.kv import Range

EXTRA_BIT = 3
"""The number of bits with which the first token has one more."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Memory for the keys or the values of N tokens of B texts, see the package for the shapes.

    width  numbers of a head
    bits   of a code, 1 to 8
    """

    words: Tensor
    scale: Tensor
    low: Tensor | None
    first_bits: Tensor | None
    width: int
    bits: int

    @property
    def capacity(self) -> int:
        """How many tokens fit in."""
        return self.words.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, whether tokens are in them or not."""
        held = (self.words, self.scale, self.low, self.first_bits)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def tokens(self, start: int, stop: int) -> Heads:
        """The slice from one token to another: the same memory, the first token's bit as it is."""
        low = None if self.low is None else self.low[:, :, start:stop]
        return replace(self, words=self.words[:, :, start:stop], scale=self.scale[:, :, start:stop], low=low)

    def texts(self, choose: Callable[[Tensor], Tensor]) -> Heads:
        """Other texts in place of these: `choose` is given each tensor, [B, ...]."""
        low = None if self.low is None else choose(self.low)
        bits = None if self.first_bits is None else choose(self.first_bits)
        return replace(self, words=choose(self.words), scale=choose(self.scale), low=low, first_bits=bits)

    def copy_(self, other: Heads) -> None:
        """Take over all tokens of another, whose capacity is as large, and its first token's bit."""
        for mine, others in (
            (self.words, other.words),
            (self.scale, other.scale),
            (self.low, other.low),
            (self.first_bits, other.first_bits),
        ):
            if mine is not None and others is not None:
                mine.copy_(others)


def empty(
    shape: tuple[int, int, int, int],
    bits: int,
    *,
    span: Range = "absmax",
    scale_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> Heads:
    """Memory for [B, H, N, width] numbers, which are 0 so far."""
    batch, heads, tokens, width = shape

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Heads(
        zeros(batch, heads, tokens, words(width, bits), dtype=torch.int32),
        zeros(batch, heads, tokens, dtype=scale_dtype),
        zeros(batch, heads, tokens, dtype=scale_dtype) if span == "minmax" else None,
        zeros(batch, heads, words(width, 1), dtype=torch.int32) if bits == EXTRA_BIT else None,
        width,
        bits,
    )


def store(heads: Heads, x: Tensor, at: int | Tensor, first: Tensor, *, with_first: bool = True) -> None:
    """Quantise x [B, H, T, width] and write it to tokens from `at` on: `kv_cache.store` for one `Heads`."""
    tokens = x.shape[2]
    at = at.flatten()[0] if isinstance(at, Tensor) else at
    span: Range = "absmax" if heads.low is None else "minmax"
    quantized = quantize_heads(x, heads.bits, span=span, scale_dtype=heads.scale.dtype)
    codes, scale, low = quantized.codes, quantized.scale, quantized.low
    if heads.first_bits is not None and with_first and tokens:
        place = first - at
        inside = ((place >= 0) & (place < tokens))[:, None, None, None]
        where = place.clamp(0, tokens - 1)[:, None, None, None].expand(-1, x.shape[1], 1, -1)
        its = quantize_heads(
            x.gather(2, where.expand(-1, -1, -1, heads.width)),
            heads.bits + 1, span=span, scale_dtype=heads.scale.dtype,
        )  # fmt: skip
        upper = pack(its.codes[:, :, 0] >> heads.bits, 1)
        heads.first_bits.copy_(torch.where(inside[..., 0], upper, heads.first_bits))
        is_first = inside & (torch.arange(tokens, device=x.device)[:, None] == where[:, :, :1])
        codes = torch.where(is_first, its.codes & ((1 << heads.bits) - 1), codes)
        scale = torch.where(is_first, its.scale, scale)
        low = torch.where(is_first, its.low, low) if its.low is not None and low is not None else None
    to = torch.arange(tokens, device=x.device) + at
    heads.words.index_copy_(2, to, pack(codes, heads.bits))
    heads.scale.index_copy_(2, to, scale[..., 0])
    if heads.low is not None and low is not None:
        heads.low.index_copy_(2, to, low[..., 0])


def load(heads: Heads, first: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of all tokens in `dtype`, [B, H, N, width]: `kv_cache.load` in torch."""
    codes = unpack(heads.words, heads.bits, heads.width)
    half: float | Tensor = ((1 << heads.bits) - 1) / 2
    if heads.first_bits is not None:
        is_first = torch.arange(heads.capacity, device=first.device) == first[:, None]
        is_first = is_first[:, None, :, None]
        upper = unpack(heads.first_bits, 1, heads.width)[:, :, None] << heads.bits
        codes = torch.where(is_first, codes | upper, codes)
        half = torch.where(is_first, ((2 << heads.bits) - 1) / 2, half)
    scale = heads.scale[..., None].float()
    if heads.low is None:
        return ((codes - half) * scale).to(dtype)
    return (codes * scale + heads.low[..., None].float()).to(dtype)
